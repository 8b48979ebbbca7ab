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
// On TCP the read event waits for what await() says (SO_RCVLOWAT), up to 48 KiB of it, or half a window where the kernel
// would acknowledge no more, so that a reader is not woken for each packet.
#pragma once

#include <sys/epoll.h>

#include <atomic>
#include <cstdint>
#include <limits>

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

  // How many bytes may be in flight on one of the connections that share a link. Always more than what the path itself
  // holds at the link's rate, so if this bound keeps the rate low, it grows; and of all connections together no more than
  // fits into a queue of 20 ms, unless they are so many that each has the least that there is. Whole KiB.
  static uint64_t bytes_under_way(const LinkShare& link, uint32_t min_rtt_us);

  // Whether those with such a bound are so many that what they may have in flight fills a queue. Only then it is worth a
  // look whether one stands still.
  static bool are_many(uint64_t bound);

  // Whether a path is so short that another congestion control takes the place of BBR where that is the system's
  // default: connections that take turns by priority do not get their rates from it (docs/decisions.md).
  static bool is_short(uint32_t min_rtt_us);

 protected:
  // The most that is handed to the kernel at once, and then cannot be overtaken.
  size_t piece_bytes() const;

 private:
  IoResult send(Piece& piece, bool ends_segment);
  void look_at_path();
  void bound_send_buffer(uint64_t bytes);
  bool set_send_buffer();
  bool measure_path();
  bool has_short_segments() const;
  void leave_bbr();

  int fd_;
  bool is_tcp_ = false;
  bool has_bbr_ = false;
  bool awaits_much_ = false;  // from the start on; the reader goes by it
  LinkRate own_link_;         // until it shares one
  LinkRate* link_ = &own_link_;
  // Of all that the kernel has told; none at first.
  uint32_t min_rtt_us_ = std::numeric_limits<uint32_t>::max();
  uint64_t looked_at_ = 0;          // the link's version
  uint64_t filled_in_ = 0;          // the link's note
  std::atomic<uint64_t> bound_{0};  // of the send buffer; the reader goes by it, too
  bool is_bounded_ = false;         // false: the kernel's own choice
  int low_water_ = 1;               // the reader's, as the kernel has it
};

}  // namespace p3
