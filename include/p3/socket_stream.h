// A Stream over a connected TCP or AF_UNIX socket.
#pragma once

#include <cstdint>

#include "p3/stream.h"

namespace p3 {

class SocketStream : public Stream {
 public:
  // Owns `fd`. Makes it non-blocking; on TCP sets TCP_NODELAY and TCP_NOTSENT_LOWAT, so that the kernel holds little
  // that is not yet sent and a more urgent slice has little to overtake.
  SocketStream(int fd, int notsent_low_water_bytes);
  ~SocketStream() override;

  IoResult write(const iovec* parts, int count) override;
  IoResult read(const iovec* parts, int count) override;
  int read_fd() const override { return fd_; }
  int write_fd() const override { return fd_; }
  uint32_t write_event() const override;
  void end_writing() override;
  void close() override;

  // Whether BBR, where it is the system's choice, shall stay or come back at a delivery rate in bytes per second.
  // BBR sends each segment by a timer of its own. On a slow link that keeps the queues short at no cost; at several
  // Gbit/s the timers take as much of the processor as the copies do (docs/decisions.md), and the queues are short
  // anyhow. In between, what is stays.
  static bool should_pace(bool paces_now, uint64_t delivery_rate);

 private:
  void choose_congestion_control();

  int fd_;
  bool bbr_is_default_ = false;
  bool paces_ = false;
  uint64_t written_since_choice_ = 0;
};

}  // namespace p3
