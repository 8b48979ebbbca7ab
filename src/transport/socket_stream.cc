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
#include "transport/parts.h"

namespace p3 {
namespace {

// Between two looks at what the kernel has measured.
constexpr uint64_t kBytesPerLook = 1 << 20;

// What lies in front of the link besides what the path holds: on a slow one enough for a sender that wakes up late, on
// a fast one enough for the kernel to work in full segments.
constexpr uint64_t kQueuedMicroseconds = 1000;
constexpr uint64_t kSpareMicroseconds = 5000;
constexpr uint64_t kMostSpareBytes = 64 << 10;
constexpr uint64_t kLeastBound = 8 << 10;
constexpr uint64_t kFirstBound = 16 << 10;  // until a rate is known
constexpr uint64_t kYieldingShare = 4;
// What is handed to the kernel at once, at least; and how many of them make a bound.
constexpr uint64_t kLeastPiece = 8 << 10;
constexpr uint64_t kPiecesPerBound = 4;

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
  if (is_tcp_) bound_send_buffer(kFirstBound);
}

SocketStream::~SocketStream() { SocketStream::close(); }

// The kernel asks whether the send buffer is full only before it begins a segment, which it then fills up to 64 KiB
// however little the buffer may hold. So what is bounded is written in pieces, each the end of its segment; what is
// shorter may share one.
IoResult SocketStream::write(const iovec* parts, int count) {
  const size_t most = piece_bytes();
  IoResult result;
  for (bool is_full = false; !is_full;) {
    Piece piece(parts, count, result.bytes, most);
    if (piece.count == 0) break;
    const IoResult sent = send(piece, ends_segments_ && piece.bytes > most / 2);
    result.bytes += sent.bytes;
    is_full = sent.bytes < piece.bytes;
    if (result.bytes == 0) result.error = sent.error;
  }
  written_since_look_ += result.bytes;
  if (is_tcp_ && written_since_look_ >= kBytesPerLook) look_at_path();
  return result;
}

IoResult SocketStream::send(Piece& piece, bool ends_segment) {
  msghdr message{};
  message.msg_iov = piece.parts;
  message.msg_iovlen = static_cast<size_t>(piece.count);
  ssize_t n;
  do n = sendmsg(fd_, &message, MSG_DONTWAIT | MSG_NOSIGNAL | (ends_segment ? MSG_EOR : 0));
  while (n < 0 && errno == EINTR);
  if (n < 0) return {0, errno == EWOULDBLOCK ? EAGAIN : errno, false};
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
  const uint64_t bound = bytes_under_way(peak_rate_, info.tcpi_min_rtt);
  if (bound > bound_ || bound < bound_ / 2) bound_send_buffer(bound);
  if (bbr_is_default_ && written_since_choice_ >= kBytesPerChoice) choose_congestion_control(info.tcpi_delivery_rate);
}

uint64_t SocketStream::bytes_under_way(uint64_t rate, uint32_t min_rtt_us) {
  const uint64_t path = rate * (kQueuedMicroseconds + 5 * uint64_t{min_rtt_us} / 2) / 1'000'000;
  const uint64_t spare = std::min(kMostSpareBytes, rate * kSpareMicroseconds / 1'000'000);
  uint64_t power = kLeastBound;
  while (power <= path + spare) power *= 2;
  return power;
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
  const int wanted = static_cast<int>(std::min<uint64_t>(bound_now() / 2, std::numeric_limits<int>::max() / 2));
  int got = 0;
  socklen_t length = sizeof got;
  setsockopt(fd_, SOL_SOCKET, SO_SNDBUF, &wanted, sizeof wanted);
  return getsockopt(fd_, SOL_SOCKET, SO_SNDBUF, &got, &length) != 0 || got >= 2 * wanted;
}

size_t SocketStream::piece_bytes() const {
  return is_bounded_ ? piece_of(bound_now()) : std::numeric_limits<size_t>::max();
}

uint64_t SocketStream::piece_of(uint64_t bound) { return std::max(kLeastPiece, bound / kPiecesPerBound); }

uint64_t SocketStream::bound_now() const { return yields_ ? bound_ / kYieldingShare : bound_; }

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
