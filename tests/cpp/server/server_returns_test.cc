// A server that comes back in the place of a lost one, and the heir that hands over to it.
#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <vector>

#include "server/heirs_job.h"

namespace p3 {
namespace {

// Server 0, of two, has come back to a job of so many workers. All that are `there` are expected.
struct ReturnedJob : HeirsJob {
  explicit ReturnedJob(int threads, int num_workers, std::vector<int> there)
      : HeirsJob(num_workers, outliving(threads), kLost, std::move(there)) {}
  // Of a round's value, and nothing more.
  void claim_all(int worker, uint64_t round, const Floats& value, int inits = 1) {
    replace(worker);
    claim(worker, round, value, kKey, Claimed::kValue, inits);
    claim_nothing_more(worker);
  }
};

class Returned : public testing::TestWithParam<int> {
 protected:
  static ServerOptions with() { return outliving(GetParam()); }
};
INSTANTIATE_TEST_SUITE_P(Threads, Returned, testing::Values(0, 2));

class HandedOver : public Returned {};
INSTANTIATE_TEST_SUITE_P(Threads, HandedOver, testing::Values(0, 2));

void expect_round(HeirsJob& job, const std::vector<int>& workers, uint64_t round) {
  for (int worker : workers) job.push(worker, round, {1, 2});
  const auto count = static_cast<float>(workers.size());
  for (int worker : workers) EXPECT_EQ(job.receive(worker, round), Floats({count, 2 * count}));
}

TEST_P(Returned, GoesOnFromWhatAllHave) {
  ReturnedJob job(GetParam(), 3, {0, 1, 2});
  job.define();
  EXPECT_FALSE(job.server.awaits_claims());
  job.server.open({0, 1, 2});
  EXPECT_TRUE(job.server.awaits_claims());
  for (int worker : {2, 0, 1}) job.claim_all(worker, 7, {1, 2});
  EXPECT_TRUE(eventually([&] { return !job.server.awaits_claims(); }));
  expect_round(job, {0, 1, 2}, 8);
}

TEST_P(Returned, AsksForAValue) {
  ReturnedJob job(GetParam(), 2, {0, 1});
  job.define();
  job.server.open({0, 1});
  for (int worker : {0, 1}) {
    job.replace(worker);
    job.claim_without_value(worker, 7);
    job.claim_nothing_more(worker);
  }
  job.must_be_asked(1);
  EXPECT_TRUE(job.server.awaits_claims());
  job.claim(1, 7, {1, 2});
  EXPECT_TRUE(eventually([&] { return !job.server.awaits_claims(); }));
  expect_round(job, {0, 1}, 8);
}

TEST_P(Returned, WaitsForNoWorkerThatIsLostBeforeItIsConnected) {
  for (bool is_open : {false, true}) {
    ReturnedJob job(GetParam(), 4, {0, 1, 2});
    if (!is_open) job.server.dismiss_worker(2);
    job.define();
    job.server.open({0, 1, 2});
    for (int worker : {0, 1}) job.claim_all(worker, 7, {1, 2});
    if (is_open) job.server.dismiss_worker(2);
    expect_round(job, {0, 1}, 8);
    EXPECT_FALSE(job.server.awaits_claims());
    EXPECT_EQ(job.server.admit_worker(2), "");
    job.replace(2);
    job.peer(2).send(HeirsJob::header(FrameKind::kInit, 0, 0));
    EXPECT_EQ(job.receive(2, 8), Floats({2, 4}));
    expect_round(job, {0, 1, 2}, 9);
  }
}

TEST_P(Returned, WaitsForNoWorkerThatIsLostBeforeItHasClaimedAll) {
  ReturnedJob job(GetParam(), 2, {0, 1});
  job.define();
  job.server.open({0, 1});
  job.claim_all(0, 7, {1, 2});
  job.replace(1);
  job.claim(1, 7, {1, 2});
  EXPECT_TRUE(job.server.awaits_claims());
  job.server.dismiss_worker(1);
  EXPECT_FALSE(job.server.awaits_claims());
  expect_round(job, {0}, 8);
}

TEST_P(Returned, WaitsForNobodyWhereNobodyIs) {
  ReturnedJob job(GetParam(), 2, {});
  job.define();
  job.server.open({});
  EXPECT_FALSE(job.server.awaits_claims());
  EXPECT_FALSE(job.server.error());
}

TEST_P(Returned, HasForItsFirstWorkerWhoHasBeenThereLongest) {
  ReturnedJob job(GetParam(), 3, {0, 1, 2});
  job.define();
  job.server.open({1, 2, 0});
  for (int worker : {0, 1, 2}) job.claim_all(worker, 7, {1, 2});
  job.define(2);  // which begins as ever
  const float first[] = {3, 4};
  job.peer(1).send(HeirsJob::header(FrameKind::kInit, 0, sizeof first, 2), first);
  for (int worker : {0, 2}) job.peer(worker).send(HeirsJob::header(FrameKind::kInit, 0, 0, 2));
  for (int worker : {0, 1, 2}) EXPECT_EQ(job.receive(worker, 0), Floats({3, 4}));
  job.server.dismiss_worker(1);
  job.define(3);
  job.peer(2).send(HeirsJob::header(FrameKind::kInit, 0, sizeof first, 3), first);
  job.peer(0).send(HeirsJob::header(FrameKind::kInit, 0, 0, 3));
  for (int worker : {0, 2}) EXPECT_EQ(job.receive(worker, 0), Floats({3, 4}));
}

TEST_P(Returned, CountsFirstValuesOfWhoCameLaterAsOthersDo) {
  ReturnedJob job(GetParam(), 3, {0, 1, 2});
  job.define();
  job.server.open({0, 1, 2});
  for (int worker : {0, 1, 2}) job.claim_all(worker, 7, {1, 2}, worker == 2 ? 1 : 3);
  expect_round(job, {0, 1, 2}, 8);
  const float value[] = {8, 9};  // and of later ones all have had as many
  job.peer(0).send(HeirsJob::header(FrameKind::kInit, 8, sizeof value), value);
  for (int worker : {1, 2}) job.peer(worker).send(HeirsJob::header(FrameKind::kInit, 8, 0));
  for (int worker : {0, 1, 2}) EXPECT_EQ(job.receive(worker, 8), Floats({8, 9}));
}

TEST_P(Returned, GivesTheValueToWhoHasNotAskedForItYet) {
  ReturnedJob job(GetParam(), 3, {0, 1, 2});
  job.define();
  job.server.open({0, 1, 2});
  for (int worker : {0, 1}) job.claim_all(worker, 7, {1, 2});
  job.replace(2);
  job.claim_nothing_more(2);
  EXPECT_TRUE(eventually([&] { return !job.server.awaits_claims(); }));
  job.peer(2).send(HeirsJob::header(FrameKind::kInit, 0, 0));
  EXPECT_EQ(job.receive(2, 7), Floats({1, 2}));
  expect_round(job, {0, 1, 2}, 8);
}

TEST_P(Returned, HasTheFirstValueOfAKeyThatNothingHasComeOf) {
  ReturnedJob job(GetParam(), 2, {0, 1});
  job.define();
  job.server.open({0, 1});
  for (int worker : {0, 1}) {
    job.replace(worker);
    job.claim_nothing_more(worker);
  }
  const float first[] = {3, 4};
  job.peer(0).send(HeirsJob::header(FrameKind::kInit, 0, sizeof first), first);
  job.peer(1).send(HeirsJob::header(FrameKind::kInit, 0, 0));
  for (int worker : {0, 1}) EXPECT_EQ(job.receive(worker, 0), Floats({3, 4}));
}

TEST_P(Returned, GivesNobodyAValueThatNobodyHas) {
  ReturnedJob job(GetParam(), 2, {0, 1});
  job.define();
  job.server.open({0, 1});
  job.replace(0);
  job.claim_nothing_more(0);
  job.peer(0).send(HeirsJob::header(FrameKind::kInit, 0, 0));  // it was loaded from a snapshot by the lost server
  job.replace(1);
  job.claim_nothing_more(1);
  EXPECT_NE(job.failure().find("with it a value of key 'key' that worker 0 (there) asks for"), std::string::npos);
}

TEST_P(Returned, TellsTheNormOfRoundsToCome) {
  ReturnedJob job(GetParam(), 2, {0, 1});
  job.define_norm();
  job.define(1);
  job.server.open({0, 1});
  for (int worker : {0, 1}) {
    job.replace(worker);
    job.claim<double>(worker, 4, {25, 2}, kNorm);
    job.claim(worker, 4, {3, 4}, 1);
    job.claim_nothing_more(worker);
    job.begin_norm(worker, 5);
  }
  for (int worker : {0, 1}) job.push(worker, 5, {1, 0});
  for (int worker : {0, 1})
    for (int frame = 0; frame < 2; ++frame) {
      const Header got = job.peer(worker).must_receive();
      EXPECT_EQ(got.round, 5u);
      if (got.key != kNorm) continue;
      double norm[2];
      std::memcpy(norm, job.peer(worker).payload.data(), sizeof norm);
      EXPECT_EQ(norm[0], 4);
      EXPECT_EQ(norm[1], 2);
    }
}

TEST_P(Returned, MayInheritAndHandOverItself) {
  ReturnedJob job(GetParam(), 1, {0});
  job.define();
  job.server.open({0});
  job.claim_all(0, 7, {1, 2});
  EXPECT_TRUE(eventually([&] { return !job.server.awaits_claims(); }));
  job.server.inherit(kHeir);
  EXPECT_TRUE(job.server.awaits_claims());
  Header last = HeirsJob::header(FrameKind::kClaim, 0, 0, kNoKey);
  last.part = static_cast<uint8_t>(Claimed::kNothing);
  last.slice = kHeir;
  job.peer(0).send(last);
  EXPECT_TRUE(eventually([&] { return !job.server.awaits_claims(); }));
  job.server.hand_over(kHeir);
  expect_round(job, {0}, 8);
}

// --- the heir ------------------------------------------------------------------------------------------------------

TEST_P(HandedOver, IsNothingBeforeAllHaveSaidTheirLast) {
  HeirsJob job(3, with());
  job.define();
  EXPECT_THROW(job.server.hand_over(kLost), Error);  // of which it has nothing
  job.server.inherit(kLost);
  EXPECT_THROW(job.server.inherit(kLost), Error);
  EXPECT_THROW(job.server.hand_over(kHeir), Error);
  for (int worker : {0, 1, 2}) job.claim(worker, 7, {1, 2});
  for (int worker : {0, 1, 2}) job.push(worker, 8, {1, 1});
  for (int worker : {0, 1, 2}) EXPECT_EQ(job.receive(worker, 8), Floats({3, 3}));
  EXPECT_TRUE(job.server.awaits_claims());
  EXPECT_THROW(job.server.hand_over(kLost), Error);
  job.claim_nothing_more(0);
  Header bye;
  bye.kind = FrameKind::kBye;
  job.peer(1).send(bye);  // behind which nothing comes
  job.server.dismiss_worker(2);
  EXPECT_TRUE(eventually([&] { return !job.server.awaits_claims(); }));
  job.server.hand_over(kLost);
  EXPECT_THROW(job.server.hand_over(kLost), Error);
  EXPECT_FALSE(job.server.error());
}

TEST_P(HandedOver, MayBeInheritedAnew) {
  HeirsJob job(2, with());
  job.define();
  for (uint64_t round : {7, 20}) {
    job.server.inherit(kLost);
    for (int worker : {0, 1}) {
      job.claim(worker, round, {1, 2});
      job.claim_nothing_more(worker);
    }
    expect_round(job, {0, 1}, round + 1);
    EXPECT_TRUE(eventually([&] { return !job.server.awaits_claims(); }));
    job.server.hand_over(kLost);
    const uint64_t before = job.server.counters().traffic.slices_received;
    job.claim(0, round, {1, 2});  // a value that it was asked for, which another one has given since
    EXPECT_TRUE(eventually([&] { return job.server.counters().traffic.slices_received > before; }));
  }
  EXPECT_FALSE(job.server.error());
  job.push(0, 22, {1, 1});
  EXPECT_NE(job.failure().find("of no key, or of another server's"), std::string::npos);
}

TEST_P(HandedOver, MayBeInheritedAnewBeforeAValueComesThatItWasAskedFor) {
  constexpr uint32_t kElements = kClaimedAtOnce / sizeof(float) + 1;
  HeirsJob job(2, with());
  KeyPlan plan;
  plan.wire_key = kKey;
  plan.elements = 2 * kElements;
  plan.slice_elements = kElements;
  job.server.define(plan, "key", 0);
  const Floats value(kElements, 3);
  job.server.inherit(kLost);
  job.claim(0, 7, value);  // of the time before
  for (int worker : {0, 1}) job.claim_without_value(worker, 7);
  job.must_be_asked(1);
  job.claim(1, 7, value);
  for (int worker : {0, 1}) job.push(worker, 8, value);
  for (int worker : {0, 1}) EXPECT_EQ(job.receive(worker, 8), Floats(kElements, 6));
  EXPECT_FALSE(job.server.error());
}

TEST_P(HandedOver, LeavesWhatAnotherOneHasLost) {
  ServerOptions options = with();
  options.node.label = "server 1 (test)";
  const std::unique_ptr<Server> server = Server::make(1, 3, 1, std::move(options));
  const auto [ours, its] = unix_pair();
  RawPeer worker(ours);
  server->add_worker(0, stream_of(its), "worker 0 (there)");
  server->start();
  for (int lost : {0, 2}) server->inherit(lost);
  for (uint32_t lost : {0u, 2u}) {
    Header last = HeirsJob::header(FrameKind::kClaim, 0, 0, kNoKey);
    last.part = static_cast<uint8_t>(Claimed::kNothing);
    last.slice = lost;
    worker.send(last);
  }
  EXPECT_TRUE(eventually([&] { return !server->awaits_claims(); }));
  server->hand_over(0);
  EXPECT_THROW(server->hand_over(0), Error);
  server->inherit(0);
  server->hand_over(2);
  EXPECT_THROW(server->hand_over(0), Error);  // which is to be claimed again
}

TEST_P(HandedOver, GivesItsMemoryBackOnceNobodyBorrowsIt) {
  constexpr size_t kElements = 1 << 20;  // more than a connection holds whose other end is not read
  HeirsJob job(1, looking_often(with()));
  KeyPlan plan;
  plan.wire_key = kKey;
  plan.elements = 2 * kElements;
  plan.slice_elements = kElements;
  job.server.define(plan, "large", 0);
  const uint64_t before = job.server.counters().value_bytes;
  job.server.inherit(kLost);
  job.claim_without_value(0, 7);
  job.claim_nothing_more(0);
  job.must_be_asked(0);
  job.claim(0, 7, Floats(kElements, 1));
  EXPECT_TRUE(eventually([&] { return !job.server.awaits_claims(); }));
  job.push(0, 8, Floats(kElements, 2));
  ASSERT_TRUE(job.peer(0).readable(kDeadlineMs));
  job.server.hand_over(kLost);
  EXPECT_EQ(job.receive(0, 8), Floats(kElements, 2));
  EXPECT_TRUE(eventually([&] { return job.server.counters().value_bytes == before; }));
  EXPECT_FALSE(job.server.error());
}

TEST_P(HandedOver, StaysInASnapshot) {
  HeirsJob job(1, with());
  job.define();
  job.server.inherit(kLost);
  job.claim(0, 7, {1, 2});
  job.claim_nothing_more(0);
  Header capture = HeirsJob::header(FrameKind::kCapture, 7, 0);
  capture.scalars.updates = 3;  // snapshot_of()
  job.peer(0).send(capture);
  EXPECT_EQ(job.peer(0).must_receive().kind, FrameKind::kPart);
  job.server.hand_over(kLost);
  const auto captured = job.server.take_captured(3);
  ASSERT_EQ(captured.size(), 1u);
  EXPECT_EQ(captured[0].slice, 0u);
}

TEST_P(HandedOver, LetsKeysBeCutAnewAgain) {
  HeirsJob job(1, with());
  job.define();
  KeyPlan other;
  other.wire_key = 9;
  other.elements = 4;
  other.slice_elements = 1;
  job.server.inherit(kLost);
  job.claim_nothing_more(0);
  EXPECT_THROW(job.server.recut(other, kKey, 0), Error);
  EXPECT_TRUE(eventually([&] { return !job.server.awaits_claims(); }));
  job.server.hand_over(kLost);
  job.server.recut(other, kKey, 0);
}

TEST(ReturnedServer, RefusesWhatCannotBe) {
  const std::unique_ptr<Server> other = Server::make(0, 2, 1, options());
  EXPECT_THROW(other->expect_worker(0, "worker 0 (there)"), Error);

  HeirsJob connected(1, outliving());
  connected.define();
  EXPECT_THROW(connected.server.open({0}), Error);

  ReturnedJob updating(0, 1, {0});
  updating.define();
  EXPECT_THROW(updating.server.open({1}), Error);
  updating.server.set_optimizer(0, {"sgd", {}});
  EXPECT_THROW(updating.server.open({0}), Error);

  ReturnedJob job(0, 1, {0});
  job.define();
  job.server.open({0});
  job.replace(0);
  EXPECT_THROW(job.replace(0), Error);  // it is connected, and not lost
  EXPECT_THROW(job.server.inherit(kLost), Error);
  EXPECT_THROW(job.server.hand_over(kLost), Error);
}

}  // namespace
}  // namespace p3
