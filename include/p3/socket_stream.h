// A Stream over a connected TCP or AF_UNIX socket.
//
// What the kernel and the network hold can no longer be overtaken, so on TCP it is kept small: bytes that are not yet
// sent by TCP_NOTSENT_LOWAT, and all that are not yet acknowledged by a send buffer of about what keeps the path busy,
// resized continually from the rate at which it drains and the kernel's round-trip time, and by writing in pieces, as
// the kernel would exceed a small buffer by a whole segment. Equal buffers also give the worker and the server of one
// host, which share a link, equal shares of it.
#pragma once

#include <sys/epoll.h>

#include <chrono>
#include <cstdint>

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
  int read_fd() const override { return fd_; }
  int write_fd() const override { return fd_; }
  uint32_t write_event() const override { return EPOLLOUT; }
  bool leaves_machine() const override { return is_tcp_; }
  void yield(bool yields) override;
  void end_writing() override;
  void close() override;

  // How many bytes may be in flight at a rate in bytes per second, which is this connection's own share of a link.
  // Always more than the path itself holds, so if this bound keeps the rate low, it grows. Powers of two, so that
  // connections that share a link agree on one although their measurements differ.
  static uint64_t bytes_under_way(uint64_t rate, uint32_t min_rtt_us);
  // What is handed to the kernel at once, at most, where so many bytes may be in flight.
  static uint64_t piece_of(uint64_t bound);

  // Whether to use BBR, where it is the system's default, at a delivery rate in bytes per second. BBR sends each
  // segment by a timer of its own. On a slow link that keeps the queues short at no cost; at several Gbit/s the timers
  // take as much processor time as the copies do (docs/decisions.md), and the queues are short anyway. In between, the
  // current choice stays.
  static bool should_pace(bool paces_now, uint64_t delivery_rate);

 protected:
  // Of a kernel that encrypts, which knows no mark for it on older systems. Before the first write.
  void end_no_segments() { ends_segments_ = false; }
  // The most that is handed to the kernel at once, and then cannot be overtaken.
  size_t piece_bytes() const;

 private:
  IoResult send(Piece& piece, bool ends_segment);
  void look_at_path();
  void bound_send_buffer(uint64_t bytes);
  bool set_send_buffer();
  uint64_t bound_now() const;
  void choose_congestion_control(uint64_t delivery_rate);

  int fd_;
  bool is_tcp_ = false;
  bool bbr_is_default_ = false;
  bool paces_ = false;
  std::chrono::steady_clock::time_point last_look_ = std::chrono::steady_clock::now();
  uint64_t peak_rate_ = 0;   // bytes per second; recent, with the link to itself
  uint64_t bound_ = 0;       // of the send buffer
  bool is_bounded_ = false;  // false: the kernel's own choice
  bool yields_ = false;
  bool ends_segments_ = true;
  uint64_t written_since_look_ = 0;
  uint64_t written_since_choice_ = 0;
};

}  // namespace p3
