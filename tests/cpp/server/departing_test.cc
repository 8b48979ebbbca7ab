// A van that is lost and replaced, and a server that outlives workers: nothing of a lost one is mistaken for its
// successor's, nothing that was borrowed stays away, and what it had pushed counts.
#include <gtest/gtest.h>

#include <atomic>
#include <random>
#include <thread>
#include <vector>

#include "p3/ring_stream.h"
#include "plan/rows.h"
#include "server/server_job.h"
#include "transport/transport.h"

namespace p3 {
namespace {

// --- transport -----------------------------------------------------------------------------------------------------

// A node that goes on without its peers, and counts what it is told.
class Survivor : public Transport::Handler {
 public:
  explicit Survivor(double timeout_s = kForeverS) : transport(node_options(timeout_s), *this) {}

  static NodeOptions node_options(double timeout_s) {
    NodeOptions made = timeless("the survivor");
    made.timeout_s = timeout_s;
    made.heartbeat_s = timeout_s / 10;
    made.max_held_bytes = 1 << 20;
    return made;
  }
  void* receive_into(int, const Header& header) override {
    arriving.resize(header.payload_bytes);
    return arriving.data();
  }
  [[noreturn]] void refuse(int, const Header&, const char* what) const override {
    throw Error(ErrorKind::kProtocol, what);
  }
  void received(int, const Header&, void*) override { ++slices; }
  void sent(const Frame&) override { ++returned; }
  void left(int) override {}
  bool lost(int van, const Error& loss) override {
    if (loss.kind() == ErrorKind::kPeerSilent) silent += 1 << van;
    ++losses;
    return true;
  }
  std::optional<Awaited> waiting_for(int) const override { return {}; }

  std::vector<char> arriving;
  std::atomic<uint64_t> slices{0}, returned{0}, losses{0};
  std::atomic<int> silent{0};  // bit by bit: which vans were lost as such
  Transport transport;         // last: its threads use all of the above
};

Frame frame_of(std::vector<char>& payload, Survivor& owner) {
  Frame frame;
  frame.header.kind = FrameKind::kPush;
  frame.header.payload_bytes = static_cast<uint32_t>(payload.size());
  frame.payload = payload.data();
  frame.context = &owner;
  return frame;
}

TEST(LostVan, ReturnsAllThatItHadBorrowedAlsoAHalfWrittenFrame) {
  Survivor node;
  const auto [ours, its] = tcp_pair(4096);
  RawPeer peer(ours);
  node.transport.add_van(stream_of(its), "the peer");
  node.transport.start();
  std::vector<char> payload(16 << 20);  // more than any buffer takes
  for (int i = 0; i < 3; ++i) node.transport.send({{0, frame_of(payload, node)}});
  ASSERT_TRUE(peer.readable(kDeadlineMs));  // the first one is on its way
  peer.close();
  ASSERT_TRUE(eventually([&] { return node.returned == 3; }));
  node.transport.send({{0, frame_of(payload, node)}});  // to nobody
  EXPECT_EQ(node.returned, 4u);
  EXPECT_EQ(node.losses, 1u);
  EXPECT_FALSE(node.transport.error());
}

TEST(LostVan, IsReplacedAndKnowsNothingOfTheHalfFrameBefore) {
  Survivor node;
  auto [ours, its] = unix_pair();
  RawPeer peer(ours);
  node.transport.add_van(stream_of(its), "the peer");
  node.transport.start();
  Header header;
  header.kind = FrameKind::kPush;
  header.payload_bytes = 8;
  peer.send_bytes(&header, sizeof header);
  peer.send_bytes("1234", 4);
  peer.close();
  ASSERT_TRUE(eventually([&] { return node.losses == 1; }));

  const auto [again, its_again] = unix_pair();
  RawPeer successor(again);
  node.transport.run_in_receiver([&, end = its_again] { node.transport.replace_van(0, stream_of(end)); });
  successor.send(header, "12345678");
  ASSERT_TRUE(eventually([&] { return node.slices == 1; }));
  std::vector<char> payload(100, 'x');
  node.transport.send({{0, frame_of(payload, node)}});
  EXPECT_EQ(successor.must_receive().payload_bytes, 100u);
  EXPECT_TRUE(eventually([&] { return node.returned == 1; }));  // nobody reads `payload` any more
  EXPECT_FALSE(node.transport.error());
}

TEST(LostVan, MayBeOneFromTheBeginning) {
  Survivor node;
  node.transport.add_van(nullptr, "nobody yet");
  node.transport.start();
  std::vector<char> payload(100, 'x');
  node.transport.send({{0, frame_of(payload, node)}});
  EXPECT_EQ(node.returned, 1u);
  node.transport.run_in_receiver([&] { node.transport.drop_van(0); });  // it is already
  const auto [ours, its] = unix_pair();
  RawPeer peer(ours);
  node.transport.run_in_receiver([&, end = its] { node.transport.replace_van(0, stream_of(end)); });
  node.transport.send({{0, frame_of(payload, node)}});
  EXPECT_EQ(peer.must_receive().payload_bytes, 100u);
  peer.close();
  EXPECT_TRUE(eventually([&] { return node.losses == 1; }));
  EXPECT_FALSE(node.transport.error());
}

TEST(LostVan, ThatWasNotReadBecauseTooMuchWaitedForItIsReadAgain) {
  Survivor node;
  const auto [ours, its] = tcp_pair(4096);
  RawPeer peer(ours);
  node.transport.add_van(stream_of(its), "the peer", 0, /*is_bounded=*/true);
  node.transport.start();
  std::vector<char> payload(16 << 20);
  Frame frame = frame_of(payload, node);
  frame.copied_bytes = frame.header.payload_bytes;
  node.transport.send({{0, frame}});
  Header header;
  header.kind = FrameKind::kPush;
  peer.send(header);
  for (int turn = 0; turn < 2; ++turn) node.transport.run_in_receiver([] {});  // it has looked at the peer
  EXPECT_EQ(node.slices, 0u);

  const auto [again, its_again] = unix_pair();
  RawPeer successor(again);
  node.transport.run_in_receiver([&] { node.transport.drop_van(0); });
  EXPECT_EQ(node.transport.traffic().held_bytes, 0u);
  node.transport.run_in_receiver([&, end = its_again] { node.transport.replace_van(0, stream_of(end)); });
  successor.send(header);
  EXPECT_TRUE(eventually([&] { return node.slices == 1; }));
  EXPECT_FALSE(node.transport.error()) << node.transport.error()->what();
}

TEST(LostVan, IsOneWhosePeerIsSilentOrHasFailed) {
  Survivor node(0.3);
  const auto [ours, its] = unix_pair();
  const auto [others, its_other] = unix_pair();
  RawPeer silent(ours), failing(others);
  node.transport.add_van(stream_of(its), "the silent peer");
  node.transport.add_van(stream_of(its_other), "the failing peer");
  Header header;
  header.kind = FrameKind::kFail;
  header.payload_bytes = 4;
  failing.send(header, "oops");
  node.transport.start();
  ASSERT_TRUE(eventually([&] { return node.losses == 2; }));
  EXPECT_EQ(node.silent, 1 << 0);
  EXPECT_FALSE(node.transport.error());
}

TEST(Transport, ATaskForAReceiverThatHasEndedIsAnError) {
  Survivor node;
  const auto [ours, its] = unix_pair();
  RawPeer peer(ours);
  node.transport.add_van(stream_of(its), "the peer");
  node.transport.start();
  node.transport.fail(Error(ErrorKind::kStopped, "enough"));
  ASSERT_TRUE(wait_readable(node.transport.event_fd()));
  EXPECT_THROW(node.transport.run_in_receiver([] {}), Error);
}

// For the sanitizer of threads: many send while vans come and go. P3_STRESS_S makes it last.
TEST(LostVan, EverySentFrameComesBackOnceWhileVansAreReplaced) {
  const char* seconds = std::getenv("P3_STRESS_S");
  const auto until = std::chrono::steady_clock::now() + std::chrono::milliseconds(seconds ? 1000 * atoi(seconds) : 300);
  Survivor node;
  constexpr int kVans = 3;
  std::vector<RawPeer> peers;
  for (int i = 0; i < kVans; ++i) {
    const auto [ours, its] = unix_pair();
    peers.emplace_back(ours);
    node.transport.add_van(stream_of(its), "the peer");
  }
  node.transport.start();
  std::vector<char> payload(20000);
  std::atomic<bool> stop{false};
  std::atomic<uint64_t> sent{0};
  std::vector<std::thread> senders;
  for (int i = 0; i < 3; ++i)
    senders.emplace_back([&, i] {
      for (int n = 0; !stop; ++n) {
        node.transport.send({{n % kVans, frame_of(payload, node)}},
                            i == 0 ? Transport::Write::kBySender : Transport::Write::kHere);
        ++sent;
        while (!stop && sent > node.returned + 50) std::this_thread::yield();
      }
    });
  std::mt19937 random(7);
  for (uint64_t lost = 0; std::chrono::steady_clock::now() < until;) {
    const size_t van = random() % kVans;
    for (RawPeer& peer : peers)
      while (peer.readable(0)) peer.must_receive();
    peers[van].close();
    ++lost;
    ASSERT_TRUE(eventually([&] { return node.losses >= lost; }));
    const auto [ours, its] = unix_pair();
    peers[van] = RawPeer(ours);
    node.transport.run_in_receiver(
        [&, end = its] { node.transport.replace_van(static_cast<int>(van), stream_of(end)); });
  }
  stop = true;
  for (std::thread& sender : senders) sender.join();
  for (RawPeer& peer : peers) peer.close();
  EXPECT_TRUE(eventually([&] { return node.returned == sent; })) << node.returned << " of " << sent;
}

// --- server --------------------------------------------------------------------------------------------------------

// Another process of that rank.
void replace(Job& job, int worker) {
  const auto [ours, its] = unix_pair();
  while (job.workers.size() <= static_cast<size_t>(worker)) job.workers.emplace_back(-1);
  job.workers[static_cast<size_t>(worker)] = RawPeer(ours);
  job.server.connect_worker(worker, stream_of(its));
}

class OutlivingServer : public testing::TestWithParam<int> {};  // summing threads
INSTANTIATE_TEST_SUITE_P(Threads, OutlivingServer, testing::Values(0, 2));

TEST_P(OutlivingServer, ThrowsAHalfReceivedPushAway) {
  Job job(2, outliving(GetParam()));
  job.define(1, 1000);
  job.initialise(1, std::vector<float>(1000, 0));
  const Header header = Job::header(FrameKind::kPush, 1, 0, 1, 1000);
  const std::vector<float> half(500, 7);
  job.workers[1].send_bytes(&header, sizeof header);
  job.workers[1].send_bytes(half.data(), half.size() * sizeof(float));
  ASSERT_TRUE(eventually([&] { return job.server.counters().buffer_bytes > 0; }));
  job.server.dismiss_worker(1);
  EXPECT_EQ(job.server.counters().buffer_bytes, 0u);
  job.push(0, 1, 1, std::vector<float>(1000, 3));
  EXPECT_EQ(job.receive_value(0), std::vector<float>(1000, 3));
}

TEST_P(OutlivingServer, RefusesASuccessorThatPushesBeforeItHasTheValue) {
  Job job(2, outliving(GetParam()));
  job.define(1, 1);
  job.initialise(1, {0});
  job.server.dismiss_worker(1);
  EXPECT_EQ(job.server.admit_worker(1), "");
  replace(job, 1);
  job.push(1, 1, 1, {1});
  EXPECT_NE(job.failure().find("out of turn"), std::string::npos);
}

TEST(OutlivingServer, CapturesNothingMoreForAWorker0ThatIsLost) {
  constexpr uint64_t kElements = 1 << 20, kWishes = 50;  // each takes a moment, so that some wait still
  Job job(2, outliving(1));
  KeyPlan plan;
  plan.wire_key = 1;
  plan.elements = plan.slice_elements = kElements;
  job.server.define(plan, "large", 0);
  job.init(1, 1, 0);
  std::thread first([&] { job.init(0, 1, 0, std::vector<float>(kElements, 1)); });
  for (size_t worker : {0u, 1u}) EXPECT_EQ(job.workers[worker].must_receive().kind, FrameKind::kValue);
  first.join();
  for (uint64_t i = 0; i < kWishes; ++i) job.workers[0].send(Job::header(FrameKind::kCapture, 1, 0, 0, 0));
  ASSERT_TRUE(job.has_received(2 + kWishes));
  job.server.dismiss_worker(0);
  job.server.take_captured(0);
  ASSERT_TRUE(eventually([&] { return job.server.counters().received_slices == 0; }));
  job.server.dismiss_worker(1);  // behind the last of them
  EXPECT_TRUE(job.server.take_captured(0).empty());
  EXPECT_FALSE(job.server.error());
}

TEST_P(OutlivingServer, KeepsTheOptimizersStateWhenOneThatHasCaughtUpBecomesTheFirstAndGivesAValue) {
  Job job(2, outliving(GetParam()));
  job.server.set_optimizer(0, {"sgd", {{"momentum", 0.5}}});
  job.server.dismiss_worker(1);
  job.define(1, 1);
  job.init(0, 1, 0, {0});
  EXPECT_EQ(job.receive_value(0), (std::vector<float>{0}));
  job.push(0, 1, 1, {4}, 0, 0, 1);
  EXPECT_EQ(job.receive_value(0), (std::vector<float>{-4}));
  EXPECT_EQ(job.server.admit_worker(1), "");
  replace(job, 1);
  job.init(1, 1, 0);
  EXPECT_EQ(job.receive_value(1), (std::vector<float>{-4}));
  job.server.dismiss_worker(0);
  job.init(1, 1, 1, {100});
  EXPECT_EQ(job.receive_value(1), (std::vector<float>{100}));
  job.push(1, 1, 2, {0}, 0, 0, 1);
  EXPECT_EQ(job.receive_value(1), (std::vector<float>{98}));  // half of the last step
}

TEST_P(OutlivingServer, CanDoWithoutTheFirstWorkerWhileOneThatWasAdmittedIsOnItsWay) {
  Job job(3, outliving(GetParam()));
  job.define(1, 1);
  job.initialise(1, {5});
  job.server.dismiss_worker(2);
  EXPECT_EQ(job.server.admit_worker(2), "");
  job.server.dismiss_worker(0);
  EXPECT_FALSE(job.server.error());
  replace(job, 2);
  job.init(2, 1, 0);
  EXPECT_EQ(job.receive_value(2), (std::vector<float>{5}));
  for (int worker : {1, 2}) job.push(worker, 1, 1, {2});
  for (int worker : {1, 2}) EXPECT_EQ(job.receive_value(worker), (std::vector<float>{4}));
}

TEST(OutlivingServer, RefusesASuccessorOfALivingWorker) {
  Job job(2, outliving());
  const auto [ours, its] = unix_pair();
  RawPeer stranger(ours);
  EXPECT_THROW(job.server.connect_worker(1, stream_of(its)), Error);
  EXPECT_FALSE(job.server.error());
}

// --- a worker that nobody replaces ---------------------------------------------------------------------------------

TEST_P(OutlivingServer, GoesOnWithoutADismissedWorkerWhoseWholePushesCount) {
  Job job(3, outliving(GetParam()));
  job.axes.reduction = Reduction::kMean;
  job.define(1, 1);
  job.define(2, 1);
  for (uint32_t key : {1u, 2u}) job.initialise(key, {0});
  job.push(2, 1, 1, {9});  // of key 2 it has pushed nothing in this step
  job.push(0, 2, 1, {3});
  ASSERT_TRUE(job.has_received(8));
  job.workers[2].close();
  job.server.dismiss_worker(2);
  job.push(1, 2, 1, {5});
  for (int worker : {0, 1}) job.push(worker, 1, 1, {3});
  for (int worker : {0, 1}) {
    Header header;
    for (int i = 0; i < 2; ++i) {  // two threads finish the keys in either order
      const std::vector<float> value = job.receive_value(worker, &header);
      EXPECT_EQ(value, std::vector<float>{header.key == 1 ? 5.0f : 4.0f});  // the mean over three, and over two
    }
  }
  for (uint64_t round : {2u, 3u}) {
    for (int worker : {0, 1}) job.push(worker, 1, round, {4.0f * static_cast<float>(round)});
    for (int worker : {0, 1})
      EXPECT_EQ(job.receive_value(worker), std::vector<float>{4.0f * static_cast<float>(round)});
  }
  EXPECT_FALSE(job.server.error());
}

TEST_P(OutlivingServer, CompletesWhatWaitsForADismissedWorkerAtOnce) {
  Job job(2, outliving(GetParam()));
  job.server.set_optimizer(0, {"sgd", {}});
  job.axes.reduction = Reduction::kMean;
  job.define(1, 1);
  job.initialise(1, {10});
  job.push(0, 1, 1, {2}, 0, 0, 1);
  ASSERT_TRUE(job.has_received(3));
  job.server.dismiss_worker(1);
  EXPECT_EQ(job.receive_value(0), (std::vector<float>{8}));  // by the only worker's own gradient
  Header header;
  job.skip(0, 1, 2);
  EXPECT_TRUE(job.receive_value(0, &header).empty());  // who is gone keeps no round going
  EXPECT_EQ(header.encoding, static_cast<uint8_t>(Encoding::kAbsent));
}

TEST_P(OutlivingServer, HasKeysThatADismissedWorkerNeverKnew) {
  Job job(3, outliving(GetParam()));
  job.define(1, 1);  // and of this one it dies before it has the value
  job.server.dismiss_worker(2);
  job.define(2, 1);
  for (uint32_t key : {1u, 2u}) {
    job.init(1, key, 0);
    job.init(0, key, 0, {1});
    for (int worker : {0, 1}) EXPECT_EQ(job.receive_value(worker), (std::vector<float>{1}));
    for (int worker : {0, 1}) job.push(worker, key, 1, {2});
    for (int worker : {0, 1}) EXPECT_EQ(job.receive_value(worker), (std::vector<float>{4}));
  }
  EXPECT_FALSE(job.server.finished());
  for (int worker : {0, 1}) job.workers[static_cast<size_t>(worker)].send(Job::header(FrameKind::kBye, 0, 0, 0, 0));
  EXPECT_TRUE(eventually([&] { return job.server.finished(); }));
  EXPECT_FALSE(job.server.error());
}

TEST(OutlivingServer, DropsTheStateOfALoadedValueForTheNextFirstWorkersOwn) {
  Job job(2, outliving());
  job.server.set_optimizer(0, {"sgd", {{"momentum", 0.5}}});
  job.define(1, 1);
  const float value = 10, momentum = 6;
  job.server.load(1, 0, 0, &value, sizeof value);
  job.server.load(1, 0, 1, &momentum, sizeof momentum);
  job.server.dismiss_worker(0);
  job.init(1, 1, 0, {1});
  EXPECT_EQ(job.receive_value(1), (std::vector<float>{1}));
  job.push(1, 1, 1, {0}, 0, 0, 1);
  EXPECT_EQ(job.receive_value(1), (std::vector<float>{1}));
}

// Of keys that are handed over: the others send nothing for them.
void hand_over(Job& job, int worker, uint32_t key, const std::vector<float>& value = {}) {
  Header header = Job::header(FrameKind::kInit, key, 0, 0, value.size());
  header.part = static_cast<uint8_t>(InitPart::kHandedOver);
  if (value.empty()) header.encoding = static_cast<uint8_t>(Encoding::kAbsent);
  job.workers[static_cast<size_t>(worker)].send(header, value.data());
}

TEST_P(OutlivingServer, GoesOnWithoutTheFirstWorkerWhichHandsValuesOver) {
  Job job(3, outliving(GetParam()));
  for (uint32_t key : {1u, 2u, 3u, 4u}) job.define(key, 1);
  hand_over(job, 0, 1, {5});
  hand_over(job, 2, 1);
  for (int worker : {0, 2}) EXPECT_EQ(job.receive_value(worker), (std::vector<float>{5}));
  hand_over(job, 2, 2);    // which it never gets
  job.initialise(4, {3});  // behind that
  job.server.dismiss_worker(0);
  job.init(1, 3, 0, {1});
  job.init(2, 3, 0);
  for (int worker : {1, 2}) EXPECT_EQ(job.receive_value(worker), (std::vector<float>{1}));
  EXPECT_FALSE(job.server.error());
}

TEST_P(OutlivingServer, FailsWithoutTheFirstWorkerIfOthersWaitForItsValue) {
  Job job(3, outliving(GetParam()));
  for (uint32_t key : {1u, 2u}) job.define(key, 1);
  job.init(2, 1, 0);
  job.initialise(2, {3});  // behind that
  job.server.dismiss_worker(0);
  EXPECT_NE(job.failure().find("others wait for its value of key"), std::string::npos);
}

// More than a socket holds: once it is written, the server has read the frame's beginning.
void send_half_a_first_value(Job& job, size_t elements) {
  const Header header = Job::header(FrameKind::kInit, 1, 0, 0, elements);
  const std::vector<float> half(elements / 2, 7);
  job.workers[0].send_bytes(&header, sizeof header);
  job.workers[0].send_bytes(half.data(), half.size() * sizeof(float));
}

TEST(OutlivingServer, DoesNotTakeAHalfReceivedFirstValueForOne) {
  Job job(2, outliving());
  job.axes.slice_elements = 1'000'000;
  job.define(1, 1'000'000);
  send_half_a_first_value(job, 1'000'000);
  job.server.dismiss_worker(0);
  job.init(1, 1, 0);  // it has not heard that it is the first one now
  EXPECT_TRUE(eventually([&] { return job.server.error().has_value(); }));
}

TEST(OutlivingServer, TakesTheNextFirstWorkersValueBehindAHalfReceivedOne) {
  Job job(2, outliving());
  job.axes.slice_elements = 1'000'000;
  job.define(1, 1'000'000);
  send_half_a_first_value(job, 1'000'000);
  job.server.dismiss_worker(0);
  const std::vector<float> whole(1'000'000, 3);
  std::thread writer([&] { job.init(1, 1, 0, whole); });  // both may fill their sockets
  EXPECT_EQ(job.receive_value(1), whole);
  writer.join();
}

// --- and another process that enters in its place -------------------------------------------------------------------

TEST_P(OutlivingServer, TakesAnotherProcessInBehindTheLastRound) {
  Job job(3, outliving(GetParam()));
  job.axes.reduction = Reduction::kMean;
  job.define(1, 1);
  job.initialise(1, {0});
  job.server.dismiss_worker(2);
  job.define(2, 1);  // which the departed one never knew
  job.define(3, 1);  // and this one has no value yet
  job.init(1, 2, 0);
  job.init(0, 2, 0, {7});
  for (int worker : {0, 1}) EXPECT_EQ(job.receive_value(worker), (std::vector<float>{7}));
  for (uint64_t round : {1u, 2u}) {
    for (int worker : {0, 1}) job.push(worker, 1, round, {4});
    for (int worker : {0, 1}) EXPECT_EQ(job.receive_value(worker), (std::vector<float>{4}));
  }
  EXPECT_EQ(job.server.admit_worker(2), "");
  replace(job, 2);
  job.init(2, 1, 0);
  Header header;
  EXPECT_EQ(job.receive_value(2, &header), (std::vector<float>{4}));
  EXPECT_EQ(header.round, 2u);
  for (int worker : {0, 1}) job.push(worker, 1, 3, {3});
  for (int worker : {0, 1}) job.push(worker, 2, 1, {3});  // before it has asked for this key's value
  job.init(2, 2, 0);
  EXPECT_EQ(job.receive_value(2), (std::vector<float>{7}));
  job.push(2, 1, 3, {9});
  job.push(2, 2, 1, {9});
  for (int worker : {0, 1, 2})
    for (int i = 0; i < 2; ++i) EXPECT_EQ(job.receive_value(worker), (std::vector<float>{5}));  // the mean over three
  for (int worker : {1, 2}) job.init(worker, 3, 0);
  job.init(0, 3, 0, {1});
  for (int worker : {0, 1, 2}) EXPECT_EQ(job.receive_value(worker), (std::vector<float>{1}));
  for (int worker : {0, 1, 2}) job.push(worker, 3, 1, {6});
  for (int worker : {0, 1, 2}) EXPECT_EQ(job.receive_value(worker), (std::vector<float>{6}));
  EXPECT_FALSE(job.server.error());
}

TEST_P(OutlivingServer, TellsOneThatAsksForItTheRoundAlone) {
  Job job(3, outliving(GetParam()));
  for (uint32_t key : {1u, 2u}) job.define(key, 1);
  job.initialise(1, {7});
  job.server.dismiss_worker(2);
  for (int worker : {0, 1}) job.push(worker, 1, 1, {4});
  for (int worker : {0, 1}) EXPECT_EQ(job.receive_value(worker), (std::vector<float>{8}));
  EXPECT_EQ(job.server.admit_worker(2), "");
  replace(job, 2);
  const auto ask = [&](uint32_t key) {
    Header header = Job::header(FrameKind::kInit, key, 0, 0, 0);
    header.part = static_cast<uint8_t>(InitPart::kRoundAlone);
    job.workers[2].send(header);
  };
  ask(1);
  Header header;
  EXPECT_EQ(job.receive_value(2, &header), std::vector<float>{});
  EXPECT_EQ(header.round, 1u);
  EXPECT_EQ(header.encoding, static_cast<uint8_t>(Encoding::kAbsent));
  for (int worker : {0, 1, 2}) job.push(worker, 1, 2, {1});
  for (int worker : {0, 1, 2}) EXPECT_EQ(job.receive_value(worker), (std::vector<float>{3}));
  ask(2);  // which has no value yet
  job.init(1, 2, 0);
  job.init(0, 2, 0, {5});
  for (int worker : {0, 1, 2}) EXPECT_EQ(job.receive_value(worker), (std::vector<float>{5}));
  EXPECT_FALSE(job.server.error());
}

TEST_P(OutlivingServer, RefusesOneWhileARoundIsUnderWay) {
  Job job(3, outliving(GetParam()));
  job.define(1, 1);
  job.initialise(1, {0});
  EXPECT_THROW(job.server.admit_worker(2), Error);  // it has not departed
  job.server.dismiss_worker(2);
  job.push(0, 1, 1, {1});
  ASSERT_TRUE(job.has_received(4));
  EXPECT_EQ(job.server.admit_worker(2), "a round of key 'key1' is under way");
  job.push(1, 1, 1, {1});
  for (int worker : {0, 1}) EXPECT_EQ(job.receive_value(worker), (std::vector<float>{2}));
  EXPECT_FALSE(job.server.error());
}

TEST_P(OutlivingServer, GoesOnAsBeforeWithoutOneThatWasAdmittedAndIsGone) {
  Job job(2, outliving(GetParam()));
  job.axes.reduction = Reduction::kMean;
  job.define(1, 1);
  job.initialise(1, {0});
  job.server.dismiss_worker(1);
  for (uint64_t round : {1u, 2u, 3u}) {
    EXPECT_EQ(job.server.admit_worker(1), "");
    if (round > 1) replace(job, 1);
    if (round > 2) {
      job.init(1, 1, 0);
      EXPECT_EQ(job.receive_value(1), (std::vector<float>{5}));
    }
    job.server.dismiss_worker(1);
    job.push(0, 1, round, {5});
    EXPECT_EQ(job.receive_value(0), (std::vector<float>{5}));
  }
  EXPECT_FALSE(job.server.error());
}

TEST_P(OutlivingServer, GrowsIntoPlacesThatWereEmptyFromTheStart) {
  Job job(1, outliving(GetParam()), -1, 3);
  job.axes.reduction = Reduction::kMean;
  job.define(1, 1);
  std::vector<int> here{0};
  const auto train = [&](uint64_t round, float expected) {
    for (int worker : here) job.push(worker, 1, round, {static_cast<float>(1 << worker)});
    for (int worker : here) EXPECT_EQ(job.receive_value(worker), std::vector<float>{expected}) << worker;
  };
  const auto enter = [&](int worker, float value) {
    EXPECT_EQ(job.server.admit_worker(worker), "");
    replace(job, worker);
    job.init(worker, 1, 0);
    EXPECT_EQ(job.receive_value(worker), (std::vector<float>{value}));
    here.push_back(worker);
  };
  job.initialise(1, {7});
  train(1, 1);
  enter(3, 1);
  train(2, 9.0f / 2);
  job.server.dismiss_worker(3);
  here.pop_back();
  train(3, 1);
  for (int worker : {2, 1, 3}) enter(worker, 1);
  train(4, 15.0f / 4);
  job.server.dismiss_worker(0);
  here.erase(here.begin());
  job.define(2, 1);
  for (int worker : {1, 3}) job.init(worker, 2, 0);
  job.init(2, 2, 0, {5});  // who has been there longest
  for (int worker : here) EXPECT_EQ(job.receive_value(worker), (std::vector<float>{5}));
  train(5, 14.0f / 3);
  EXPECT_FALSE(job.server.finished());
  for (int worker : here) job.workers[static_cast<size_t>(worker)].send(Job::header(FrameKind::kBye, 0, 0, 0, 0));
  EXPECT_TRUE(eventually([&] { return job.server.finished(); }));
  EXPECT_FALSE(job.server.error());
}

TEST(OutlivingServer, HasEmptyPlacesOnlyIfItIsToOutliveWorkers) {
  const std::unique_ptr<Server> server = Server::make(0, 1, 2, options());
  EXPECT_THROW(server->leave_empty(1, "a worker to come"), Error);
}

TEST(OutlivingServer, HasForItsFirstWorkerWhoHasBeenThereLongest) {
  Job job(2, outliving());
  job.define(1, 1);
  job.initialise(1, {5});
  job.server.dismiss_worker(0);
  EXPECT_EQ(job.server.admit_worker(0), "");
  replace(job, 0);
  job.init(0, 1, 0);
  EXPECT_EQ(job.receive_value(0), (std::vector<float>{5}));
  job.define(2, 1);
  job.init(0, 2, 0);
  job.init(1, 2, 0, {3});
  for (int worker : {0, 1}) EXPECT_EQ(job.receive_value(worker), (std::vector<float>{3}));
  job.server.dismiss_worker(1);
  job.init(0, 1, 0);  // it has not heard yet that it is the first one now
  EXPECT_EQ(job.receive_value(0), (std::vector<float>{5}));
  job.define(3, 1);
  job.init(0, 3, 0, {4});
  EXPECT_EQ(job.receive_value(0), (std::vector<float>{4}));
  EXPECT_FALSE(job.server.error());
}

}  // namespace
}  // namespace p3
