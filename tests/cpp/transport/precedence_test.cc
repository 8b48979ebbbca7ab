// Pushes before values on the link of one machine: what a worker tells, and what a server keeps back.
#include "transport/precedence.h"

#include <gtest/gtest.h>

#include <array>
#include <memory>
#include <optional>
#include <vector>

#include "transport/raw_peer.h"
#include "transport/transport.h"

namespace p3 {
namespace {

Header yields(uint64_t round, bool waits) {
  Header made;
  made.kind = FrameKind::kYield;
  made.round = round;
  made.part = waits;
  return made;
}

TEST(WaitingPushes, AreToldOfWhenTheLinkIsFullAndWhenNoneIsLeft) {
  WaitingPushes waiting;
  waiting.queued(7);
  waiting.queued(7);
  EXPECT_FALSE(waiting.news()) << "they may leave at once";
  auto news = waiting.news(7);
  ASSERT_TRUE(news);
  EXPECT_EQ(news->round, 7u);
  EXPECT_EQ(news->part, 1);
  EXPECT_FALSE(waiting.news(7)) << "told already";
  waiting.left(7);
  EXPECT_FALSE(waiting.news()) << "one still waits";
  waiting.queued(8);
  waiting.left(7);
  news = waiting.news();
  ASSERT_TRUE(news) << "an older round lets more go on than a newer one";
  EXPECT_EQ(news->round, 8u);
  waiting.left(8);
  news = waiting.news();
  ASSERT_TRUE(news);
  EXPECT_EQ(news->part, 0);
  EXPECT_FALSE(waiting.news());
  waiting.left(8);  // of a connection that was replaced: nothing is counted twice
  EXPECT_FALSE(waiting.news());
}

TEST(Precedence, IsThatOfTheOldestRoundOfAnyWorkerThatIsThere) {
  Precedence precedence;
  EXPECT_FALSE(precedence.holds_back(9));
  precedence.told(1, yields(5, true));
  precedence.told(2, yields(3, true));
  EXPECT_FALSE(precedence.holds_back(2));
  EXPECT_TRUE(precedence.holds_back(3));
  precedence.told(2, yields(3, false));
  EXPECT_FALSE(precedence.holds_back(4));
  EXPECT_TRUE(precedence.holds_back(5));
  precedence.gone(1);
  EXPECT_FALSE(precedence.holds_back(5));
}

// A connection of this machine, whose other end the test plays.
class Local final : public SocketStream {
 public:
  explicit Local(int fd) : SocketStream(fd, 128 << 10) {}
  bool is_local() const override { return true; }
};

class Quiet final : public Transport::Handler {
 public:
  explicit Quiet(const NodeOptions& options) : transport(options, *this) {}

  void* receive_into(int, const Header&) override { return arriving.data(); }
  [[noreturn]] void refuse(int, const Header&, const char* what) const override {
    throw Error(ErrorKind::kProtocol, std::string("a frame that is ") + what);
  }
  void received(int, const Header& header, void*) override { received_round = header.round; }
  void sent(const Frame&) override {}
  void left(int) override {}
  std::optional<Awaited> waiting_for(int) const override { return {}; }
  uint64_t last_round() const override { return told_round; }

  std::array<char, 1024> arriving{};
  std::atomic<uint64_t> received_round{0}, told_round{0};  // by the last frame, and by the heartbeats to come
  Transport transport;                                     // last: its threads use all of the above
};

struct Job {
  // Small buffers, so that the link is full at once.
  Job() {
    NodeOptions options = timeless("the node");
    options.heartbeat_s = 0.05;
    options.max_held_bytes = 64 << 10;
    node = std::make_unique<Quiet>(options);
    const auto [near, its_near] = unix_pair();
    const auto [far, its_far] = tcp_pair(4096);
    const auto [third, its_third] = tcp_pair(4096);
    near_peer.emplace(near);
    far_peer.emplace(far);
    third_peer.emplace(third);
    node->transport.add_van(std::make_unique<Local>(its_near), "of this machine", 0);
    node->transport.add_van(stream_of(its_far), "of another", 1, /*is_bounded=*/true);
    node->transport.add_van(stream_of(its_third), "of a third one", 2);
  }

  static constexpr int kNear = 0, kFar = 1, kThird = 2;
  static constexpr uint64_t kBehind = 1000;  // a round that no value is of

  void send(int van, FrameKind kind, uint64_t round, bool yields, const std::vector<char>& payload = {}) {
    Frame frame;
    frame.header.kind = kind;
    frame.header.round = round;
    frame.header.payload_bytes = static_cast<uint32_t>(payload.size());
    if (payload.empty()) frame.header.encoding = static_cast<uint8_t>(Encoding::kAbsent);
    frame.payload = payload.data();
    frame.yields = yields;
    frame.copied_bytes = static_cast<uint32_t>(payload.size());
    node->transport.send({{van, frame}});
  }

  // The next frame from there, a heartbeat too.
  static Header next(RawPeer& peer) {
    Header header;
    EXPECT_TRUE(peer.receive(header, /*heartbeats=*/true));
    return header;
  }

  static void push(RawPeer& peer, uint64_t round) {
    Header header;
    header.kind = FrameKind::kPush;
    header.round = round;
    header.encoding = static_cast<uint8_t>(Encoding::kAbsent);
    peer.send(header);
  }

  // A value of this round, which the node keeps back: it has heard that it is to, as what came behind that has come.
  void keep_back(uint64_t round) {
    near_peer->send(yields(round, true));
    push(*near_peer, kBehind);
    ASSERT_TRUE(eventually([&] { return node->received_round == kBehind; }));
    send(kFar, FrameKind::kValue, round, true);
    expect_nothing_but_heartbeats(*far_peer);
  }

  void expect_nothing_but_heartbeats(RawPeer& peer) {
    node->told_round = kBehind;
    Header came;
    do came = next(peer);
    while (came.kind == FrameKind::kPing && came.round != kBehind && !testing::Test::HasFailure());
    EXPECT_EQ(came.round, kBehind) << "a heartbeat comes in the place of a value that is kept back";
  }

  std::optional<RawPeer> near_peer, far_peer, third_peer;
  std::unique_ptr<Quiet> node;
};

TEST(Transport, KeepsBackValuesOfTheRoundWhileAWorkerOfItsMachinePushes) {
  Job job;
  job.node->transport.start();
  job.keep_back(5);
  Header header;
  job.send(Job::kFar, FrameKind::kValue, 4, true);
  while ((header = job.next(*job.far_peer)).kind == FrameKind::kPing) continue;
  EXPECT_EQ(header.round, 4u) << "an older round goes on";
  job.send(Job::kNear, FrameKind::kValue, 5, true);
  EXPECT_EQ(job.near_peer->must_receive().round, 5u) << "what stays on the machine goes on";
  job.near_peer->send(yields(5, false));
  EXPECT_EQ(job.far_peer->must_receive().round, 5u);
}

// Else two machines that keep back copies for each other would read nothing of what ends that.
TEST(Transport, ReadsFromAPeerHoweverMuchIsKeptBackForIt) {
  Job job;
  job.node->transport.start();
  job.keep_back(5);
  const std::vector<char> rows(1 << 20);
  job.send(Job::kFar, FrameKind::kRows, 5, true, rows);
  Job::push(*job.far_peer, 9);
  EXPECT_TRUE(eventually([&] { return job.node->received_round == 9; }));
  job.near_peer->send(yields(5, false));
  int rows_frames = 0;
  for (int frame = 0; frame < 2; ++frame) rows_frames += job.far_peer->must_receive().kind == FrameKind::kRows;
  EXPECT_EQ(rows_frames, 1);
}

TEST(Transport, KeepsNothingBackForAWorkerThatHasGone) {
  Job job;
  job.node->transport.start();
  job.keep_back(5);
  Header bye;
  bye.kind = FrameKind::kBye;
  job.near_peer->send(bye);
  job.near_peer->close();
  EXPECT_EQ(job.far_peer->must_receive().round, 5u);
}

TEST(Transport, TellsOfItsPushesWhileTheLinkDoesNotTakeThem) {
  Job job;
  job.node->transport.put_pushes_first();
  job.node->transport.start();
  const std::vector<char> gradient(4 << 20);
  job.send(Job::kFar, FrameKind::kPush, 7, false, gradient);
  Header told = job.near_peer->must_receive();
  EXPECT_EQ(told.kind, FrameKind::kYield);
  EXPECT_EQ(told.round, 7u);
  EXPECT_EQ(told.part, 1);
  EXPECT_EQ(job.far_peer->must_receive().kind, FrameKind::kPush);
  told = job.near_peer->must_receive();
  EXPECT_EQ(told.kind, FrameKind::kYield);
  EXPECT_EQ(told.part, 0);
}

TEST(Transport, KeepsBackItsOwnValuesOfTheRoundWhileTheLinkDoesNotTakeItsPushes) {
  Job job;
  job.node->transport.put_pushes_first();
  job.node->transport.start();
  const std::vector<char> gradient(4 << 20);
  job.send(Job::kFar, FrameKind::kPush, 7, false, gradient);
  EXPECT_EQ(job.near_peer->must_receive().kind, FrameKind::kYield);
  job.send(Job::kThird, FrameKind::kValue, 7, true);
  job.expect_nothing_but_heartbeats(*job.third_peer);
  job.send(Job::kThird, FrameKind::kValue, 6, true);
  EXPECT_EQ(job.third_peer->must_receive().round, 6u) << "an older round goes on";
  EXPECT_EQ(job.far_peer->must_receive().kind, FrameKind::kPush);
  EXPECT_EQ(job.third_peer->must_receive().round, 7u);
}

TEST(Transport, RefusesToYieldToAnotherMachine) {
  Job job;
  job.node->transport.start();
  job.far_peer->send(yields(5, true));
  EXPECT_NE(job.far_peer->receive_failure().find("of another machine"), std::string::npos);
}

}  // namespace
}  // namespace p3
