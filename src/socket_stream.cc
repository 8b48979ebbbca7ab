#include "p3/socket_stream.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>

namespace p3 {

SocketStream::SocketStream(int fd, int notsent_low_water_bytes) : fd_(fd) {
  fcntl(fd_, F_SETFL, fcntl(fd_, F_GETFL, 0) | O_NONBLOCK);
  // These fail on AF_UNIX, which has neither delay nor unsent bytes.
  const int on = 1;
  setsockopt(fd_, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  setsockopt(fd_, IPPROTO_TCP, TCP_NOTSENT_LOWAT, &notsent_low_water_bytes, sizeof notsent_low_water_bytes);
}

SocketStream::~SocketStream() { SocketStream::close(); }

IoResult SocketStream::write(const iovec* parts, int count) {
  msghdr message{};
  message.msg_iov = const_cast<iovec*>(parts);
  message.msg_iovlen = static_cast<size_t>(count);
  ssize_t n;
  do n = sendmsg(fd_, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
  while (n < 0 && errno == EINTR);
  if (n < 0) return {0, errno == EWOULDBLOCK ? EAGAIN : errno, false};
  return {static_cast<size_t>(n), 0, false};
}

IoResult SocketStream::read(const iovec* parts, int count) {
  msghdr message{};
  message.msg_iov = const_cast<iovec*>(parts);
  message.msg_iovlen = static_cast<size_t>(count);
  ssize_t n;
  do n = recvmsg(fd_, &message, MSG_DONTWAIT);
  while (n < 0 && errno == EINTR);
  if (n < 0) return {0, errno == EWOULDBLOCK ? EAGAIN : errno, false};
  return {static_cast<size_t>(n), 0, n == 0};
}

uint32_t SocketStream::write_event() const { return EPOLLOUT; }

void SocketStream::end_writing() {
  if (fd_ >= 0) shutdown(fd_, SHUT_WR);
}

void SocketStream::close() {
  if (fd_ >= 0) ::close(fd_);
  fd_ = -1;
}

}  // namespace p3
