#include "p3/socket_stream.h"

#include <fcntl.h>
#include <linux/tcp.h>  // not netinet/tcp.h, whose tcp_info lacks the minimum round-trip time
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdio>
#include <limits>
#include <utility>

#include "base/epoll.h"
#include "transport/parts.h"
#include "transport/streams/network_card.h"

namespace p3 {
namespace {

// What lies in front of the link besides what the path holds, for all connections of a machine together: enough for a
// sender that wakes up late, and on fast links for the kernel to work in full segments; less than a queue of 20 ms holds.
constexpr uint64_t kSpareBytes = 32 << 10;
constexpr uint64_t kSpareMicroseconds = 6000;  // and what the link carries in that time
constexpr uint32_t kNearMicroseconds = 1000;   // for paths up to there, that is enough
constexpr uint64_t kLeastBound = 8 << 10;
// Where connections are so many that not even these fit into a queue together, less: down to three packets, about the least
// that the kernel grants. A queue holds what the link carries in 20 ms, and on slow links so much at least.
constexpr uint64_t kLeastBoundOfMany = 4 << 10;
constexpr uint64_t kQueueMicroseconds = 20000, kLeastQueue = 14 * kLeastBound;
constexpr uint64_t kFirstBound = 16 << 10;  // until a rate is known
// What is handed to the kernel at once is as much as may be in flight, but where that is at least kLeastBound no less than
// a quarter of a slice of 10,000 elements, and never more than what the kernel makes one segment of.
constexpr uint64_t kLeastPiece = 10 << 10, kMostPiece = 60 << 10;
constexpr uint64_t kLeastPart = 1 << 10;  // of a piece, whatever the congestion window

// Less than a few packets is worth no system call; more than that might not fit into the kernel's receive buffer (128 KiB
// at first) with all that it keeps for each packet.
constexpr size_t kLeastAwaited = 4 << 10, kMostAwaited = 48 << 10;

// Longer paths hold more than a queue of 20 ms that all connections of a machine share.
constexpr uint32_t kShortRoundTripMicroseconds = 10'000;
constexpr uint64_t kNoBound = std::numeric_limits<uint64_t>::max();
constexpr uint64_t kAsFastAsItMay = std::numeric_limits<int64_t>::max();  // but paced, as whatever has a limit is

#ifndef SO_BUF_LOCK
#define SO_BUF_LOCK 72  // Linux 5.14
#endif

// Linux 4.18 and later acknowledge at once what is less than the reader awaits, if it is more than a segment, and make room
// for all of that.
bool acknowledges_what_is_awaited() {
  static const bool does = [] {
    utsname kernel{};
    int major = 0, minor = 0;
    return uname(&kernel) == 0 && std::sscanf(kernel.release, "%d.%d", &major, &minor) == 2 &&
           (major > 4 || (major == 4 && minor >= 18));
  }();
  return does;
}

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
  congestion_ = name;
  if (!is_tcp_) return;
  if (measure_path()) choose_congestion();
  bound_by({});
  awaits_much_ = acknowledges_what_is_awaited() && has_short_segments();
}

SocketStream::~SocketStream() { SocketStream::close(); }

// What crosses no network is much faster than what does, and would raise all windows of the job.
void SocketStream::share_link(LinkRate* link) {
  if (!is_tcp_ || NetworkCard::of_peer(fd_).is_known()) return;
  link_ = link;
  filled_in_ = 0;
  link_->leaves_by_card_of(fd_);
}

// The kernel asks whether the send buffer is full only before it begins a segment, which it then fills up to 64 KiB
// however little the buffer may hold. So what is bounded is written in equal pieces, each the end of its segment; what is
// shorter may share one.
IoResult SocketStream::write(const iovec* parts, int count) {
  const size_t most = equal_part_of(bytes_in(parts, count), piece_bytes());
  IoResult result;
  bool is_full = false;
  while (!is_full) {
    Piece piece(parts, count, result.bytes, most);
    if (piece.count == 0) break;
    const IoResult sent = send(piece, is_bounded_ && piece.bytes > std::min(bound_.load(), kLeastPiece) / 2);
    result.bytes += sent.bytes;
    is_full = sent.bytes < piece.bytes;
    if (result.bytes == 0) result.error = sent.error;
  }
  if (is_tcp_) {
    if (is_full) link_->filled(filled_in_);
    if (pace_ != kUnpaced)
      note_delivered();
    else
      link_->wrote(result.bytes);
    if (looked_at_ != link_->version() || is_long(min_rtt_us_) != (pace_ != kUnpaced)) look_at_path();
  }
  return result;
}

IoResult SocketStream::send(Piece& piece, bool ends_segment) {
  msghdr message{};
  message.msg_iov = piece.parts;
  message.msg_iovlen = static_cast<size_t>(piece.count);
  ssize_t n;
  note_call();
  do n = sendmsg(fd_, &message, MSG_DONTWAIT | MSG_NOSIGNAL | (ends_segment ? MSG_EOR : 0));
  while (n < 0 && errno == EINTR);
  if (n < 0) return {0, errno == EWOULDBLOCK ? EAGAIN : errno, false};
  return {static_cast<size_t>(n), 0, false};
}

void SocketStream::look_at_path() {
  looked_at_ = link_->version();
  const LinkShare link = link_->share();
  if ((link.bytes_per_second == 0 && is_short(min_rtt_us_)) || !measure_path()) return;
  choose_congestion();
  bound_by(link);
}

// Windows of what a long path holds are more than a queue, so whatever limits them must notice losses and what others send:
// that is the congestion control's task.
void SocketStream::bound_by(const LinkShare& link) {
  const bool is_far = is_long(min_rtt_us_);
  const uint64_t of_rate = link.bytes_per_second == 0 ? kFirstBound : bytes_under_way(link, min_rtt_us_);
  const uint64_t bound = is_far ? kNoBound : of_rate;
  if (bound != bound_ || is_congested() != was_congested_) bound_send_buffer(bound);
  pace(is_far ? pace_of(link, link_->probes()) : kUnpaced);
}

void SocketStream::pace(uint64_t most) {
  if (std::exchange(pace_, most) == most) return;
  note_call();
  setsockopt(fd_, SOL_SOCKET, SO_MAX_PACING_RATE, &most, sizeof most);
}

uint64_t SocketStream::pace_of(const LinkShare& link, bool probes) {
  if (link.bytes_per_second == 0) return kAsFastAsItMay;
  const uint64_t share = link.bytes_per_second / std::max<uint64_t>(link.connections, 1);
  return probes ? share * 5 / 4 : share;
}

// What was written may still be in the kernel, all of a window of it. What came while nothing was written is not counted:
// nobody knows when.
void SocketStream::note_delivered() {
  const uint64_t before = delivered_;
  const auto since = delivered_at_;
  if (!measure_path()) return;
  const std::chrono::microseconds round_trip(min_rtt_us_);
  if (delivered_at_ - since < round_trip / 2) link_->delivered(delivered_ - before, round_trip);
}

// So that every piece is several of them. On loopback, or with jumbo frames, it may be one.
bool SocketStream::has_short_segments() const {
  int bytes = 0;
  socklen_t length = sizeof bytes;
  return getsockopt(fd_, IPPROTO_TCP, TCP_MAXSEG, &bytes, &length) == 0 &&
         static_cast<uint64_t>(bytes) < kLeastPiece / 2;
}

// The kernel forgets a minimum after five minutes (net.ipv4.tcp_min_rtt_wlen). On a link that is full all the time the next
// one holds the queue that our windows fill, and the windows, if they followed, would make it longer.
bool SocketStream::measure_path() {
  tcp_info info{};
  socklen_t length = sizeof info;
  note_call();
  if (getsockopt(fd_, IPPROTO_TCP, TCP_INFO, &info, &length) != 0 ||
      length < offsetof(tcp_info, tcpi_min_rtt) + sizeof info.tcpi_min_rtt)
    return false;
  min_rtt_us_ = std::min(min_rtt_us_, info.tcpi_min_rtt);
  congestion_window_ = info.tcpi_snd_cwnd;
  segment_bytes_ = info.tcpi_snd_mss;
  delivered_ += uint64_t{info.tcpi_delivered - delivered_segments_} * info.tcpi_snd_mss;
  delivered_segments_ = info.tcpi_delivered;
  delivered_at_ = LinkRate::Clock::now();
  return true;
}

// Anybody may choose Reno; others only where the system says so, or as root.
void SocketStream::choose_congestion() {
  const std::vector<const char*> better = better_congestion(congestion_, min_rtt_us_);
  if (better.empty() || std::exchange(asked_, better.front()) == better.front()) return;  // what was refused will be
  for (const std::string name : better) {
    note_call();
    if (setsockopt(fd_, IPPROTO_TCP, TCP_CONGESTION, name.data(), static_cast<socklen_t>(name.size())) != 0) continue;
    congestion_ = name;
    return;
  }
}

std::vector<const char*> SocketStream::better_congestion(const std::string& has, uint32_t min_rtt_us) {
  constexpr const char* kBbr = "bbr";
  if (is_short(min_rtt_us) && has == kBbr) return {"cubic", "reno"};
  if (is_long(min_rtt_us) && has != kBbr) return {kBbr};
  return {};
}

bool SocketStream::is_short(uint32_t min_rtt_us) { return min_rtt_us <= kShortRoundTripMicroseconds; }

bool SocketStream::is_long(uint32_t min_rtt_us) {
  return !is_short(min_rtt_us) && min_rtt_us != std::numeric_limits<uint32_t>::max();
}

bool SocketStream::are_many(uint64_t bound) { return bound < kLeastBound; }

uint64_t SocketStream::bytes_under_way(const LinkShare& link, uint32_t min_rtt_us) {
  const auto carried_in = [&](uint64_t microseconds) { return link.bytes_per_second * microseconds / 1'000'000; };
  const uint64_t path = min_rtt_us > kNearMicroseconds ? carried_in(min_rtt_us) * 5 / 4 : 0;
  const uint64_t connections = std::max<uint64_t>(link.connections, 1);
  const uint64_t fitting = std::max(carried_in(kQueueMicroseconds), kLeastQueue) / connections;
  const uint64_t least = std::clamp(fitting, kLeastBoundOfMany, kLeastBound);
  const uint64_t bytes = path + std::max(least, (kSpareBytes + carried_in(kSpareMicroseconds)) / connections);
  return bytes - bytes % (1 << 10);
}

void SocketStream::bound_send_buffer(uint64_t bytes) {
  const bool is_kernels = bound_.exchange(bytes) == 0;
  if (is_kernels && bytes == kNoBound) return;
  is_bounded_ = set_send_buffer();
  if (is_bounded_) return;
  // More than a process may ask for (net.core.wmem_max) is more than needs a bound: the kernel's own choice again.
  const int unlocked = 0;
  setsockopt(fd_, SOL_SOCKET, SO_BUF_LOCK, &unlocked, sizeof unlocked);
}

// The kernel takes half of a send buffer for its own records, so it doubles what it is asked for. False: less was had.
//
// A congestion window grows only while it is what limits a connection. So one that holds no two pieces gets two.
bool SocketStream::set_send_buffer() {
  was_congested_ = is_congested();
  const uint64_t bytes = std::max<uint64_t>(bound_, was_congested_ ? 2 * piece_of_bound() : 0);
  const int wanted = static_cast<int>(std::min<uint64_t>(bytes / 2, std::numeric_limits<int>::max() / 2));
  int got = 0;
  socklen_t length = sizeof got;
  setsockopt(fd_, SOL_SOCKET, SO_SNDBUF, &wanted, sizeof wanted);
  return getsockopt(fd_, SOL_SOCKET, SO_SNDBUF, &got, &length) != 0 || got >= 2 * wanted;
}

size_t SocketStream::piece_bytes() const {
  if (!is_bounded_) return std::numeric_limits<size_t>::max();
  return was_congested_ ? fitting_piece(piece_of_bound(), congestion_window_, segment_bytes_) : piece_of_bound();
}

uint64_t SocketStream::piece_of_bound() const {
  return are_many(bound_) ? bound_.load() : std::clamp<uint64_t>(bound_, kLeastPiece, kMostPiece);
}

// At the beginning it is not: the window is small, but grows with each acknowledgement. Nor where so little may be in flight
// that one piece is enough: two of each connection would not fit into the queue.
bool SocketStream::is_congested() const {
  return link_->share().bytes_per_second > 0 && bound_ != kNoBound && bound_ >= kLeastPiece &&
         fitting_piece(piece_of_bound(), congestion_window_, segment_bytes_) < piece_of_bound();
}

uint64_t SocketStream::fitting_piece(uint64_t piece, uint32_t congestion_window, uint32_t segment_bytes) {
  const uint64_t half = uint64_t{congestion_window / 2} * segment_bytes;
  return std::min(piece, std::max(half, kLeastPart));
}

bool SocketStream::may_stand_still() const { return is_tcp_ && is_bounded_ && are_many(bound_); }

// Setting TCP_NODELAY, though it is set, has the kernel send what it can.
bool SocketStream::try_again() {
  tcp_info info{};
  socklen_t length = sizeof info;
  note_call();
  if (getsockopt(fd_, IPPROTO_TCP, TCP_INFO, &info, &length) != 0) return false;
  if (info.tcpi_unacked > 0) return true;
  if (info.tcpi_notsent_bytes == 0) return false;
  const int on = 1;
  note_call();
  setsockopt(fd_, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  return true;
}

IoResult SocketStream::read(const iovec* parts, int count) {
  msghdr message{};
  message.msg_iov = const_cast<iovec*>(parts);
  message.msg_iovlen = static_cast<size_t>(count);
  ssize_t n;
  note_call();
  do n = recvmsg(fd_, &message, MSG_DONTWAIT);
  while (n < 0 && errno == EINTR);
  if (n < 0) return {0, errno == EWOULDBLOCK ? EAGAIN : errno, false};
  return {static_cast<size_t>(n), 0, n == 0, static_cast<size_t>(n) < bytes_in(parts, count)};
}

// The peer's window is as large as ours. If we waited for all of it where that is not acknowledged, it would stand still.
void SocketStream::await(size_t bytes) {
  if (!is_tcp_) return;
  const size_t most = awaits_much_ ? kMostAwaited : std::min<size_t>(bound_ / 2, kMostAwaited);
  const int low_water = bytes < kLeastAwaited ? 1 : static_cast<int>(std::min(bytes, most));
  if (std::exchange(low_water_, low_water) == low_water) return;
  note_call();
  setsockopt(fd_, SOL_SOCKET, SO_RCVLOWAT, &low_water, sizeof low_water);
}

void SocketStream::end_writing() { shutdown(fd_, SHUT_WR); }

void SocketStream::close() { close_if_open(fd_); }

}  // namespace p3
