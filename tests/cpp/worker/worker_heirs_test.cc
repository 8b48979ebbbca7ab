// A worker whose server is lost: what it claims to the heir, and what it sends again.
#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "worker/two_servers.h"

namespace p3 {
namespace {

const OptimizerSpec kMomentum{"sgd", {{"momentum", 0.5}}};

TEST(WorkerHeirs, HaveTheGradientAgainAlthoughItsSumHadComeInPart) {
  TwoServers job;
  const int key = job.key(7);
  job.initialise(key);
  job.gradient = {10, 20, 30, 40};
  job.worker.push(key, job.gradient.data(), job.gradient.data(), 5, {}, job.results.expect(1));  // lands in place
  Header push = job.lost.must_receive();
  EXPECT_EQ(TwoServers::floats(job.lost), Floats({10, 20}));
  TwoServers::answer(job.heir, job.heir.must_receive(), {33, 44});
  push.kind = FrameKind::kValue;  // of which a half comes
  std::vector<char> torn(sizeof push + sizeof(float), 'x');
  std::memcpy(torn.data(), &push, sizeof push);
  job.lost.send_bytes(torn.data(), torn.size());
  job.lose_server();
  const Header claim = job.heir.must_receive();
  EXPECT_EQ(claim.kind, FrameKind::kClaim);
  EXPECT_EQ(claim.round, 0u);
  EXPECT_EQ(claim.part, static_cast<uint8_t>(Claimed::kValue));  // whose value nobody needs any more
  const Header again = job.heir.must_receive();
  EXPECT_EQ(again.kind, FrameKind::kPush);
  EXPECT_EQ(again.round, 1u);
  EXPECT_EQ(again.slice, 0u);
  EXPECT_EQ(TwoServers::floats(job.heir), Floats({10, 20}));
  job.must_claim_nothing_more();
  TwoServers::answer(job.heir, again, {11, 22});
  ASSERT_TRUE(job.results.wait_for(2));
  EXPECT_EQ(job.results.text(1), "");
  EXPECT_EQ(job.gradient, Floats({11, 22, 33, 44}));
}

TEST(WorkerHeirs, HaveAValueAlthoughTheScriptHasWrittenOverIt) {
  TwoServers job;
  const int key = job.key(7);
  job.initialise(key);
  job.gradient = {10, 20, 30, 40};
  job.worker.push(key, job.gradient.data(), job.gradient.data(), 0, {}, job.results.expect(1));
  TwoServers::answer(job.lost, job.lost.must_receive(), {11, 22});
  TwoServers::answer(job.heir, job.heir.must_receive(), {33, 44});
  ASSERT_TRUE(job.results.wait_for(2));
  job.gradient = {0, 0, 0, 0};
  job.lose_server();
  job.must_claim(7, 1, {11, 22});
  job.must_claim_nothing_more();
  job.worker.push(key, job.gradient.data(), job.gradient.data(), 0, {}, job.results.expect(2));
  for (uint32_t slice : {0u, 1u}) {
    const Header push = job.heir.must_receive();
    EXPECT_EQ(push.slice, slice);
    TwoServers::answer(job.heir, push, {5, 5});
  }
  ASSERT_TRUE(job.results.wait_for(3));
}

// A key whose slices are too large to be claimed with their values, of all ones, and the server is lost.
struct LargeKey : TwoServers {
  static constexpr size_t kSlice = kClaimedAtOnce / sizeof(float) + 1;

  LargeKey() {
    handle = worker.declare("large", 2 * kSlice, DType::kFloat32, {});
    KeyPlan plan = plan_of(7, 2 * kSlice);
    plan.slice_elements = kSlice;
    worker.agree(handle, plan);
    landing.assign(2 * kSlice, 1);
    worker.init(handle, landing.data(), landing.data(), 0, results.expect(0));
    for (RawPeer* server : {&lost, &heir}) answer(*server, server->must_receive(), value);
    EXPECT_TRUE(results.wait_for(1));
    landing.assign(2 * kSlice, 0);
    lose_server();
    const Header claim = heir.must_receive();
    EXPECT_EQ(claim.kind, FrameKind::kClaim);
    EXPECT_EQ(claim.encoding, static_cast<uint8_t>(Encoding::kAbsent));
    EXPECT_EQ(claim.part, static_cast<uint8_t>(Claimed::kValue));
    EXPECT_EQ(inits_of(claim), 1u);
    must_claim_nothing_more();
  }
  void push() {
    worker.push(handle, landing.data(), landing.data(), 0, {}, results.expect(1));
    for (uint32_t slice : {0u, 1u}) answer(heir, must_push(slice), std::vector<float>(kSlice, 5));
    ASSERT_TRUE(results.wait_for(2));
  }
  Header must_push(uint32_t slice) {
    const Header push = heir.must_receive();
    EXPECT_EQ(push.kind, FrameKind::kPush);
    EXPECT_EQ(push.slice, slice);
    return push;
  }

  const std::vector<float> value = std::vector<float>(kSlice, 1);
  int handle;
};

TEST(WorkerHeirs, GetALargeValueWhenTheyAskForIt) {
  LargeKey job;
  job.ask();
  job.must_claim(7, 0, job.value);
  job.ask();  // once
  job.push();
}

TEST(WorkerHeirs, GetALargeValueOfAWorkerThatLeaves) {
  LargeKey job;
  std::thread closing([&] { job.worker.close(kDeadlineMs / 1000); });
  job.must_claim(7, 0, job.value);
  EXPECT_EQ(job.heir.must_receive().kind, FrameKind::kBye);
  job.heir.close();
  closing.join();
}

TEST(WorkerHeirs, GetALargeValueOfAWorkerThatIsAboutToLeave) {
  constexpr size_t kElements = 1 << 18;  // more than a connection holds whose other end is not read
  const Floats value(kElements, 1);
  Floats landing(3 * kElements, 1);
  std::vector<RawPeer> servers;
  Results results;
  Worker worker(0, 3, TwoServers::options(true));
  for (int server = 0; server < 3; ++server) {
    const auto [ours, its] = unix_pair();
    servers.emplace_back(ours);
    worker.add_server(server, stream_of(its), "server " + std::to_string(server) + " (there)");
  }
  worker.start();
  const int key = worker.declare("large", landing.size(), DType::kFloat32, {});
  KeyPlan plan = plan_of(7, landing.size());
  plan.slice_elements = kElements;
  worker.agree(key, plan);
  worker.init(key, landing.data(), landing.data(), 0, results.expect(0));
  for (RawPeer& server : servers) TwoServers::answer(server, server.must_receive(), value);
  ASSERT_TRUE(results.wait_for(1));

  RawPeer& heir = servers[1];
  const auto must_claim = [&](uint32_t key_claimed, uint32_t slice, const Floats& with) {
    const Header claim = heir.must_receive();
    EXPECT_EQ(claim.kind, FrameKind::kClaim);
    EXPECT_EQ(claim.key, key_claimed);
    EXPECT_EQ(claim.slice, slice);
    EXPECT_EQ(TwoServers::floats(heir), with);
  };
  worker.inherit(0, 1, {0});
  must_claim(7, 0, {});
  must_claim(kNoKey, 0, {});
  std::thread closing([&] { worker.close(kDeadlineMs / 1000); });
  EXPECT_TRUE(heir.readable(kDeadlineMs));  // the value of the first one, behind which the goodbye waits
  worker.inherit(2, 1, {2});
  must_claim(7, 0, value);
  must_claim(7, 2, {});
  must_claim(7, 2, value);
  must_claim(kNoKey, 2, {});
  EXPECT_EQ(heir.must_receive().kind, FrameKind::kBye);
  heir.close();
  closing.join();
}

TEST(WorkerHeirs, GetNothingThatTheyHaveAnsweredSince) {
  LargeKey job;
  job.push();
  job.ask();
  std::thread closing([&] { job.worker.close(kDeadlineMs / 1000); });
  EXPECT_EQ(job.heir.must_receive().kind, FrameKind::kBye);
  job.heir.close();
  closing.join();
}

TEST(WorkerHeirs, AskForNothingElse) {
  LargeKey job;
  job.ask(7, 1);  // which is its own; so it may ask, in vain
  job.ask(7, 2);
  ASSERT_TRUE(wait_readable(job.worker.event_fd()));
  EXPECT_NE(std::string(job.worker.error()->what()).find("misplaced"), std::string::npos);
}

TEST(WorkerHeirs, GetTheSameBytesOfWhatLeavesSomethingOut) {
  TwoServers job;
  const int key = job.key(7, Compression(Encoding::kOneBit));
  job.initialise(key);
  job.gradient = {10, -20, 30, 40};
  for (uint64_t round = 1; round <= 2; ++round) {  // of which the second one has something left out
    job.worker.push(key, job.gradient.data(), job.landing.data(), 0, {}, job.results.expect(static_cast<int>(round)));
    const Header push = job.lost.must_receive();
    const Header other = job.heir.must_receive();
    if (round == 2) break;
    TwoServers::answer(job.lost, push, {1, 1});
    TwoServers::answer(job.heir, other, {1, 1});
    ASSERT_TRUE(job.results.wait_for(2));
  }
  const std::vector<char> sent = job.lost.payload;
  job.lose_server();
  job.must_claim(7, 1, {1, 1});
  EXPECT_EQ(job.heir.must_receive().round, 2u);
  EXPECT_EQ(job.heir.payload, sent);
}

TEST(WorkerHeirs, HearOfTheSumThatTheirWorkerHasUpdatedBy) {
  TwoServers job;
  const int key = job.key(7);
  job.worker.set_optimizer(key, kMomentum);
  job.initialise(key);
  job.gradient = {10, 20, 30, 40};
  RoundScalars scalars;
  scalars.lr = 0.5;
  job.worker.push(key, job.gradient.data(), job.gradient.data(), 0, scalars, job.results.expect(1));
  TwoServers::answer(job.lost, job.lost.must_receive(), {2, 4});
  TwoServers::answer(job.heir, job.heir.must_receive(), {6, 8});
  ASSERT_TRUE(job.results.wait_for(2));
  EXPECT_EQ(job.gradient, Floats({0, 0, 0, 0}));  // 1 - 0.5 * 2 and so on
  job.lose_server();
  const Header claim = job.must_claim(7, 1, {2, 4});
  EXPECT_EQ(claim.scalars.lr, 0.5);
  job.must_claim_nothing_more();

  job.worker.skip(key, job.landing.data(), 0, job.results.expect(2));  // by the numbers of those who have pushed
  for (uint32_t slice : {0u, 1u}) {
    Header skipped = job.heir.must_receive();
    EXPECT_EQ(skipped.slice, slice);
    skipped.scalars.lr = 1;
    TwoServers::answer(job.heir, skipped, {1, 1});
  }
  ASSERT_TRUE(job.results.wait_for(3));
  EXPECT_EQ(job.landing, Floats({-1.5, -2, -2.5, -3}));  // 0 - 0.5 * 1 - 1, 0 - 0.5 * 2 - 1 and so on
}

TEST(WorkerHeirs, LeaveTheStateToTheirWorker) {
  TwoServers job;
  const int key = job.key(7);
  job.worker.set_optimizer(key, kMomentum);
  EXPECT_THROW(job.worker.set_optimizer(key, kMomentum), Error);
  job.initialise(key);
  const Floats given = {1, 2, 3, 4};
  Floats state(4);
  job.worker.store(key, 1, given.data(), job.results.expect(1));
  job.worker.fetch(key, 1, state.data(), job.results.expect(2));
  ASSERT_TRUE(job.results.wait_for(3));
  EXPECT_EQ(state, given);
  EXPECT_THROW(job.worker.fetch(key, 2, state.data(), job.results.expect(3)), Error);
  EXPECT_THROW(job.worker.fetch(key, kMaster, state.data(), job.results.expect(3)), Error);

  job.landing = {5, 6, 7, 8};  // another value, with that state
  job.worker.init(key, job.landing.data(), job.landing.data(), 0, job.results.expect(3));
  TwoServers::answer(job.lost, job.lost.must_receive(), {5, 6});
  TwoServers::answer(job.heir, job.heir.must_receive(), {7, 8});
  RoundScalars scalars;
  scalars.lr = 1;
  job.worker.push(key, given.data(), job.landing.data(), 0, scalars, job.results.expect(4));
  TwoServers::answer(job.lost, job.lost.must_receive(), {0, 0});
  TwoServers::answer(job.heir, job.heir.must_receive(), {0, 0});
  ASSERT_TRUE(job.results.wait_for(5));
  EXPECT_EQ(job.landing, Floats({5.5, 7, 8.5, 10}));  // 5 + 0.5 * 1 and so on
  EXPECT_THROW(TwoServers(/*outlives=*/false).no_optimizer(), Error);
}

TEST(WorkerHeirs, GetNoGradientBeforeItIsReady) {
  TwoServers job;
  const int key = job.key(7);
  job.initialise(key);
  job.gradient = {10, 20, 30, 40};
  job.worker.push(key, job.gradient.data(), job.landing.data(), 0, {}, job.results.expect(1), /*gated=*/true);
  job.lose_server();
  job.must_claim(7, 0, {1, 2});
  job.must_claim_nothing_more();
  job.worker.ready(key, 2);
  EXPECT_EQ(job.heir.must_receive().slice, 0u);
  job.worker.ready(key, 4);
  EXPECT_EQ(job.heir.must_receive().slice, 1u);
}

TEST(WorkerHeirs, HearOfKeysThatNothingHasComeOf) {
  TwoServers job;
  const int key = job.key(7);
  job.landing = {1, 2, 3, 4};
  job.worker.init(key, job.landing.data(), job.landing.data(), 0, job.results.expect(0));
  job.lost.must_receive();
  job.heir.must_receive();
  job.lose_server();
  job.must_claim(7, 0, {});
  EXPECT_EQ(job.heir.must_receive().kind, FrameKind::kInit);
  EXPECT_EQ(TwoServers::floats(job.heir), Floats({1, 2}));
  job.must_claim_nothing_more();
}

TEST(WorkerHeirs, HaveWhatIsOfAServerThatWasLostBeforeTheWorkerCame) {
  const auto [ours, its] = unix_pair();
  RawPeer heir(ours);
  Results results;
  Worker worker(0, 2, TwoServers::options(true));
  EXPECT_THROW(worker.add_heir(0, 1, "server 0 (there)"), Error);  // to which there is no connection yet
  worker.add_server(1, stream_of(its), "server 1 (there)");
  worker.add_heir(0, 1, "server 0 (there)");
  worker.start();
  const int key = worker.declare("key", 4, DType::kFloat32, {});
  KeyPlan plan = plan_of(7, 4);
  plan.slice_elements = 2;
  worker.agree(key, plan);
  Floats landing = {1, 2, 3, 4};
  worker.init(key, landing.data(), landing.data(), 0, results.expect(0));
  for (uint32_t slice : {0u, 1u}) {
    const Header init = heir.must_receive();
    EXPECT_EQ(init.slice, slice);
    TwoServers::answer(heir, init, TwoServers::floats(heir));
  }
  EXPECT_TRUE(results.wait_for(1));
  EXPECT_TRUE(worker.lost_servers().empty());
}

TEST(WorkerHeirs, HearOnlyOfTheRoundWhoseValueAWorkerHasJoinedWithout) {
  for (const uint32_t elements : {2u, 1024u}) {  // which would go along with a claim, and not
    TwoServers job;
    const int key = job.worker.declare("key", 2 * elements, DType::kFloat32, {});
    KeyPlan plan = plan_of(7, 2 * elements);
    plan.slice_elements = elements;
    job.worker.agree(key, plan, /*catches_up=*/true);
    job.worker.ask_for_round_alone(key);
    job.landing.assign(2 * elements, 1);
    job.worker.init(key, nullptr, job.landing.data(), 0, job.results.expect(0));
    for (RawPeer* server : {&job.lost, &job.heir}) {
      Header answer = server->must_receive();
      EXPECT_EQ(answer.part, static_cast<uint8_t>(InitPart::kRoundAlone));
      EXPECT_EQ(answer.encoding, static_cast<uint8_t>(Encoding::kAbsent));
      answer.kind = FrameKind::kValue;
      answer.round = 5;
      answer.part = 0;
      server->send(answer);
    }
    ASSERT_TRUE(job.results.wait_for(1));
    job.lose_server();
    const Header claim = job.heir.must_receive();
    EXPECT_EQ(claim.kind, FrameKind::kClaim);
    EXPECT_EQ(claim.part, static_cast<uint8_t>(Claimed::kRoundAlone));
    EXPECT_EQ(claim.encoding, static_cast<uint8_t>(Encoding::kAbsent));
    EXPECT_EQ(claim.round, 5u);
    EXPECT_EQ(inits_of(claim), 1u);
    job.must_claim_nothing_more();
    const Floats sum(elements, 3);
    job.worker.push(key, job.landing.data(), job.landing.data(), 0, {}, job.results.expect(1));
    for (uint32_t slice : {0u, 1u}) {
      const Header push = job.heir.must_receive();
      EXPECT_EQ(push.round, 6u);
      EXPECT_EQ(push.slice, slice);
      TwoServers::answer(job.heir, push, sum);
    }
    ASSERT_TRUE(job.results.wait_for(2));
    EXPECT_EQ(job.landing, Floats(2 * elements, 3));
    job.worker.init(key, job.landing.data(), job.landing.data(), 0, job.results.expect(2));  // that of all
    for (uint32_t slice : {0u, 1u}) {
      const Header init = job.heir.must_receive();
      EXPECT_EQ(init.slice, slice);
      EXPECT_EQ(init.part, static_cast<uint8_t>(InitPart::kOfAll));
      TwoServers::answer(job.heir, init, sum);
    }
    ASSERT_TRUE(job.results.wait_for(3));
  }
}

TEST(WorkerHeirs, AreOnlyThoseOfAWorkerThatIsToldSo) {
  TwoServers job(/*outlives=*/false);
  Worker other(0, 2, TwoServers::options(false));
  EXPECT_THROW(other.add_heir(0, 1, "server 0 (there)"), Error);
  EXPECT_THROW(job.worker.inherit(0, 1, {0}), Error);
  job.lost.close();
  ASSERT_TRUE(wait_readable(job.worker.event_fd()));
  EXPECT_NE(std::string(job.worker.error()->what()).find("server 0"), std::string::npos);
}

}  // namespace
}  // namespace p3
