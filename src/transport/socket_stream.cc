#include "p3/socket_stream.h"

#include <fcntl.h>
#include <linux/tcp.h>  // not netinet/tcp.h, whose tcp_info lacks the delivery rate
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <limits>
#include <utility>

#include "base/epoll.h"

namespace p3 {
namespace {

// Between two looks at what the kernel has measured.
constexpr uint64_t kBytesPerLook = 1 << 20;

// What lies in front of a slow link: a few full segments, without which TCP cannot keep it busy, and 1 ms more.
constexpr uint64_t kLeastOfLink = 64 << 10;
constexpr uint64_t kQueuedMicroseconds = 1000;
constexpr uint64_t kLeastBound = 32 << 10;
constexpr uint64_t kYieldingShare = 4;

constexpr uint64_t kFastBytesPerSecond = 250'000'000;  // 2 Gbit/s
// Between two choices of the congestion control; it takes a while to settle.
constexpr uint64_t kBytesPerChoice = 16 << 20;

#ifndef SO_BUF_LOCK
#define SO_BUF_LOCK 72  // Linux 5.14
#endif

}  // namespace

SocketStream::SocketStream(int fd, int notsent_low_water_bytes) : fd_(fd) {
  fcntl(fd_, F_SETFL, fcntl(fd_, F_GETFL, 0) | O_NONBLOCK);
  // These fail on AF_UNIX, which has neither delay nor unsent bytes.
  const int on = 1;
  setsockopt(fd_, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  setsockopt(fd_, IPPROTO_TCP, TCP_NOTSENT_LOWAT, &notsent_low_water_bytes, sizeof notsent_low_water_bytes);
  char name[16] = "";
  socklen_t length = sizeof name - 1;
  is_tcp_ = getsockopt(fd_, IPPROTO_TCP, TCP_CONGESTION, name, &length) == 0;
  bbr_is_default_ = paces_ = is_tcp_ && std::strcmp(name, "bbr") == 0;
  share_link(1);
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
  written_since_look_ += static_cast<uint64_t>(n);
  if (is_tcp_ && written_since_look_ >= kBytesPerLook) look_at_path();
  return {static_cast<size_t>(n), 0, false};
}

void SocketStream::look_at_path() {
  const auto now = std::chrono::steady_clock::now();
  const double seconds = std::chrono::duration<double>(now - std::exchange(last_look_, now)).count();
  const uint64_t written = std::exchange(written_since_look_, 0);
  written_since_choice_ += written;
  tcp_info info{};
  socklen_t length = sizeof info;
  if (getsockopt(fd_, IPPROTO_TCP, TCP_INFO, &info, &length) != 0 ||
      length < offsetof(tcp_info, tcpi_delivery_rate) + sizeof info.tcpi_delivery_rate)
    return;
  // Not the kernel's delivery rate, which takes what a token bucket lets pass at once for the rate of the path.
  const auto rate = static_cast<uint64_t>(static_cast<double>(written) / seconds);
  peak_rate_ = std::max(rate, peak_rate_ - peak_rate_ / 64);
  const uint64_t bound = bytes_under_way(peak_rate_, info.tcpi_min_rtt, connections_);
  if (bound > bound_ || bound < bound_ / 2) bound_send_buffer(bound);
  if (bbr_is_default_ && written_since_choice_ >= kBytesPerChoice) choose_congestion_control(info.tcpi_delivery_rate);
}

uint64_t SocketStream::bytes_under_way(uint64_t rate, uint32_t min_rtt_us, int connections) {
  const uint64_t path = rate * (kQueuedMicroseconds + 5 * uint64_t{min_rtt_us} / 2) / 1'000'000;
  uint64_t power = kLeastBound;
  // Not a share of it for each: seldom do all have something to send.
  while (power <= 2 * kLeastOfLink / static_cast<uint64_t>(connections + 1) + path) power *= 2;
  return power;
}

void SocketStream::share_link(int connections) {
  connections_ = connections;
  if (is_tcp_) bound_send_buffer(bytes_under_way(0, 0, connections));
}

void SocketStream::bound_send_buffer(uint64_t bytes) {
  bound_ = bytes;
  is_bounded_ = set_send_buffer();
  if (is_bounded_) return;
  // More than a process may ask for (net.core.wmem_max) is more than needs a bound: the kernel's own choice again.
  const int unlocked = 0;
  setsockopt(fd_, SOL_SOCKET, SO_BUF_LOCK, &unlocked, sizeof unlocked);
}

// The kernel takes half of a send buffer for its own records, so it doubles what it is asked for. False: less was had.
bool SocketStream::set_send_buffer() {
  const uint64_t bytes = yields_ ? bound_ / kYieldingShare : bound_;
  const int wanted = static_cast<int>(std::min<uint64_t>(bytes / 2, std::numeric_limits<int>::max() / 2));
  int got = 0;
  socklen_t length = sizeof got;
  setsockopt(fd_, SOL_SOCKET, SO_SNDBUF, &wanted, sizeof wanted);
  return getsockopt(fd_, SOL_SOCKET, SO_SNDBUF, &got, &length) != 0 || got >= 2 * wanted;
}

void SocketStream::yield(bool yields) {
  if (yields == yields_) return;
  yields_ = yields;
  if (is_bounded_) set_send_buffer();
}

bool SocketStream::should_pace(bool paces_now, uint64_t delivery_rate) {
  return delivery_rate < (paces_now ? kFastBytesPerSecond : kFastBytesPerSecond / 2);
}

void SocketStream::choose_congestion_control(uint64_t delivery_rate) {
  written_since_choice_ = 0;
  const bool pace = should_pace(paces_, delivery_rate);
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

void SocketStream::end_writing() { shutdown(fd_, SHUT_WR); }

void SocketStream::close() { close_if_open(fd_); }

}  // namespace p3
