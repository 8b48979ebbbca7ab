// The sending role, the edges and the sleeping flags under many threads: whatever the interleaving, each frame arrives
// once, whole, and nothing waits for ever. P3_STRESS_S=60 makes it last; run that under -fsanitize=thread.
#include "transport/transport.h"

#include <gtest/gtest.h>
#include <linux/tcp.h>
#include <sys/ioctl.h>

#include <array>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <future>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "p3/ring_stream.h"
#include "transport/raw_peer.h"

namespace p3 {
namespace {

constexpr size_t kMaxPayload = 9000;  // more than two of the smallest rings
constexpr auto kDeadline = std::chrono::milliseconds(kDeadlineMs);

using StreamPair = std::pair<std::unique_ptr<Stream>, std::unique_ptr<Stream>>;

StreamPair ring_pair() {
  const auto [maker, other] = unix_pair();
  const RingStream::Descriptors made = RingStream::make(4096);
  RingStream::Descriptors passed;
  for (size_t i = 0; i < made.size(); ++i) passed[i] = dup(made[i]);
  return {std::make_unique<RingStream>(maker, made, true), std::make_unique<RingStream>(other, passed, false)};
}

StreamPair tcp_streams() {
  const auto [one, other] = tcp_pair(32 << 10);  // smaller ones have the kernel probe a closed window, for seconds
  return {stream_of(one), stream_of(other)};
}

StreamPair unix_streams() {
  const auto [one, other] = unix_pair();
  return {stream_of(one), stream_of(other)};
}

// A frame's payload is made of its number, so that the receiver can tell whether it is whole.
char byte_of(uint32_t number, size_t at) { return static_cast<char>(number * 31 + at); }

// One end of several vans. Hands every received slice to `on_slice`, on the receiver thread.
class Node : public Transport::Handler {
 public:
  explicit Node(const std::string& label, NodeOptions options = {})
      : transport((options.label = label, options), *this) {}

  void* receive_into(int van, const Header& header) override {
    auto& buffer = arriving[static_cast<size_t>(van)];
    EXPECT_LE(header.payload_bytes, kMaxPayload);
    buffer.assign(header.payload_bytes, 0);
    return buffer.data();
  }
  [[noreturn]] void refuse(int van, const Header&, const char* what) const override {
    throw Error(ErrorKind::kProtocol, transport.label(van) + " sent a slice that is " + what);
  }
  void received(int van, const Header& header, void* payload) override {
    const char* bytes = static_cast<const char*>(payload);
    for (size_t i = 0; i < header.payload_bytes; ++i)
      if (bytes[i] != byte_of(header.slice, i)) {
        ++torn;
        break;
      }
    if (on_slice) on_slice(van, header);
  }
  bool work() override { return on_work && on_work(); }
  void sent(const Frame&) override { ++sent_frames; }
  void left(int) override { ++goodbyes; }
  std::optional<Awaited> waiting_for(int) const override { return {}; }
  void failed(const Error&) override { ++failures; }

  std::function<void(int, const Header&)> on_slice;
  std::function<bool()> on_work;
  std::array<std::vector<char>, 16> arriving;
  std::atomic<uint64_t> torn{0}, sent_frames{0}, goodbyes{0}, failures{0};
  Transport transport;  // last: its threads use all of the above
};

class Payloads {
 public:
  Payloads() {
    for (uint32_t number = 0; number < kNumbers; ++number)
      for (size_t i = 0; i < kMaxPayload; ++i) bytes_[number][i] = byte_of(number, i);
  }
  Frame frame(uint32_t number, int32_t priority, uint32_t size) const {
    Frame made;
    made.header.kind = FrameKind::kPush;
    made.header.slice = number % kNumbers;
    made.header.priority = priority;
    made.header.payload_bytes = size;
    made.payload = bytes_[number % kNumbers].data();
    made.context = const_cast<Payloads*>(this);
    return made;
  }

 private:
  static constexpr uint32_t kNumbers = 16;
  std::array<std::array<char, kMaxPayload>, kNumbers> bytes_;
};

void connect(Node& one, Node& other, int vans_of_each_kind) {
  for (int i = 0; i < vans_of_each_kind; ++i)
    for (auto open : {ring_pair, tcp_streams, unix_streams}) {
      StreamPair ends = open();
      one.transport.add_van(std::move(ends.first), "the other");
      other.transport.add_van(std::move(ends.second), "the one");
    }
}

bool within_deadline(const std::function<bool()>& condition) {
  const auto end = std::chrono::steady_clock::now() + kDeadline;
  while (!condition()) {
    if (std::chrono::steady_clock::now() > end) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return true;
}

double stress_seconds() {
  const char* text = std::getenv("P3_STRESS_S");
  return text != nullptr ? std::atof(text) : 1.0;
}

TEST(Transport, EveryFrameArrivesOnceAndWholeWhoeverSends) {
  constexpr int kVansOfEachKind = 2, kVans = 3 * kVansOfEachKind, kThreads = 3;
  const Payloads payloads;
  const auto seed = std::random_device{}();
  SCOPED_TRACE("seed " + std::to_string(seed));
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(stress_seconds());
  for (uint64_t pass = 0; pass == 0 || std::chrono::steady_clock::now() < end; ++pass) {
    std::atomic<uint64_t> asked{0}, answered{0}, came{0};
    Node server("server"), client("client");
    // The server answers each frame on the thread that received it, as broadcasts do.
    server.on_slice = [&](int van, const Header& header) {
      ++came;
      const auto write = header.slice % 2 == 0 ? Transport::Write::kHere : Transport::Write::kBySender;
      server.transport.send({{van, payloads.frame(header.slice, header.priority, header.payload_bytes)}}, write);
    };
    client.on_slice = [&](int, const Header&) { ++answered; };
    connect(client, server, kVansOfEachKind);
    server.transport.start();
    client.transport.start();

    std::vector<std::thread> threads;
    for (unsigned thread = 0; thread < kThreads; ++thread)
      threads.emplace_back([&, thread] {
        std::mt19937 random(seed + 1000 * static_cast<unsigned>(pass) + thread);
        for (int burst = 0; burst < 60; ++burst) {
          std::vector<Transport::Outgoing> frames(1 + random() % 5);
          for (auto& out : frames)
            out = {static_cast<int>(random() % kVans),
                   payloads.frame(static_cast<uint32_t>(random()), static_cast<int32_t>(random() % 7) - 3,
                                  static_cast<uint32_t>(random() % (random() % 3 == 0 ? kMaxPayload : 200)))};
          asked += frames.size();
          client.transport.send(frames, random() % 2 == 0 ? Transport::Write::kHere : Transport::Write::kBySender);
          // Now and then both ends fall asleep, so that waking is tested too.
          if (random() % 8 == 0) within_deadline([&] { return answered >= asked || random() % 4 == 0; });
        }
      });
    for (std::thread& thread : threads) thread.join();
    ASSERT_TRUE(within_deadline([&] { return answered == asked; }))
        << asked << " asked, " << came << " came, " << answered << " answered";
    EXPECT_EQ(client.torn + server.torn, 0u);
    EXPECT_TRUE(within_deadline([&] { return client.sent_frames == asked && server.sent_frames == asked; }));
    EXPECT_TRUE(client.transport.finish(10));
    EXPECT_TRUE(within_deadline([&] { return server.goodbyes == kVans; }));
    EXPECT_TRUE(server.transport.finish(10));
    EXPECT_FALSE(client.transport.error());
    EXPECT_FALSE(server.transport.error());
    EXPECT_EQ(client.failures + server.failures, 0u);
  }
}

// A stream that stands still until it has been asked so many times.
class Standing : public SocketStream {
 public:
  Standing(int fd, std::atomic<int>& left) : SocketStream(fd, 128 << 10), left_(left) {}
  bool may_stand_still() const override { return true; }
  bool try_again() override { return --left_ > 0; }

 private:
  std::atomic<int>& left_;
};

// Whoever has written, and though no heartbeat would wake the sender for long.
TEST(Transport, AsksAStreamThatMayStandStillUntilAllIsSent) {
  const Payloads payloads;
  NodeOptions options;
  options.heartbeat_s = 1000;
  options.timeout_s = 4000;
  std::atomic<int> left{3}, left_there{3};
  Node client("client", options), server("server", options);
  server.on_slice = [&](int van, const Header&) {
    server.transport.send({{van, payloads.frame(2, 0, 100)}}, Transport::Write::kHere);  // its sender sleeps
  };
  const auto [ours, theirs] = tcp_pair();
  client.transport.add_van(std::make_unique<Standing>(ours, left), "server");
  server.transport.add_van(std::make_unique<Standing>(theirs, left_there), "client");
  server.transport.start();
  client.transport.start();
  client.transport.send({{0, payloads.frame(1, 0, 100)}});
  EXPECT_TRUE(within_deadline([&] { return left == 0 && left_there == 0; })) << left << ", " << left_there;
  left = left_there = 2;
  client.transport.send({{0, payloads.frame(1, 0, 100)}});
  EXPECT_TRUE(within_deadline([&] { return left == 0 && left_there == 0; })) << left << ", " << left_there;
  client.transport.stop();
  server.transport.stop();
}

// finish() while the receiver still answers on its own thread: whoever holds the sending role must wake who ends.
TEST(Transport, FinishEndsWhileOthersStillSend) {
  const Payloads payloads;
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(stress_seconds());
  for (uint64_t pass = 0; pass == 0 || std::chrono::steady_clock::now() < end; ++pass) {
    auto server = std::make_shared<Node>("server");
    auto client = std::make_shared<Node>("client");
    server->on_slice = [&, node = server.get()](int van, const Header& header) {
      node->transport.send({{van, payloads.frame(header.slice, 0, 8)}}, Transport::Write::kHere);
    };
    client->on_slice = [&, node = client.get()](int van, const Header& header) {
      node->transport.send({{van, payloads.frame(header.slice, 0, 8)}}, Transport::Write::kHere);
    };
    connect(*client, *server, 1);
    server->transport.start();
    client->transport.start();
    for (int van = 0; van < 3; ++van) client->transport.send({{van, payloads.frame(1, 0, 8)}});
    std::promise<void> ended;
    std::thread([&ended, server] {
      server->transport.finish(0.05);
      ended.set_value();
    }).detach();
    if (ended.get_future().wait_for(kDeadline) != std::future_status::ready) {
      ADD_FAILURE() << "finish() hangs";
      std::_Exit(1);  // its threads cannot be ended
    }
    client->transport.stop();
  }
}

// A peer that has not received the goodbye yet, as where packets were lost, and still sends: closing the connection now
// would reset it, and the kernel throws away what it has not delivered.
TEST(Transport, AGoodbyeArrivesThoughThePeerReadsLateAndStillSends) {
  const Payloads payloads;
  NodeOptions options;
  options.heartbeat_s = 50;
  options.timeout_s = 1000;
  Node node("node", options);
  const auto [ours, its] = tcp_pair(16 << 10);
  RawPeer peer(ours);
  node.transport.add_van(stream_of(its), "the peer", /*peer=*/0);
  node.transport.start();
  constexpr int kFrames = 4;
  for (int i = 0; i < kFrames; ++i) node.transport.send({{0, payloads.frame(1, 0, 8000)}});
  Header header;
  int came = 0;
  for (; came < 2; ++came) ASSERT_TRUE(peer.receive(header));  // the rest lies in the kernel, here or there
  std::future<bool> finished =
      std::async(std::launch::async, [&] { return node.transport.finish(kDeadlineMs / 1000, /*until_read=*/true); });
  ASSERT_TRUE(within_deadline(
      [&] { return node.transport.traffic().bytes_sent == kFrames * (sizeof(Header) + 8000) + sizeof(Header); }));
  // A node that closes now has done so soon; this one waits.
  const Header ping;
  for (int i = 0; i < 30 && finished.wait_for(std::chrono::milliseconds(10)) != std::future_status::ready; ++i)
    peer.send(ping);
  peer.send(ping);
  for (; came < kFrames; ++came) ASSERT_TRUE(peer.receive(header)) << "the connection ended after frame " << came;
  ASSERT_TRUE(peer.receive(header)) << "no goodbye came";
  EXPECT_EQ(header.kind, FrameKind::kBye);
  peer.close();
  ASSERT_EQ(finished.wait_for(kDeadline), std::future_status::ready);
  EXPECT_TRUE(finished.get());
}

TEST(Transport, WhoHasReadAGoodbyeAndTheEndEndsItsSide) {
  for (auto open : {ring_pair, tcp_streams, unix_streams}) {
    NodeOptions options;
    options.heartbeat_s = 50;
    options.timeout_s = 1000;
    Node leaves("leaves", options), stays("stays", options);
    StreamPair ends = open(), watch = unix_streams();
    leaves.transport.add_van(std::move(ends.first), "stays", 0);
    stays.transport.add_van(std::move(ends.second), "leaves", 0);
    leaves.transport.add_van(std::move(watch.first), "a watch");  // nobody waits for its end
    leaves.transport.start();
    stays.transport.start();
    std::future<bool> finished =
        std::async(std::launch::async, [&] { return leaves.transport.finish(1000, /*until_read=*/true); });
    ASSERT_EQ(finished.wait_for(kDeadline), std::future_status::ready);
    EXPECT_TRUE(finished.get());
    EXPECT_EQ(stays.goodbyes, 1u);
    EXPECT_FALSE(stays.transport.error());
    stays.transport.stop();
  }
}

TEST(Transport, FinishDoesNotWaitForEverForAPeerThatStaysSilent) {
  NodeOptions options;
  options.heartbeat_s = 0.1;
  options.timeout_s = 4;
  Node node("node", options);
  StreamPair ends = unix_streams();
  node.transport.add_van(std::move(ends.first), "silent", 0);
  node.transport.start();
  std::future<bool> finished =
      std::async(std::launch::async, [&] { return node.transport.finish(1000, /*until_read=*/true); });
  ASSERT_EQ(finished.wait_for(kDeadline), std::future_status::ready);
  EXPECT_TRUE(finished.get());
  EXPECT_FALSE(node.transport.error());
}

TEST(Transport, ANodeGoesOnWithoutItsSchedulerIfItIsTo) {
  const Payloads payloads;
  for (const bool outlives : {true, false}) {
    NodeOptions options;
    options.heartbeat_s = 0.05;
    options.timeout_s = 1000;
    options.outlives_scheduler = outlives;
    Node node("node", options), peer("peer", options);
    StreamPair ends = unix_streams();
    auto [first, watch] = unix_pair();
    node.transport.add_van(std::move(ends.first), "peer", 0);
    node.transport.add_van(stream_of(watch), "the scheduler");
    peer.transport.add_van(std::move(ends.second), "node", 0);
    std::atomic<int> came{0};
    peer.on_slice = [&](int, const Header&) { ++came; };
    node.transport.start();
    peer.transport.start();
    ::close(first);
    if (!outlives) {
      EXPECT_TRUE(within_deadline([&] { return node.transport.error().has_value(); }));
      EXPECT_EQ(node.transport.error()->kind(), ErrorKind::kPeerLost);
      continue;
    }
    Header header;
    for (int former = -1, schedulers = 0; schedulers < 3; ++schedulers) {  // the last two while the former one lives
      const auto [other, own] = unix_pair();
      node.transport.replace_watch(stream_of(own));
      RawPeer scheduler(dup(other));
      ASSERT_TRUE(scheduler.receive(header, true));
      EXPECT_EQ(header.kind, FrameKind::kPing);
      node.transport.send({{0, payloads.frame(1, 0, 100)}});
      EXPECT_TRUE(within_deadline([&] { return came == schedulers + 1; }));
      if (former >= 0) ::close(former);
      former = other;
    }
    EXPECT_FALSE(node.transport.error());
    node.transport.stop();
    peer.transport.stop();
  }
}

// Work that comes up while the receiver works, as when a frame leaves and lets another round begin. Nothing else would
// wake it within the deadline.
TEST(Transport, WorkThatIsAskedForDuringWorkIsDoneAtOnce) {
  NodeOptions options;
  options.heartbeat_s = 1000;
  options.timeout_s = 10000;
  Node node("node", options);
  std::atomic<int> calls{0};
  node.on_work = [&] {
    if (++calls == 2) node.transport.ask_for_work();
    return calls == 1;
  };
  node.transport.start();
  node.transport.ask_for_work();
  EXPECT_TRUE(within_deadline([&] { return calls >= 3; }));
  node.transport.stop();
}

// The stream tells when it takes more, and until then nobody can do anything.
TEST(Transport, WhatHasToWaitForAFullStreamWakesNobody) {
  const Payloads payloads;
  NodeOptions options;
  options.heartbeat_s = 50;
  options.timeout_s = 1000;
  Node node("node", options);
  const auto [end, fd] = tcp_pair(32 << 10);
  const RawPeer peer(end);  // which does not read
  node.transport.add_van(stream_of(fd), "peer", 0);
  node.transport.start();
  const auto push_some = [&] {
    for (int i = 0; i < 100; ++i) node.transport.send({{0, payloads.frame(1, 0, kMaxPayload)}});
  };
  // Once it is full, which the kernel may take a while for.
  EXPECT_TRUE(within_deadline([&] {
    const uint64_t before = node.transport.system_calls();
    push_some();
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
    return node.transport.system_calls() == before;
  }));
  node.transport.stop();
}

TEST(Transport, SmallPiecesOfWorkAreDoneByTheDozenBetweenTwoLooksAtTheVans) {
  NodeOptions options;
  options.heartbeat_s = 1000;
  options.timeout_s = 10000;
  Node node("node", options);
  constexpr int kPieces = 2000;
  std::atomic<int> calls{0};
  node.on_work = [&] { return ++calls < kPieces; };
  node.transport.start();
  node.transport.ask_for_work();
  EXPECT_TRUE(within_deadline([&] { return calls >= kPieces; }));
  EXPECT_LT(node.transport.system_calls(), kPieces / 4u);
  node.transport.stop();
}

TEST(Transport, FramesThatCameWholeCountThoughTheConnectionWasLostInTheNextOne) {
  const Payloads payloads;
  for (auto open : {+[] { return tcp_pair(); }, +[] { return unix_pair(); }}) {
    constexpr uint64_t kWhole = 10;
    Node node("node");
    std::atomic<uint64_t> came{0};
    node.on_slice = [&](int, const Header&) { ++came; };
    const auto [end, fd] = open();
    RawPeer peer(end);
    node.transport.add_van(stream_of(fd), "peer", 0);
    node.transport.start();
    std::vector<char> bytes;
    for (uint64_t i = 0; i <= kWhole; ++i) {
      const Frame frame = payloads.frame(static_cast<uint32_t>(i), 0, 100);
      const char* header = reinterpret_cast<const char*>(&frame.header);
      const char* payload = static_cast<const char*>(frame.payload);
      bytes.insert(bytes.end(), header, header + sizeof(Header));
      bytes.insert(bytes.end(), payload, payload + (i < kWhole ? 100 : 50));
    }
    peer.send_bytes(bytes.data(), bytes.size());
    peer.close();
    ASSERT_TRUE(within_deadline([&] { return node.transport.error().has_value(); }));
    EXPECT_EQ(node.transport.error()->kind(), ErrorKind::kPeerLost);
    EXPECT_EQ(came, kWhole);
    EXPECT_EQ(node.torn, 0u);
  }
}

// A peer that takes whatever comes at once.
class Sink : public Stream {
 public:
  explicit Sink(std::unique_ptr<Stream> end) : end_(std::move(end)) {}
  IoResult write(const iovec* parts, int count) override {
    IoResult result;
    for (int i = 0; i < count; ++i) result.bytes += parts[i].iov_len;
    ++writes;
    return result;
  }
  IoResult read(const iovec* parts, int count) override { return end_->read(parts, count); }
  int read_fd() const override { return end_->read_fd(); }
  int write_fd() const override { return end_->write_fd(); }
  uint32_t write_event() const override { return end_->write_event(); }
  void share_link(LinkRate* shared) override { link = shared; }
  void end_writing() override { end_->end_writing(); }
  void close() override { end_->close(); }

  std::atomic<int> writes{0};
  LinkRate* link = nullptr;

 private:
  std::unique_ptr<Stream> end_;
};

// Its reader waits for much of a payload at once, but never for what belongs to the next frame, which may not come soon.
TEST(Transport, AFrameIsReceivedWithItsLastByteInWhateverPiecesItCame) {
  std::atomic<uint64_t> came{0};
  Node node("node");
  node.on_slice = [&](int, const Header&) { ++came; };
  const auto [end, fd] = tcp_pair();
  const int on = 1;
  ASSERT_EQ(setsockopt(end, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on), 0);
  RawPeer peer(end);
  node.transport.add_van(stream_of(fd), "peer", 0);
  node.transport.start();
  const Payloads payloads;
  const auto started = std::chrono::steady_clock::now();
  std::mt19937 random(1);
  for (uint32_t number = 0; number < 200; ++number) {
    const auto payload_bytes = static_cast<uint32_t>(number % 4 == 0 ? kMaxPayload : random() % kMaxPayload);
    const Frame frame = payloads.frame(number, 0, payload_bytes);
    std::vector<char> bytes(sizeof(Header) + frame.header.payload_bytes);
    std::memcpy(bytes.data(), &frame.header, sizeof(Header));
    std::memcpy(bytes.data() + sizeof(Header), frame.payload, frame.header.payload_bytes);
    for (size_t at = 0, size; at < bytes.size(); at += size) {
      size = std::min<size_t>(bytes.size() - at, 1 + random() % 5000);
      peer.send_bytes(bytes.data() + at, size);
      int unread = 1;
      // Between frames any byte is read at once: what follows meets a reader that waits for the rest of a payload.
      while (at == 0 && unread > 0) {
        ASSERT_EQ(ioctl(fd, FIONREAD, &unread), 0);
        ASSERT_LT(std::chrono::steady_clock::now() - started, kDeadline);
        std::this_thread::yield();
      }
    }
    ASSERT_TRUE(within_deadline([&] { return came == number + 1; })) << "frame " << number;
    ASSERT_LT(std::chrono::steady_clock::now() - started, kDeadline) << "frame " << number;
  }
  EXPECT_EQ(node.torn, 0u);
}

// A node's peer over TCP that has sent the header of a large frame, and nothing of what belongs to it.
class BegunFrame {
 public:
  explicit BegunFrame(Node& node) : BegunFrame(node, tcp_pair()) {}

  RawPeer peer;
  const int fd;  // the node's
  const Payloads payloads;
  const Frame frame = payloads.frame(1, 0, kMaxPayload);

  int unread() const {
    int bytes = -1;
    EXPECT_EQ(ioctl(fd, FIONREAD, &bytes), 0);
    return bytes;
  }

 private:
  BegunFrame(Node& node, const std::pair<int, int>& ends) : peer(ends.first), fd(ends.second) {
    node.transport.add_van(stream_of(fd), "peer", 0);
    node.transport.start();
    peer.send_bytes(&frame.header, sizeof(Header));
  }
};

// Less than what its reader waits for is not read at once, but it is a sign of life.
TEST(Transport, WhoSendsAFewBytesNowAndThenIsNotSilent) {
  NodeOptions options;
  options.heartbeat_s = 0.1;
  options.timeout_s = 3;
  Node node("node", options);
  BegunFrame begun(node);
  const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(4);
  while (std::chrono::steady_clock::now() < until) {
    begun.peer.send_bytes(begun.frame.payload, 10);
    while (begun.unread() > 0 && !node.transport.error()) std::this_thread::yield();
    const std::optional<Error> error = node.transport.error();
    ASSERT_FALSE(error) << error->what();
  }
}

// Or it would close with bytes unread, which resets the connection, and the peer may lose the goodbye.
TEST(Transport, WhatItNoLongerWantsIsReadAtOnceThoughItWaitedForMore) {
  NodeOptions options = timeless("node");
  options.heartbeat_s = 0.1;  // how often it looks at who is silent
  Node node("node", options);
  BegunFrame begun(node);
  begun.peer.send_bytes(begun.frame.payload, 100);
  ASSERT_TRUE(within_deadline([&] { return begun.unread() == 0; }));
  std::future<bool> finished =
      std::async(std::launch::async, [&] { return node.transport.finish(kDeadlineMs / 1000, true); });
  Header bye;
  ASSERT_TRUE(begun.peer.receive(bye));
  EXPECT_EQ(bye.kind, FrameKind::kBye);
  EXPECT_FALSE(begun.peer.receive(bye)) << "its side must have ended: from here on it discards";
  begun.peer.send_bytes(begun.frame.payload, 100);
  ASSERT_TRUE(within_deadline([&] { return begun.unread() <= 0; }));
  begun.peer.close();
  EXPECT_TRUE(finished.get());
}

TEST(Transport, ItsVansShareOneLink) {
  Node node("node");
  std::vector<Sink*> sinks;
  std::vector<std::unique_ptr<Stream>> ends;
  for (int i = 0; i < 3; ++i) {
    StreamPair pair = unix_streams();
    auto sink = std::make_unique<Sink>(std::move(pair.first));
    sinks.push_back(sink.get());
    ends.push_back(std::move(pair.second));
    node.transport.add_van(std::move(sink), "another machine", i < 2 ? i : kNoPeer);
  }
  EXPECT_NE(sinks[0]->link, nullptr);
  EXPECT_EQ(sinks[0]->link, sinks[1]->link);
  EXPECT_EQ(sinks[2]->link, nullptr) << "a watch carries no slices";
}

// A sender that never gets to sleep must give its other vans their heartbeats all the same.
TEST(Transport, AnIdleVanGetsSignsOfLifeWhileAnotherIsBusy) {
  const Payloads payloads;
  NodeOptions options;
  options.heartbeat_s = 0.02;
  Node busy("busy", options), quiet("quiet", options);
  StreamPair idle = unix_streams();
  StreamPair flood = unix_streams();
  busy.transport.add_van(std::move(idle.first), "quiet");
  quiet.transport.add_van(std::move(idle.second), "busy");

  busy.transport.add_van(std::make_unique<Sink>(std::move(flood.first)), "a sink");
  busy.transport.start();
  quiet.transport.start();

  std::vector<Transport::Outgoing> frames(100, {1, payloads.frame(0, 0, 8)});
  const auto counted = [&quiet] { return quiet.transport.traffic().bytes_received; };
  // Refills the queue faster than it drains.
  std::atomic<bool> stop{false};
  std::atomic<uint64_t> pushed{0};
  std::thread feeder([&] {
    while (!stop)
      if (pushed - busy.sent_frames < 100000) busy.transport.send(frames), pushed += frames.size();
  });
  EXPECT_TRUE(within_deadline([&] { return pushed - busy.sent_frames >= 50000; }));
  const uint64_t before = counted();
  const bool pinged = within_deadline([&] { return counted() >= before + 5 * sizeof(Header); });
  EXPECT_TRUE(pinged) << "bytes that came meanwhile: " << counted() - before;
  stop = true;
  feeder.join();
  busy.transport.stop();
  quiet.transport.stop();
}

}  // namespace
}  // namespace p3
