#include "p3/socket_stream.h"

#include <fcntl.h>
#include <linux/tcp.h>  // not netinet/tcp.h, whose tcp_info lacks the delivery rate
#include <netinet/in.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstring>

namespace p3 {
namespace {

constexpr uint64_t kFastBytesPerSecond = 250'000'000;  // 2 Gbit/s
// Between two choices; enough for a delivery rate that is no accident.
constexpr uint64_t kBytesPerChoice = 16 << 20;

}  // namespace

SocketStream::SocketStream(int fd, int notsent_low_water_bytes) : fd_(fd) {
  fcntl(fd_, F_SETFL, fcntl(fd_, F_GETFL, 0) | O_NONBLOCK);
  // These fail on AF_UNIX, which has neither delay nor unsent bytes.
  const int on = 1;
  setsockopt(fd_, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  setsockopt(fd_, IPPROTO_TCP, TCP_NOTSENT_LOWAT, &notsent_low_water_bytes, sizeof notsent_low_water_bytes);
  char name[16] = "";
  socklen_t length = sizeof name - 1;
  bbr_is_default_ = paces_ =
      getsockopt(fd_, IPPROTO_TCP, TCP_CONGESTION, name, &length) == 0 && std::strcmp(name, "bbr") == 0;
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
  written_since_choice_ += static_cast<uint64_t>(n);
  if (bbr_is_default_ && written_since_choice_ >= kBytesPerChoice) choose_congestion_control();
  return {static_cast<size_t>(n), 0, false};
}

bool SocketStream::should_pace(bool paces_now, uint64_t delivery_rate) {
  return delivery_rate < (paces_now ? kFastBytesPerSecond : kFastBytesPerSecond / 2);
}

void SocketStream::choose_congestion_control() {
  written_since_choice_ = 0;
  tcp_info info{};
  socklen_t length = sizeof info;
  if (getsockopt(fd_, IPPROTO_TCP, TCP_INFO, &info, &length) != 0 ||
      length < offsetof(tcp_info, tcpi_delivery_rate) + sizeof info.tcpi_delivery_rate)
    return;
  const bool pace = should_pace(paces_, info.tcpi_delivery_rate);
  const char* name = pace ? "bbr" : "cubic";
  if (pace != paces_ &&
      setsockopt(fd_, IPPROTO_TCP, TCP_CONGESTION, name, static_cast<socklen_t>(std::strlen(name))) == 0)
    paces_ = pace;
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
