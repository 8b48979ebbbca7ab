// What every Stream promises, whatever carries it.
#include "p3/stream.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <linux/sockios.h>
#include <linux/tcp.h>
#include <poll.h>
#include <sched.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/utsname.h>
#include <sys/wait.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "p3/error.h"
#include "p3/link_rate.h"
#include "p3/ring_stream.h"
#include "p3/socket_stream.h"
#include "p3/tls_stream.h"
#include "transport/parts.h"
#include "transport/raw_peer.h"

namespace p3 {
namespace {

using StreamPair = std::pair<std::unique_ptr<Stream>, std::unique_ptr<Stream>>;

StreamPair ring_pair(size_t bytes) {
  const auto [maker, other] = unix_pair();
  const RingStream::Descriptors made = RingStream::make(bytes);
  RingStream::Descriptors passed;
  for (size_t i = 0; i < made.size(); ++i) passed[i] = dup(made[i]);  // as over a socket
  return {std::make_unique<RingStream>(maker, made, true), std::make_unique<RingStream>(other, passed, false)};
}

StreamPair socket_pair(std::pair<int, int> ends) { return {stream_of(ends.first), stream_of(ends.second)}; }

// After the handshake; a new key after every 100 KB.
StreamPair tls_pair(std::pair<int, int> ends, const std::string& other_key = std::string(32, 'k')) {
  const std::string key(TlsStream::kKeyBytes, 'k');
  auto a = std::make_unique<TlsStream>(ends.first, 128 << 10, key, true, 100'000);
  auto b = std::make_unique<TlsStream>(ends.second, 128 << 10, other_key, false, 100'000);
  TlsStream::Wait states[2];
  do {
    states[0] = a->handshake();
    states[1] = b->handshake();
  } while (states[0] != TlsStream::Wait::kNothing || states[1] != TlsStream::Wait::kNothing);
  return {std::move(a), std::move(b)};
}

constexpr char kNoOpenSsl[] = "P3 was built without OpenSSL (libssl-dev)";

struct Carrier {
  const char* name;
  StreamPair (*open)();
  bool is_tls = false;
  bool built_in() const { return !is_tls || TlsStream::built_in(); }
};

const Carrier kCarriers[] = {
    {"Tcp", [] { return socket_pair(tcp_pair()); }},
    {"TcpWithSmallBuffers", [] { return socket_pair(tcp_pair(4096)); }},
    {"Unix", [] { return socket_pair(unix_pair()); }},
    {"Tls", [] { return tls_pair(tcp_pair()); }, true},
    {"TlsWithSmallBuffers", [] { return tls_pair(tcp_pair(4096)); }, true},
    {"Ring", [] { return ring_pair(256 << 10); }},
    {"SmallestRing", [] { return ring_pair(4096); }},
};

// Waits for one event of a stream the way Transport does.
class Waiter {
 public:
  Waiter(int fd, uint32_t events) : epoll_(epoll_create1(EPOLL_CLOEXEC)) {
    epoll_event event{};
    event.events = events;
    EXPECT_EQ(epoll_ctl(epoll_, EPOLL_CTL_ADD, fd, &event), 0);
  }
  ~Waiter() { ::close(epoll_); }
  bool wait(int timeout_ms = kDeadlineMs) {
    epoll_event event{};
    int count;
    do count = epoll_wait(epoll_, &event, 1, timeout_ms);
    while (count < 0 && errno == EINTR);  // who stops this process interrupts that
    return count == 1;
  }

 private:
  int epoll_;
};

class StreamContract : public testing::TestWithParam<Carrier> {
 protected:
  StreamPair pair = GetParam().built_in() ? GetParam().open() : socket_pair(unix_pair());
  Stream& a = *pair.first;
  Stream& b = *pair.second;

  void SetUp() override {
    if (!GetParam().built_in()) GTEST_SKIP() << kNoOpenSsl;
  }

  static IoResult write(Stream& stream, const void* data, size_t size) {
    const iovec part{const_cast<void*>(data), size};
    return stream.write(&part, 1);
  }
  static IoResult read(Stream& stream, void* data, size_t size) {
    const iovec part{data, size};
    return stream.read(&part, 1);
  }
};

TEST_P(StreamContract, AnEmptyStreamSaysTryAgain) {
  char byte;
  EXPECT_EQ(read(a, &byte, 1).error, EAGAIN);
  EXPECT_EQ(read(b, &byte, 1).error, EAGAIN);
}

TEST_P(StreamContract, AFullStreamTakesLessAndLaterTellsThatThereIsRoom) {
  Waiter room(a.write_fd(), a.write_event() | EPOLLET);
  std::vector<char> block(1 << 20, 'x');
  size_t in_flight = 0;
  while (true) {
    const IoResult result = write(a, block.data(), block.size());
    in_flight += result.bytes;
    if (result.bytes < block.size()) break;
    ASSERT_LT(in_flight, size_t{1} << 30) << "it is not bounded";
  }
  room.wait(0);  // what was writable before is an old edge
  std::vector<char> sink(1 << 20);
  while (in_flight > 0) {
    const IoResult result = read(b, sink.data(), sink.size());
    if (result.error == EAGAIN) continue;
    ASSERT_GT(result.bytes, 0u);
    in_flight -= std::min(in_flight, result.bytes);  // more can have come than a writer has counted yet
  }
  EXPECT_TRUE(room.wait());
  EXPECT_GT(write(a, block.data(), 1).bytes, 0u);
}

TEST_P(StreamContract, ReadableIsALevel) {
  Waiter readable(b.read_fd(), EPOLLIN);
  EXPECT_FALSE(readable.wait(0));
  for (int turn = 0; turn < 3; ++turn) {  // the first time, the reader has never looked
    ASSERT_EQ(write(a, "hello", 5).bytes, 5u);
    EXPECT_TRUE(readable.wait());
    EXPECT_TRUE(readable.wait());
    char text[5];
    ASSERT_EQ(read(b, text, 2).bytes, 2u);
    EXPECT_TRUE(readable.wait());
    ASSERT_EQ(read(b, text + 2, 3).bytes, 3u);
    EXPECT_EQ(std::memcmp(text, "hello", 5), 0);
    EXPECT_EQ(read(b, text, 1).error, EAGAIN);
    EXPECT_FALSE(readable.wait(0));
  }
}

// A reader that awaits what is still to come, and not a byte more, never waits in vain, however small the buffers are.
TEST_P(StreamContract, WhatIsAwaitedComesAndSoDoesTheEnd) {
  Waiter readable(b.read_fd(), EPOLLIN);
  for (size_t size : {1, 3000, 5000, 100'000}) {
    std::thread writer([&] {
      const std::vector<char> bytes(size);
      Waiter writable(a.write_fd(), a.write_event() | EPOLLET);
      for (size_t sent = 0; sent < size;) {
        sent += write(a, bytes.data() + sent, size - sent).bytes;
        if (sent < size && !writable.wait()) break;
      }
    });
    std::vector<char> room(size);
    size_t came = 0;
    while (came < size) {
      b.await(size - came);
      if (!readable.wait()) break;
      came += read(b, room.data(), size - came).bytes;
    }
    writer.join();
    ASSERT_EQ(came, size);
  }
  b.await(100'000);
  a.end_writing();
  EXPECT_TRUE(readable.wait());
  char byte;
  EXPECT_TRUE(read(b, &byte, 1).end);
}

TEST_P(StreamContract, TheEndComesAfterTheLastByte) {
  ASSERT_EQ(write(a, "bye", 3).bytes, 3u);
  a.end_writing();
  Waiter readable(b.read_fd(), EPOLLIN);
  ASSERT_TRUE(readable.wait());
  char text[8];
  ASSERT_EQ(read(b, text, sizeof text).bytes, 3u);
  ASSERT_TRUE(readable.wait());
  EXPECT_TRUE(read(b, text, sizeof text).end);
}

TEST_P(StreamContract, APeerThatVanishesIsAnEndOrAnError) {
  pair.first.reset();
  Waiter readable(b.read_fd(), EPOLLIN);
  ASSERT_TRUE(readable.wait());
  char byte;
  const IoResult result = read(b, &byte, 1);
  EXPECT_TRUE(result.end || (result.error != 0 && result.error != EAGAIN));
}

// Both ways at once, in pieces of random size, sleeping whenever the stream says so: nothing lost, added or swapped,
// and nobody sleeps through a wake-up.
TEST_P(StreamContract, RandomPiecesBothWaysArriveInOrder) {
  const unsigned seed = std::random_device{}();
  SCOPED_TRACE("seed " + std::to_string(seed));
  constexpr size_t kTotal = 8 << 20;
  std::vector<char> expected(kTotal);
  std::mt19937 random(seed);
  for (char& byte : expected) byte = static_cast<char>(random());
  std::atomic<int> wrong{0};

  const auto writer = [&](Stream& stream, unsigned own_seed) {
    std::mt19937 own(own_seed);
    Waiter room(stream.write_fd(), stream.write_event() | EPOLLET);
    size_t at = 0;
    while (at < kTotal) {
      const size_t first = std::min<size_t>(own() % 300, kTotal - at);
      const size_t second = std::min<size_t>(own() % 300000, kTotal - at - first);
      const iovec parts[2] = {{expected.data() + at, first}, {expected.data() + at + first, second}};
      const IoResult result = stream.write(parts, 2);
      if (result.error != 0 && result.error != EAGAIN) break;
      at += result.bytes;
      if (result.bytes < first + second && !room.wait()) break;
    }
    if (at != kTotal) ++wrong;
  };
  const auto reader = [&](Stream& stream, unsigned own_seed) {
    std::mt19937 own(own_seed);
    Waiter readable(stream.read_fd(), EPOLLIN);
    std::vector<char> got(kTotal);
    size_t at = 0;
    while (at < kTotal) {
      const size_t first = std::min<size_t>(own() % 300000, kTotal - at);
      const size_t second = std::min<size_t>(own() % 100 + 1, kTotal - at - first);
      const iovec parts[2] = {{got.data() + at, first}, {got.data() + at + first, second}};
      const IoResult result = stream.read(parts, 2);
      if (result.error != 0 && result.error != EAGAIN) break;
      at += result.bytes;
      if (result.bytes == 0 && !readable.wait()) break;
    }
    if (got != expected) ++wrong;
  };
  std::thread threads[] = {std::thread(writer, std::ref(a), seed + 1), std::thread(writer, std::ref(b), seed + 2),
                           std::thread(reader, std::ref(a), seed + 3), std::thread(reader, std::ref(b), seed + 4)};
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
}

INSTANTIATE_TEST_SUITE_P(Carriers, StreamContract, testing::ValuesIn(kCarriers),
                         [](const auto& instance) { return std::string(instance.param.name); });

class Tls : public testing::Test {
  void SetUp() override {
    if (!TlsStream::built_in()) GTEST_SKIP() << kNoOpenSsl;
  }
};

TEST_F(Tls, AnotherKeyIsAnError) {
  signal(SIGPIPE, SIG_IGN);
  EXPECT_THROW(tls_pair(tcp_pair(), std::string(32, 'x')), Error);
  EXPECT_THROW(tls_pair(tcp_pair(), "short"), Error);
}

// However the system could encrypt: no key may be used for ever. A new one is due behind each 100 KB, at the next batch.
TEST_F(Tls, KeysAreReplacedAndNoByteIsLost) {
  constexpr size_t kBytes = 5'000'000, kBatch = 64 << 10;
  const StreamPair pair = tls_pair(tcp_pair());
  std::vector<char> text(kBytes), got(kBytes);
  for (size_t i = 0; i < kBytes; ++i) text[i] = static_cast<char>(i * i >> 7);
  std::thread writer([&] {
    Waiter writable(pair.first->write_fd(), EPOLLOUT);
    for (size_t sent = 0; sent < kBytes;) {
      const iovec rest{text.data() + sent, kBytes - sent};
      const IoResult result = pair.first->write(&rest, 1);
      sent += result.bytes;
      if (result.error != EAGAIN ? result.error != 0 : !writable.wait()) return;
    }
  });
  Waiter readable(pair.second->read_fd(), EPOLLIN);
  size_t read = 0;
  while (read < kBytes && readable.wait()) {
    const iovec room{got.data() + read, kBytes - read};
    const IoResult result = pair.second->read(&room, 1);
    read += result.bytes;
    if (result.end || (result.error != 0 && result.error != EAGAIN)) break;
  }
  writer.join();
  EXPECT_EQ(read, kBytes);
  EXPECT_TRUE(got == text);
  const uint64_t keys = static_cast<const TlsStream&>(*pair.first).keys();
  EXPECT_GE(keys, kBytes / (100'000 + kBatch));
  EXPECT_LE(keys, kBytes / 100'000 + 1);
}

// Nothing that comes behind an altered byte is believed, and nothing of it is given out.
TEST_F(Tls, AnAlteredByteIsAnErrorForGood) {
  const auto [ours, near] = tcp_pair();
  const auto [far, theirs] = tcp_pair();
  std::atomic<bool> alter{false};
  const auto pump = [&alter](int from, int to) {
    char bytes[4096];
    for (ssize_t n; (n = recv(from, bytes, sizeof bytes, 0)) > 0;) {
      if (alter) bytes[n / 2] = static_cast<char>(bytes[n / 2] ^ 1);
      if (::send(to, bytes, static_cast<size_t>(n), MSG_NOSIGNAL) != n) return;
    }
    shutdown(to, SHUT_WR);
  };
  std::thread there(pump, near, far), back(pump, far, near);
  {
    const StreamPair pair = tls_pair({ours, theirs});
    alter = true;
    const std::vector<char> text(1000, 'x');
    const iovec part{const_cast<char*>(text.data()), text.size()};
    ASSERT_EQ(pair.first->write(&part, 1).bytes, text.size());
    std::vector<char> got(1000, 0);
    const iovec room{got.data(), got.size()};
    Waiter readable(pair.second->read_fd(), EPOLLIN);
    ASSERT_TRUE(readable.wait());
    EXPECT_EQ(pair.second->read(&room, 1).error, EBADMSG);
    EXPECT_EQ(pair.second->read(&room, 1).error, EBADMSG);
    EXPECT_EQ(got, std::vector<char>(1000, 0));
  }
  there.join();
  back.join();
  ::close(near);
  ::close(far);
}

std::string congestion_control_of(int fd) {
  char name[16] = "";
  socklen_t length = sizeof name - 1;
  EXPECT_EQ(getsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, name, &length), 0);
  return name;
}

TEST(SocketStream, LeavesBbrOnShortPathsAndNothingElse) {
  constexpr char kBbr[] = "bbr", kReno[] = "reno";
  const auto choose = [](std::pair<int, int> fds, const char* name) {
    const auto length = static_cast<socklen_t>(std::strlen(name));
    return setsockopt(fds.first, IPPROTO_TCP, TCP_CONGESTION, name, length) == 0;
  };
  auto reno = tcp_pair(), bbr = tcp_pair();
  ASSERT_TRUE(choose(reno, kReno));
  const StreamPair with_reno = socket_pair(reno);
  EXPECT_EQ(congestion_control_of(with_reno.first->write_fd()), kReno);
  const bool has_bbr = choose(bbr, kBbr);
  const StreamPair with_bbr = socket_pair(bbr);
  if (!has_bbr) GTEST_SKIP() << "this kernel has no BBR";
  EXPECT_NE(congestion_control_of(with_bbr.first->write_fd()), kBbr);
}

constexpr uint32_t kNotMeasured = ~0u;

// On short paths nothing is as it is on long ones, whatever the host's default.
TEST(SocketStream, APathIsLongAboveTenMilliseconds) {
  for (uint32_t rtt_us : {0u, 50u, 5000u, 10'000u}) {
    EXPECT_TRUE(SocketStream::is_short(rtt_us) && !SocketStream::is_long(rtt_us)) << rtt_us;
    EXPECT_TRUE(SocketStream::better_congestion("cubic", rtt_us).empty()) << rtt_us;
    EXPECT_TRUE(SocketStream::better_congestion("reno", rtt_us).empty()) << rtt_us;
    EXPECT_EQ(SocketStream::better_congestion("bbr", rtt_us).size(), 2u) << rtt_us;
  }
  for (uint32_t rtt_us : {10'001u, 200'000u}) {
    EXPECT_TRUE(!SocketStream::is_short(rtt_us) && SocketStream::is_long(rtt_us)) << rtt_us;
    ASSERT_EQ(SocketStream::better_congestion("cubic", rtt_us).size(), 1u) << rtt_us;
    EXPECT_STREQ(SocketStream::better_congestion("cubic", rtt_us).front(), "bbr") << rtt_us;
    EXPECT_TRUE(SocketStream::better_congestion("bbr", rtt_us).empty()) << rtt_us;
  }
  EXPECT_FALSE(SocketStream::is_short(kNotMeasured) || SocketStream::is_long(kNotMeasured));
  EXPECT_TRUE(SocketStream::better_congestion("cubic", kNotMeasured).empty());
  EXPECT_TRUE(SocketStream::better_congestion("bbr", kNotMeasured).empty());
}

// What docs/decisions.md says of two and four hosts.
TEST(SocketStream, WindowsOfShortPathsAreTheseFewKiB) {
  const auto kib = [](uint64_t mbit, uint64_t connections) {
    return SocketStream::bytes_under_way({mbit * 1'000'000 / 8, connections}, 200) >> 10;
  };
  EXPECT_EQ(kib(100, 2), 52u);
  EXPECT_EQ(kib(200, 2), 89u);
  EXPECT_EQ(kib(200, 6), 29u);
  EXPECT_EQ(kib(1000, 6), 127u);
  EXPECT_EQ(kib(0, 2), 16u);
}

TEST(LinkRate, IsTheGreatestOfLate) {
  LinkRate link;
  EXPECT_EQ(link.rate(), 0u);
  for (uint64_t rate : {1000, 3000, 2000}) link.measured(rate * 1000);
  EXPECT_NEAR(static_cast<double>(link.rate()), 3'000'000, 30'000);
  for (int i = 0; i < 2000; ++i) link.measured(1'000'000);
  EXPECT_EQ(link.rate(), 1'000'000u);  // and not what was long ago
  EXPECT_EQ(link.version(), 2003u);
}

// From the first to the second.
void move_through(const StreamPair& pair, size_t bytes) {
  std::thread reader([&] {
    std::vector<char> buffer(1 << 20);
    const iovec part{buffer.data(), buffer.size()};
    for (size_t came = 0; came < bytes;) {
      pollfd readable{pair.second->read_fd(), POLLIN, 0};
      ASSERT_GT(poll(&readable, 1, 10'000), 0);
      came += pair.second->read(&part, 1).bytes;
    }
  });
  std::vector<char> zeros(1 << 20);
  for (size_t left = bytes; left > 0;) {
    const iovec part{zeros.data(), std::min(left, zeros.size())};
    pollfd writable{pair.first->write_fd(), POLLOUT, 0};
    if (poll(&writable, 1, 10'000) <= 0) break;
    left -= pair.first->write(&part, 1).bytes;
  }
  reader.join();
}

int send_buffer(const StreamPair& pair) {
  int bytes = 0;
  socklen_t length = sizeof bytes;
  EXPECT_EQ(getsockopt(pair.first->write_fd(), SOL_SOCKET, SO_SNDBUF, &bytes, &length), 0);
  return bytes;
}

TEST(SocketStream, TellsItsLinkHowFastItIs) {
  LinkRate link;
  const StreamPair pair = socket_pair(far_tcp_pair());
  pair.first->share_link(&link);
  EXPECT_EQ(link.rate(), 0u);
  move_through(pair, 64 << 20);  // for some measurements' time
  EXPECT_GT(link.rate(), 0u);
  EXPECT_EQ(link.connections(), 1u);
}

TEST(LinkRate, CountsNotWhatFirstValuesAloneHaveFilled) {
  LinkRate link;
  uint64_t everybodys[3] = {}, version = link.version();
  link.writes_round(0);
  for (uint64_t& noted : everybodys) link.filled(noted);
  EXPECT_EQ(link.connections(), 3u);
  link.measured(1'000'000);
  link.writes_round(1);
  EXPECT_EQ(link.connections(), 0u);
  EXPECT_EQ(link.rate(), 1'000'000u) << "it is the same link";
  link.filled(everybodys[1]);
  link.filled(everybodys[1]);
  link.writes_round(2);
  link.writes_round(0);  // of a key that comes later
  link.writes_round(2);
  EXPECT_EQ(link.connections(), 1u);
  EXPECT_GT(link.version(), version);
}

TEST(SocketStream, TellsItsLinkHowFastItIsWhileItIsFull) {
  LinkRate link;
  const StreamPair pair = socket_pair(far_tcp_pair());
  pair.first->share_link(&link);
  move_through(pair, 64 << 20);
  const uint64_t full = link.take_full_rate();
  EXPECT_GT(full, 0u);
  EXPECT_LE(full, link.rate() + link.rate() / 2) << "of which that forgets a little";
  EXPECT_EQ(link.take_full_rate(), 0u) << "nothing has been sent since";
}

constexpr std::chrono::milliseconds kRoundTrip{200};

// `each` bytes have arrived every 50 ms, for so many times. Returns when.
LinkRate::Clock::time_point deliver(LinkRate& link, uint64_t each, int times, LinkRate::Clock::time_point from) {
  link.delivered(each, kRoundTrip, from);
  for (int i = 0; i < times; ++i) link.delivered(each, kRoundTrip, from += std::chrono::milliseconds(50));
  return from;
}

// A window leaves through the card at once, and comes up slowly.
TEST(LinkRate, OfLongPathsIsKnownOnceItHardlyGrows) {
  LinkRate link;
  LinkRate::Clock::time_point now{std::chrono::seconds(10)};
  for (uint64_t each : {200'000, 300'000, 450'000, 460'000, 440'000}) {
    now = deliver(link, each, 8, now + 2 * kRoundTrip);
    EXPECT_EQ(link.rate(), 0u) << each;
  }
  deliver(link, 440'000, 8, now + 2 * kRoundTrip);
  EXPECT_EQ(link.rate(), 9'200'000u);
}

TEST(LinkRate, OfLongPathsIsMeasuredForTwoRoundTripsAndPausesAreNone) {
  LinkRate link;
  LinkRate::Clock::time_point now{std::chrono::seconds(10)};
  for (int i = 0; i < 30; ++i) now = deliver(link, 1'000'000, 7, now + 2 * kRoundTrip);
  EXPECT_EQ(link.rate(), 0u);
  for (int i = 0; i < 5; ++i) now = deliver(link, 500'000, 8, now + 2 * kRoundTrip);
  EXPECT_EQ(link.rate(), 10'000'000u);
}

TEST(LinkRate, OfLongPathsForgetsSooner) {
  LinkRate link;
  LinkRate::Clock::time_point now{std::chrono::seconds(10)};
  now = deliver(link, 500'000, 40, now);
  EXPECT_EQ(link.rate(), 10'000'000u);
  deliver(link, 250'000, 8 * 60, now);
  EXPECT_LT(link.rate(), 5'100'000u);
}

TEST(SocketStream, ConnectionsOfALongPathHaveEqualPaces) {
  EXPECT_EQ(SocketStream::pace_of({12'000'000, 2}, false), 6'000'000u);
  EXPECT_EQ(SocketStream::pace_of({12'000'000, 6}, false), 2'000'000u);
  EXPECT_EQ(SocketStream::pace_of({12'000'000, 6}, true), 2'500'000u);
  EXPECT_EQ(SocketStream::pace_of({12'000'000, 0}, false), 12'000'000u);
  EXPECT_GT(SocketStream::pace_of({0, 2}, false), uint64_t{1} << 60) << "of a rate that nobody knows";
}

TEST(LinkRate, IsNotKnownOfALinkThatWasNeverFull) {
  LinkRate link;
  while (link.rate() == 0) link.wrote(1 << 20);  // a measurement takes a while
  EXPECT_EQ(link.take_full_rate(), 0u);
}

// Or a job's windows were sized for memory as soon as two processes of one machine have a socket between them.
TEST(SocketStream, HasNoPartInTheLinkIfItStaysOnTheMachine) {
  LinkRate link;
  const StreamPair pair = socket_pair(tcp_pair());
  pair.first->share_link(&link);
  move_through(pair, 64 << 20);
  EXPECT_EQ(link.rate(), 0u);
  EXPECT_EQ(link.connections(), 0u);
  EXPECT_GT(send_buffer(pair), 128 << 10) << "it has a bound of its own all the same";
}

// A machine has connections to all workers of the others, and often only their leaders are sent anything.
TEST(SocketStream, HasAPartInTheLinkOnceItHasBeenFull) {
  LinkRate link;
  const StreamPair idle = socket_pair(far_tcp_pair()), busy = socket_pair(far_tcp_pair());
  for (const StreamPair* pair : {&idle, &busy}) pair->first->share_link(&link);
  char heartbeat[64] = {};
  const iovec part{heartbeat, sizeof heartbeat};
  for (int i = 0; i < 2000; ++i) {
    ASSERT_EQ(idle.first->write(&part, 1).bytes, sizeof heartbeat);
    for (size_t came = 0; came < sizeof heartbeat;) {
      pollfd readable{idle.second->read_fd(), POLLIN, 0};
      ASSERT_EQ(poll(&readable, 1, kDeadlineMs), 1);
      came += idle.second->read(&part, 1).bytes;
    }
  }
  EXPECT_EQ(link.connections(), 0u);
  move_through(busy, 4 << 20);
  EXPECT_EQ(link.connections(), 1u);
}

TEST(LinkRate, ForgetsWhoHasNotBeenFullOfLate) {
  LinkRate link;
  uint64_t once = 0, always = 0;
  const auto a_while = [&] {
    for (int i = 0; i < 256; ++i) {
      link.filled(always);
      link.measured(1'000'000);
    }
  };
  link.filled(once);
  link.filled(once);
  EXPECT_EQ(link.connections(), 1u);
  link.filled(always);
  EXPECT_EQ(link.connections(), 2u);
  a_while();
  EXPECT_EQ(link.connections(), 2u);
  a_while();
  EXPECT_EQ(link.connections(), 1u);
  link.filled(always);
  link.filled(once);
  EXPECT_EQ(link.connections(), 2u);
  for (int i = 0; i < 512; ++i) link.measured(1'000'000);
  EXPECT_EQ(link.connections(), 2u) << "while none is full, nothing is known better";
}

// So that a rate which is low because of the bound raises it, up to that of the path.
TEST(SocketStream, MoreMayBeUnderWayThanThePathHolds) {
  for (uint64_t rate : {0ull, 1'000'000ull, 25'000'000ull, 100'000'000ull, 1'250'000'000ull}) {
    for (uint32_t min_rtt_us : {0u, 50u, 1100u, 100'000u}) {
      for (uint64_t connections : {1, 14}) {
        const uint64_t bytes = SocketStream::bytes_under_way({rate, connections}, min_rtt_us);
        EXPECT_GE(bytes, min_rtt_us > 1000 ? rate * min_rtt_us / 800'000 : 8 << 10)
            << rate << " bytes/s, " << min_rtt_us << " us";
      }
    }
  }
}

// Or segments are lost, and slices wait that nothing may overtake.
TEST(SocketStream, AllConnectionsOfALinkTogetherFitIntoAQueueOfTwentyMilliseconds) {
  for (uint64_t mbit : {30, 40, 65, 75, 100, 140, 200, 340, 360, 500, 1000, 10'000}) {
    const uint64_t rate = mbit * 1'000'000 / 8;
    for (uint64_t connections = 1; connections <= 14; ++connections) {
      const uint64_t bytes = SocketStream::bytes_under_way({rate, connections}, 50);
      EXPECT_LE(bytes * connections, std::max(rate / 50, connections << 13)) << mbit << " Mbit/s, " << connections;
      EXPECT_GE(bytes, 8u << 10);
    }
  }
}

// Of two connections for each other host of 16, 32 and 64 only the least that the kernel grants may be under way.
TEST(SocketStream, ManyConnectionsHaveLessUnderWayEach) {
  constexpr uint64_t kSlow = 5'000'000, kFast = 125'000'000;
  EXPECT_EQ(SocketStream::bytes_under_way({kSlow, 18}, 50), 6u << 10);
  for (uint64_t connections : {30, 62, 126})
    EXPECT_EQ(SocketStream::bytes_under_way({kSlow, connections}, 50), 4u << 10) << connections;
  EXPECT_EQ(SocketStream::bytes_under_way({kFast, 254}, 50), 8u << 10);
  EXPECT_EQ(SocketStream::bytes_under_way({kFast, 510}, 50), 4u << 10);
}

// No rate is such that a little more changes much.
TEST(SocketStream, WhatIsUnderWayHasNoSteps) {
  for (uint64_t rate = 1'000'000; rate < 1'000'000'000; rate += rate / 100) {
    const uint64_t bytes = SocketStream::bytes_under_way({rate, 6}, 50);
    EXPECT_LE(SocketStream::bytes_under_way({rate + rate / 100, 6}, 50), bytes + bytes / 99 + 1024) << rate;
  }
}

TEST(LinkRate, GoesByWhatTheJobHasAgreedOn) {
  LinkRate link;
  uint64_t noted = 0;
  link.filled(noted);
  link.measured(6'000'000);
  EXPECT_EQ(link.share().bytes_per_second, 6'000'000u);
  EXPECT_EQ(link.share().connections, 2u);  // the other process of this machine has one as well
  const uint64_t version = link.version();
  link.agree({0, 0});  // nobody knows anything yet
  EXPECT_EQ(link.share().bytes_per_second, 6'000'000u);
  EXPECT_EQ(link.version(), version);
  link.agree({12'500'000, 6});
  EXPECT_GT(link.version(), version);
  link.measured(7'000'000);
  EXPECT_EQ(link.share().bytes_per_second, 12'500'000u);
  EXPECT_EQ(link.share().connections, 6u);
  EXPECT_EQ(link.rate(), 7'000'000u);  // which it still tells
}

TEST(SocketStream, BoundsWhatIsUnderWayFromTheStartAndOnlyOnTcp) {
  const auto send_buffer = [](const StreamPair& pair) {
    int bytes = 0;
    socklen_t length = sizeof bytes;
    EXPECT_EQ(getsockopt(pair.first->write_fd(), SOL_SOCKET, SO_SNDBUF, &bytes, &length), 0);
    return bytes;
  };
  EXPECT_EQ(send_buffer(socket_pair(tcp_pair())), 16 << 10);
  const auto ends = unix_pair();
  int before = 0;
  socklen_t length = sizeof before;
  ASSERT_EQ(getsockopt(ends.first, SOL_SOCKET, SO_SNDBUF, &before, &length), 0);
  EXPECT_EQ(send_buffer(socket_pair(ends)), before);
}

// Of a slice of 10,000 elements in pieces of 29 KiB the second would be the shorter one.
TEST(SocketStream, PiecesAreFewAndEqual) {
  EXPECT_EQ(equal_part_of(40'080, 29 << 10), 20'040u);
  EXPECT_EQ(equal_part_of(40'080, 40'080), 40'080u);
  EXPECT_EQ(equal_part_of(100, std::numeric_limits<size_t>::max()), 100u);
  EXPECT_GE(equal_part_of(0, 100), 1u);
  std::mt19937 random(3);
  for (int turn = 0; turn < 10'000; ++turn) {
    const size_t bytes = 1 + random() % 300'000, most = 1 + random() % 100'000;
    const size_t part = equal_part_of(bytes, most);
    const auto parts_of = [bytes](size_t each) { return (bytes + each - 1) / each; };
    ASSERT_LE(part, most);
    ASSERT_EQ(parts_of(part), parts_of(most)) << bytes << " in parts of at most " << most;
    ASSERT_EQ(part, (bytes + parts_of(most) - 1) / parts_of(most));
  }
}

// Writes `part` again and again until the kernels of both ends are full; nobody reads.
void expect_at_most_under_way(Stream& stream, const iovec& part, int most) {
  pollfd writable{stream.write_fd(), POLLOUT, 0};
  size_t written = 0;
  while (poll(&writable, 1, 100) > 0) {
    written += stream.write(&part, 1).bytes;
    int under_way = 0;
    ASSERT_EQ(ioctl(stream.write_fd(), SIOCOUTQ, &under_way), 0);
    ASSERT_LE(under_way, most);
    ASSERT_LT(written, 64 * part.iov_len) << "it is not bounded";
  }
  EXPECT_GT(written, 0u);
}

// The kernel by itself would fill a segment of 64 KiB, whatever the bound: on many connections, many of them.
TEST(SocketStream, ExceedsItsBoundByLessThanAPiece) {
  const StreamPair pair = socket_pair(tcp_pair());
  constexpr int kBound = 16 << 10, kPiece = kBound;
  const std::vector<char> zeros(4 << 20);  // nobody reads them
  const iovec part{const_cast<char*>(zeros.data()), zeros.size()};
  expect_at_most_under_way(*pair.first, part, kBound + kPiece);
}

// The same with the least bound that there is, beyond which the kernel would put off what it writes.
TEST(SocketStream, ExceedsTheLeastBoundByLessThanAPiece) {
  const auto [ours, other] = far_tcp_pair();
  const StreamPair pair = socket_pair({ours, other});
  constexpr int kBound = 4 << 10;
  LinkRate link;
  link.agree({5'000'000, 126});
  pair.first->share_link(&link);
  EXPECT_FALSE(pair.first->may_stand_still()) << "its bound is still that of the start";
  const std::vector<char> zeros(4 << 20);  // nobody reads them
  iovec part{const_cast<char*>(zeros.data()), 1};
  pair.first->write(&part, 1);  // and looks at its link
  EXPECT_TRUE(pair.first->may_stand_still());
  part.iov_len = zeros.size();
  expect_at_most_under_way(*pair.first, part, 2 * kBound);
}

// The exit status of `play` in a child, or 77: no network namespace can be had where these commands can be run first.
int status_in_network(const std::string& commands, int (*play)()) {
  const pid_t child = fork();
  if (child == 0) {
    const bool has_network = unshare(CLONE_NEWNET) == 0 || unshare(CLONE_NEWUSER | CLONE_NEWNET) == 0;
    _exit(has_network && std::system(("(" + commands + ") >/dev/null 2>&1").c_str()) == 0 ? play() : 77);
  }
  int status = 0;
  EXPECT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status));
  return WEXITSTATUS(status);
}

tcp_info info_of(int fd) {
  tcp_info info{};
  socklen_t length = sizeof info;
  getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &length);
  return info;
}

int send_what_found_no_room() {
  const auto [ours, other] = tcp_pair();
  const std::unique_ptr<Stream> stream = stream_of(ours);
  const int blast = socket(AF_INET, SOCK_DGRAM, 0);
  const int much = 4 << 20;
  setsockopt(blast, SOL_SOCKET, SO_SNDBUFFORCE, &much, sizeof much);
  sockaddr_in nobody{};
  nobody.sin_family = AF_INET;
  nobody.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  nobody.sin_port = htons(9);
  char bytes[4096] = {};
  const iovec part{bytes, sizeof bytes};
  size_t written = 0, came = 0;
  pollfd readable{other, POLLIN, 0};
  int attempt = 0;
  for (; attempt < 50; ++attempt) {
    for (int packet = 0; packet < 400; ++packet)
      sendto(blast, bytes, 1400, MSG_DONTWAIT, reinterpret_cast<sockaddr*>(&nobody), sizeof nobody);
    written += stream->write(&part, 1).bytes;
    if (info_of(ours).tcpi_unacked == 0 && info_of(ours).tcpi_notsent_bytes > 0) break;
    while (came < written && poll(&readable, 1, kDeadlineMs) > 0) {  // it found room
      const ssize_t n = ::read(other, bytes, sizeof bytes);
      if (n <= 0) return 2;
      came += static_cast<size_t>(n);
    }
    while (stream->try_again()) poll(nullptr, 0, 1);  // until all is acknowledged
  }
  if (attempt == 50) return 3;
  poll(&readable, 1, 60);  // the queue is empty after 40 ms, and Linux tries again after 200
  if (info_of(ours).tcpi_notsent_bytes == 0) return 77;  // a machine so slow that it has done so
  if (!stream->try_again()) return info_of(ours).tcpi_notsent_bytes == 0 ? 77 : 4;  // or just now
  if (info_of(ours).tcpi_notsent_bytes != 0) return 5;
  while (came < written && poll(&readable, 1, kDeadlineMs) > 0) {
    const ssize_t n = ::read(other, bytes, sizeof bytes);
    if (n <= 0) return 6;
    came += static_cast<size_t>(n);
  }
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::milliseconds(kDeadlineMs);
  while (stream->try_again())
    if (std::chrono::steady_clock::now() > deadline) return 7;
  return came == written ? 0 : 8;
}

// A queue of the host's own that is full, and nothing in flight whose acknowledgement would have the kernel try again.
TEST(SocketStream, SendsWhatItsHostHadNoRoomForWhenAsked) {
  const int status = status_in_network(
      "ip link set lo up mtu 1500 && tc qdisc add dev lo root tbf rate 40mbit burst 96kb latency 20ms",
      send_what_found_no_room);
  if (status == 77) GTEST_SKIP() << "no network namespace, no tc, or a machine that is too slow";
  EXPECT_EQ(status, 0);
}

// On a connection whose congestion window has fallen to 19 segments, in place of the 20 that two pieces take.
int grow_again() {
  // Only from the second connection on the kernel goes by that threshold.
  const StreamPair before = socket_pair(far_tcp_pair());
  before.first->close();
  before.second->close();
  const auto [ours, other] = far_tcp_pair();
  const std::unique_ptr<Stream> stream = stream_of(ours);
  LinkRate link;
  link.agree({9'375'000, 6});
  stream->share_link(&link);
  const auto congestion_window = [fd = ours] { return info_of(fd).tcpi_snd_cwnd; };
  if (congestion_window() != 19 || info_of(ours).tcpi_snd_ssthresh != 19) return 77;
  std::thread reader([fd = other] {
    std::vector<char> room(1 << 16);
    while (::read(fd, room.data(), room.size()) > 0) continue;
  });
  std::vector<char> slice(40'072);
  pollfd writable{ours, POLLOUT, 0};
  for (size_t written = 0; written < (16 << 20) && congestion_window() < 20;) {
    const iovec rest{slice.data(), slice.size() - written % slice.size()};
    written += stream->write(&rest, 1).bytes;
    if (poll(&writable, 1, kDeadlineMs) != 1) break;
  }
  const bool has_grown = congestion_window() >= 20;
  stream->end_writing();
  reader.join();
  return has_grown ? 0 : 1;
}

// Or a connection that has lost a packet has half of the others' in flight for good: the kernel splits what is written, and
// the pieces of it fill a send buffer of a piece before the congestion window.
TEST(SocketStream, ACongestionWindowThatHoldsNoTwoPiecesGrows) {
  const int status = status_in_network(
      "ip link set lo up mtu 1500 && tc qdisc add dev lo root tbf rate 75mbit burst 96kb latency 20ms &&"
      " ip route replace local 127.0.0.0/8 dev lo table local initcwnd 19 ssthresh lock 19 &&"
      " echo reno > /proc/sys/net/ipv4/tcp_congestion_control &&"
      " echo 0 > /proc/sys/net/ipv4/tcp_no_ssthresh_metrics_save",
      grow_again);
  if (status == 77) GTEST_SKIP() << "no network namespace, or no tc";
  EXPECT_EQ(status, 0);
}

TEST(SocketStream, PiecesFitIntoHalfOfASmallCongestionWindow) {
  EXPECT_EQ(SocketStream::fitting_piece(14'336, 20, 1448), 14'336u);
  EXPECT_EQ(SocketStream::fitting_piece(14'336, 19, 1448), 9u * 1448);
  EXPECT_EQ(SocketStream::fitting_piece(14'336, 2, 1448), 1448u);
  EXPECT_EQ(SocketStream::fitting_piece(14'336, 1, 1448), 1024u) << "some of it";
  EXPECT_EQ(SocketStream::fitting_piece(14'336, 10, 32'768), 14'336u);
}

// Or the kernel wakes its reader for each segment of a slice that is of no use before it is whole.
TEST(SocketStream, TheReadEventWaitsForWhatIsAwaitedOrTheEnd) {
  const StreamPair pair = socket_pair(tcp_pair());
  std::vector<char> bytes(8000);
  const auto send = [&](size_t count) {
    const iovec part{bytes.data(), count};
    ASSERT_EQ(pair.first->write(&part, 1).bytes, count);
  };
  const auto is_readable = [&](int within_ms) {
    pollfd readable{pair.second->read_fd(), POLLIN, 0};
    return poll(&readable, 1, within_ms) == 1;
  };
  const auto receive = [&](size_t most) {
    const iovec part{bytes.data(), most};
    return pair.second->read(&part, 1);
  };
  pair.second->await(8000);
  send(800);
  EXPECT_FALSE(is_readable(50));
  send(7200);
  EXPECT_TRUE(is_readable(10'000));
  IoResult result = receive(7200);
  EXPECT_EQ(result.bytes, 7200u);
  EXPECT_FALSE(result.emptied);
  result = receive(7200);
  EXPECT_EQ(result.bytes, 800u);
  EXPECT_TRUE(result.emptied);
  send(800);
  EXPECT_FALSE(is_readable(50));
  pair.second->await(1);
  EXPECT_TRUE(is_readable(10'000));
  pair.second->await(8000);
  pair.first->end_writing();
  EXPECT_TRUE(is_readable(10'000));
  EXPECT_EQ(receive(7200).bytes, 800u);
  EXPECT_TRUE(receive(7200).end);
}

// Of what is awaited, kernels before 4.18 acknowledge nothing, and later ones nothing that is a single segment, as all of a
// piece may be on loopback: so half of a window is as much as may be. A few packets are worth no system call.
TEST(SocketStream, AwaitsNoMoreThanTheKernelAcknowledgesAndNoLessThanAFewPackets) {
  StreamPair pair = socket_pair(tcp_pair());
  const auto low_water = [&](size_t bytes) {
    pair.second->await(bytes);
    int got = 0;
    socklen_t length = sizeof got;
    EXPECT_EQ(getsockopt(pair.second->read_fd(), SOL_SOCKET, SO_RCVLOWAT, &got, &length), 0);
    return got;
  };
  EXPECT_EQ(low_water(1 << 20), 8 << 10) << "the first window is 16 KiB";
  EXPECT_EQ(low_water(5000), 5000);
  EXPECT_EQ(low_water(4000), 1);
  pair = socket_pair(tcp_pair(0, INADDR_LOOPBACK, 1448));
  utsname kernel{};
  ASSERT_EQ(uname(&kernel), 0);
  EXPECT_EQ(low_water(1 << 20), (strverscmp(kernel.release, "4.18") < 0 ? 8 : 48) << 10);
}

// Loopback is a path of many Gbit/s: what has been written there must have raised the bound.
TEST(SocketStream, AFastPathGetsALargerBound) {
  const StreamPair pair = socket_pair(tcp_pair());
  move_through(pair, 64 << 20);
  EXPECT_GT(send_buffer(pair), 128 << 10);
}

// Or it would keep twice the share of connections that have come later.
TEST(SocketStream, ItsBoundIsItsShareWhenOthersCome) {
  LinkRate link;
  link.measured(uint64_t{1} << 40);  // more than loopback, so that only the number of connections decides
  const StreamPair pair = socket_pair(far_tcp_pair());
  pair.first->share_link(&link);
  int before = 0;
  for (uint64_t connections : {uint64_t{1} << 15, uint64_t{1} << 16}) {
    for (uint64_t never; link.connections() < connections; link.filled(never)) never = 0;
    move_through(pair, 4 << 20);
    const uint64_t bound = SocketStream::bytes_under_way(link.share(), 0);
    EXPECT_EQ(send_buffer(pair), static_cast<int>(bound));
    EXPECT_NE(send_buffer(pair), before);
    before = send_buffer(pair);
  }
}

// The peer may write its last bytes and go between the reader's look at the ring and its look at the socket.
TEST(Ring, TheLastBytesComeBeforeTheEnd) {
  for (int turn = 0; turn < 1500; ++turn) {
    StreamPair pair = ring_pair(4096);
    std::thread writer([&pair, turn] {
      for (volatile int delay = turn * 37 % 4000; delay > 0; delay = delay - 1) {
      }
      char last[64] = {};
      const iovec part{last, sizeof last};
      EXPECT_EQ(pair.first->write(&part, 1).bytes, sizeof last);
      pair.first->end_writing();
    });
    size_t came = 0;
    char bytes[128];
    const iovec part{bytes, sizeof bytes};
    for (IoResult result; !result.end; came += result.bytes) result = pair.second->read(&part, 1);
    writer.join();
    ASSERT_EQ(came, 64u) << "turn " << turn;
  }
}

TEST(Ring, MemoryThatIsNoRingIsRefused) {
  const auto refused = [](int memory) {
    const auto [maker, other] = unix_pair();
    RingStream::Descriptors descriptors = RingStream::make(4096);
    ::close(descriptors[0]);
    descriptors[0] = memory;
    ::close(maker);
    EXPECT_THROW(RingStream(other, descriptors, false), Error);
  };
  const auto memory = [](off_t size, int seals) {
    const int fd = memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    EXPECT_EQ(ftruncate(fd, size), 0);
    EXPECT_EQ(fcntl(fd, F_ADD_SEALS, seals), 0);
    return fd;
  };
  refused(memory(2 * 8192, 0));                  // could shrink under a copy
  refused(memory(2 * 8192 + 1, F_SEAL_SHRINK));  // no size that make() gives
  refused(memory(100, F_SEAL_SHRINK));
  refused(memory(0, F_SEAL_SHRINK));
  refused(-1);
}

TEST(Ring, ImpossibleSizesAreRefused) {
  for (size_t bytes : {size_t{0}, size_t{1}, size_t{2048}, size_t{5000}}) EXPECT_THROW(RingStream::make(bytes), Error);
}

}  // namespace
}  // namespace p3
