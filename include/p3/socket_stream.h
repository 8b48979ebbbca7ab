// A Stream over a connected TCP or AF_UNIX socket.
#pragma once

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

 private:
  int fd_;
};

}  // namespace p3
