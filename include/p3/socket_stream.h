// A Stream over a connected TCP or AF_UNIX socket.
//
// What the kernel and the network hold can no longer be overtaken, so on TCP it is kept small: bytes that are not yet
// sent by TCP_NOTSENT_LOWAT, and all that are not yet acknowledged by a send buffer of about what keeps the path busy,
// and by writing in pieces no larger than that, as the kernel would exceed a small buffer by a whole segment. The buffer
// follows the rate of the link and the number of connections that fill it, both as the job has agreed on them (LinkRate),
// and the least round-trip time that the connection has ever had. Equal buffers give the connections of a host equal
// shares of its link. A connection between two processes of one machine has a buffer by its own rate: it has no part in
// the link.
//
// Where the path is long, a round trip of more than 10 ms, the window is the kernel's, by the congestion control, BBR where
// that may be had; and what is equal is the pace: no connection sends faster than its share of the link. What is unsent is
// kept small as everywhere.
//
// On TCP the read event waits for what await() says (SO_RCVLOWAT), up to 48 KiB of it, or half a window where the kernel
// would acknowledge no more, so that a reader is not woken for each packet.
#pragma once

#include <sys/epoll.h>

#include <atomic>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "p3/link_rate.h"
#include "p3/stream.h"

namespace p3 {

struct Piece;  // transport/parts.h

class SocketStream : public Stream {
 public:
  // Owns `fd`. Makes it non-blocking; on TCP sets TCP_NODELAY and TCP_NOTSENT_LOWAT.
  SocketStream(int fd, int notsent_low_water_bytes);
  ~SocketStream() override;

  IoResult write(const iovec* parts, int count) override;
  IoResult read(const iovec* parts, int count) override;
  void await(size_t bytes) override;
  int read_fd() const override { return fd_; }
  int write_fd() const override { return fd_; }
  uint32_t write_event() const override { return EPOLLOUT; }
  void share_link(LinkRate* link) override;
  bool may_stand_still() const override;
  bool try_again() override;
  void end_writing() override;
  void close() override;

  // Bytes per second that a connection of a long path sends at most: its share of the link, or a quarter more, to find out
  // whether the link is faster than is known. Connections that share a link and each send as fast as they might alone fill
  // its queues many times over before the path tells of a loss. Of a rate that nobody knows: as fast as it may.
  static uint64_t pace_of(const LinkShare& link, bool probes);

  // How many bytes may be in flight on one of the connections that share a link. Always more than what the path itself
  // holds at the link's rate, so if this bound keeps the rate low, it grows; and of all connections together no more than
  // fits into a queue of 20 ms, unless they are so many that each has the least that there is. Whole KiB.
  static uint64_t bytes_under_way(const LinkShare& link, uint32_t min_rtt_us);

  // Whether those with such a bound are so many that what they may have in flight fills a queue. Only then it is worth a
  // look whether one stands still.
  static bool are_many(uint64_t bound);

  // How much of such a piece is handed to the kernel at once where the congestion window is of so many segments: all, or if
  // it holds no two of them, half of what it holds. The kernel sends no more than that half at once: it would split the
  // piece, and keep its end back until the rest has left the machine's own queue. Asked where a bound is a piece at least.
  static uint64_t fitting_piece(uint64_t piece, uint32_t congestion_window, uint32_t segment_bytes);

  // Whether a path is so short that connections which take turns by priority need no congestion control but their bound;
  // or so long that they do. Neither: it has not been measured (~0).
  static bool is_short(uint32_t min_rtt_us);
  static bool is_long(uint32_t min_rtt_us);

  // The congestion controls to ask the kernel for, the best first, on a path and in place of what a connection has; none:
  // it keeps that. On short paths another takes the place of BBR, on long ones BBR that of another (docs/decisions.md).
  static std::vector<const char*> better_congestion(const std::string& has, uint32_t min_rtt_us);

 protected:
  // The most that is handed to the kernel at once, and then cannot be overtaken.
  size_t piece_bytes() const;

 private:
  IoResult send(Piece& piece, bool ends_segment);
  void look_at_path();
  void bound_send_buffer(uint64_t bytes);
  bool set_send_buffer();
  uint64_t piece_of_bound() const;
  bool is_congested() const;
  void bound_by(const LinkShare& link);
  void pace(uint64_t most);
  bool measure_path();
  void note_delivered();
  bool has_short_segments() const;
  void choose_congestion();

  int fd_;
  bool is_tcp_ = false;
  std::string congestion_;                            // the control that it has
  const char* asked_ = nullptr;                       // for one, last
  static constexpr uint64_t kUnpaced = ~uint64_t{0};  // as the kernel has it
  uint64_t pace_ = kUnpaced;                          // bytes per second
  bool awaits_much_ = false;                          // from the start on; the reader goes by it
  LinkRate own_link_;                                 // until it shares one
  LinkRate* link_ = &own_link_;
  // Of all that the kernel has told; none at first.
  uint32_t min_rtt_us_ = std::numeric_limits<uint32_t>::max();
  // What the kernel told last.
  uint32_t congestion_window_ = 0;  // of segments
  uint32_t segment_bytes_ = 0;
  uint32_t delivered_segments_ = 0;  // not bytes, as those that came behind a lost one count at once
  uint64_t delivered_ = 0;           // bytes
  LinkRate::Clock::time_point delivered_at_{};
  uint64_t looked_at_ = 0;          // the link's version
  uint64_t filled_in_ = 0;          // the link's note
  std::atomic<uint64_t> bound_{0};  // of the send buffer; the reader goes by it, too
  bool is_bounded_ = false;         // false: the kernel's own choice
  bool was_congested_ = false;      // when the send buffer was set
  int low_water_ = 1;               // the reader's, as the kernel has it
};

}  // namespace p3
