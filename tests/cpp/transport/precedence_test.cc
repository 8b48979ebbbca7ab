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
  explicit Quiet(NodeOptions options) : transport((options.label = "the node", options), *this) {}

  void* receive_into(int, const Header&) override { return arriving.data(); }
  [[noreturn]] void refuse(int, const Header&, const char* what) const override {
    throw Error(ErrorKind::kProtocol, std::string("a frame that is ") + what);
  }
  void received(int, const Header& header, void*) override { last_round = header.round; }
  void sent(const Frame&) override {}
  void left(int) override {}
  std::optional<Awaited> waiting_for(int) const override { return {}; }

  std::array<char, 1024> arriving{};
  std::atomic<uint64_t> last_round{0};
  Transport transport;  // last: its threads use all of the above
};

struct Job {
  // Small buffers, so that the link is full at once.
  Job() {
    NodeOptions options;
    options.heartbeat_s = 0.05;
    options.max_held_bytes = 64 << 10;
    node = std::make_unique<Quiet>(options);
    const auto [near, its_near] = unix_pair();
    const auto [far, its_far] = tcp_pair(4096);
    near_peer.emplace(near);
    far_peer.emplace(far);
    node->transport.add_van(std::make_unique<Local>(its_near), "of this machine", 0);
    node->transport.add_van(stream_of(its_far), "of another", 1, /*is_bounded=*/true);
  }

  static constexpr int kNear = 0, kFar = 1;

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

  // Values of this round and later ones: until the node, which may not have heard of it yet, keeps one back. How many
  // have been given to it.
  uint64_t keep_back(uint64_t round) {
    near_peer->send(yields(round, true));
    uint64_t sent = 0;
    do send(kFar, FrameKind::kValue, round + sent++, true);
    while (next(*far_peer).kind != FrameKind::kPing);
    return sent;
  }

  std::optional<RawPeer> near_peer, far_peer;
  std::unique_ptr<Quiet> node;
};

TEST(Transport, KeepsBackValuesOfTheRoundWhileAWorkerOfItsMachinePushes) {
  Job job;
  job.node->transport.start();
  const uint64_t sent = job.keep_back(5);
  EXPECT_GE(sent, 1u) << "a heartbeat comes in the place of a value that is kept back";
  Header header;
  job.send(Job::kFar, FrameKind::kValue, 4, true);
  while ((header = job.next(*job.far_peer)).kind == FrameKind::kPing) continue;
  EXPECT_EQ(header.round, 4u) << "an older round goes on";
  job.send(Job::kNear, FrameKind::kValue, 5, true);
  EXPECT_EQ(job.near_peer->must_receive().round, 5u) << "what stays on the machine goes on";
  job.near_peer->send(yields(5, false));
  EXPECT_EQ(job.far_peer->must_receive().round, 5 + sent - 1);
}

// Else two machines that keep back copies for each other would read nothing of what ends that.
TEST(Transport, ReadsFromAPeerHoweverMuchIsKeptBackForIt) {
  Job job;
  job.node->transport.start();
  job.keep_back(5);
  const std::vector<char> rows(1 << 20);
  job.send(Job::kFar, FrameKind::kRows, 5, true, rows);
  Header push;
  push.kind = FrameKind::kPush;
  push.round = 9;
  push.encoding = static_cast<uint8_t>(Encoding::kAbsent);
  job.far_peer->send(push);
  EXPECT_TRUE(eventually([&] { return job.node->last_round == 9; }));
  job.near_peer->send(yields(5, false));
  int rows_frames = 0;
  for (int frame = 0; frame < 2; ++frame) rows_frames += job.far_peer->must_receive().kind == FrameKind::kRows;
  EXPECT_EQ(rows_frames, 1);
}

TEST(Transport, KeepsNothingBackForAWorkerThatHasGone) {
  Job job;
  job.node->transport.start();
  const uint64_t sent = job.keep_back(5);
  Header bye;
  bye.kind = FrameKind::kBye;
  job.near_peer->send(bye);
  job.near_peer->close();
  EXPECT_EQ(job.far_peer->must_receive().round, 5 + sent - 1);
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

TEST(Transport, RefusesToYieldToAnotherMachine) {
  Job job;
  job.node->transport.start();
  job.far_peer->send(yields(5, true));
  EXPECT_NE(job.far_peer->receive_failure().find("of another machine"), std::string::npos);
}

}  // namespace
}  // namespace p3
