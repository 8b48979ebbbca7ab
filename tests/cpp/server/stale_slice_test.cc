// Keys with staleness: each push updates at once, and waits for nobody who is near enough.
//
// With SGD, a learning rate of 1 and a slice of one element for each worker, where worker w pushes -1 at element w, the
// value is the vector clock: what a worker receives tells whose pushes are in it.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "p3/server.h"
#include "server/discipline/clocks.h"
#include "server/server_job.h"

namespace p3 {
namespace {

void define_stale(Job& job, uint64_t elements, uint64_t staleness) {
  KeyPlan plan = job.axes;
  plan.wire_key = 1;
  plan.elements = elements;
  plan.staleness = staleness;
  job.server.define(plan, "key1", 0);
}

struct StaleJob : Job {
  StaleJob(int num_workers, uint64_t staleness, ServerOptions with = options(), double momentum = 0)
      : Job(num_workers, std::move(with)), size(static_cast<size_t>(num_workers)) {
    server.set_optimizer(0, {"sgd", {{"momentum", momentum}}});
    define_stale(*this, size, staleness);
    initialise(1, std::vector<float>(size, 0));
  }

  void tick(int worker, uint64_t round) {
    std::vector<float> gradient(size, 0);
    gradient[static_cast<size_t>(worker)] = -1;
    push(worker, 1, round, gradient, 0, 0, 1.0);
  }

  // The answer to this worker's push of that round.
  std::vector<float> clocks(int worker, uint64_t round) {
    Header header;
    const std::vector<float> value = receive_value(worker, &header);
    EXPECT_EQ(header.round, round);
    EXPECT_EQ(header.part, 0);
    told = least_clock(header);
    return value;
  }
  uint64_t told = 0;  // by the last one: up to which round the pushes of all are in it

  const size_t size;
};

class Staleness : public testing::TestWithParam<uint64_t> {};

TEST_P(Staleness, IsNeverExceededInAnyOrder) {
  const uint64_t staleness = GetParam();
  constexpr int kWorkers = 4;
  const unsigned seed = std::random_device()();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937 random(seed);
  StaleJob job(kWorkers, staleness);
  std::vector<float> clock(kWorkers, 0);
  std::vector<bool> waits(kWorkers, false);
  for (uint64_t step = 0; step < 400; ++step) {
    const int worker = any_free(waits, random);
    ASSERT_GE(worker, 0) << "all wait for each other";
    auto& its = clock[static_cast<size_t>(worker)];
    job.tick(worker, static_cast<uint64_t>(++its));
    waits[static_cast<size_t>(worker)] = true;
    ASSERT_TRUE(job.has_updated(step + 1));
    const float slowest = *std::min_element(clock.begin(), clock.end());
    for (int each = 0; each < kWorkers; ++each) {
      const float round = clock[static_cast<size_t>(each)];
      if (!waits[static_cast<size_t>(each)] || round - slowest > static_cast<float>(staleness)) continue;
      ASSERT_EQ(job.clocks(each, static_cast<uint64_t>(round)), clock) << "step " << step << ", worker " << each;
      ASSERT_EQ(job.told, static_cast<uint64_t>(slowest));
      waits[static_cast<size_t>(each)] = false;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Rounds, Staleness, testing::Values(1, 2, 5, kUnboundedStaleness));

TEST(StaleSlice, ASkipHoldsUpNobodyAndWaitsForAll) {
  StaleJob job(3, 1);
  job.skip(2, 1, 1);
  for (uint64_t round : {1, 2, 3}) {
    job.tick(0, round);
    job.tick(1, round);
    for (int worker : {0, 1}) {
      const std::vector<float> clock = job.clocks(worker, round);
      EXPECT_GE(clock[0], static_cast<float>(worker == 0 ? round : round - 1));
      EXPECT_GE(clock[1], static_cast<float>(worker == 1 ? round : round - 1));
      EXPECT_EQ(clock[2], 0);
    }
    const std::vector<float> clock = job.clocks(2, round);  // only once both have come as far
    EXPECT_EQ(clock, (std::vector<float>{static_cast<float>(round), static_cast<float>(round), 0}));
    job.skip(2, 1, round + 1);
  }
  for (int worker : {0, 1}) job.skip(worker, 1, 4);
  for (int worker : {0, 1, 2}) {
    Header header;
    EXPECT_EQ(job.receive_value(worker, &header), (std::vector<float>{3, 3, 0}));
    EXPECT_EQ(header.part, 1);  // nobody goes on
    EXPECT_EQ(header.round, 4u);
  }
  EXPECT_EQ(job.told, 3u);  // by the last answer to who goes on: who has left holds up nobody
  // And training goes on, for all.
  job.tick(2, 5);
  EXPECT_EQ(job.clocks(2, 5), (std::vector<float>{3, 3, 1}));
  job.tick(2, 6);  // waits for those whose skips are over
  for (int worker : {0, 1}) job.tick(worker, 5);
  EXPECT_EQ(job.clocks(2, 6), (std::vector<float>{4, 4, 2}));
  for (int worker : {0, 1}) EXPECT_EQ(job.clocks(worker, 5)[static_cast<size_t>(worker)], 4);
}

TEST(StaleSlice, RefusesAPushWhoseOffsetsLeaveTheSlice) {
  Job job(1);
  job.server.set_optimizer(0, {"sgd", {}});
  job.set_codec({Encoding::kLargest, {0.01, 8}});  // 10 elements, in 14 bits of blocks
  define_stale(job, 1000, 1);
  job.initialise(1, std::vector<float>(1000, 0));
  std::vector<char> payload(encoded_bytes(job.axes.codec, DType::kFloat32, 1000), 0);
  payload[0] = static_cast<char>(0x80);  // scale and base are 1
  payload[1] = 0x3f;
  payload[2] = 1;
  payload.back() = 1 << 5;  // the last bit alone: block 13, of 4
  Header push = Job::header(FrameKind::kPush, 1, 0, 1, 0);
  push.encoding = static_cast<uint8_t>(Encoding::kLargest);
  push.payload_bytes = static_cast<uint32_t>(payload.size());
  push.scalars.lr = 1;
  job.workers[0].send(push, payload.data());
  EXPECT_NE(job.failure().find("do not ascend"), std::string::npos) << job.failure();
}

TEST(StaleSlice, ARoundWithoutAGradientIsOneAllTheSame) {
  StaleJob job(2, 1);
  for (uint64_t round : {1, 2, 3}) {
    Header nothing = Job::header(FrameKind::kPush, 1, 0, round, 0);
    nothing.part = 1;
    job.workers[1].send(nothing);
    EXPECT_EQ(job.clocks(1, round), (std::vector<float>{static_cast<float>(round - 1), 0}));
    job.tick(0, round);
    EXPECT_EQ(job.clocks(0, round), (std::vector<float>{static_cast<float>(round), 0}));
  }
}

TEST(StaleSlice, EachPushIsAnUpdateOfItsOwn) {
  StaleJob job(2, kUnboundedStaleness, options(), /*momentum=*/0.5);
  job.push(0, 1, 1, {1, 0}, 0, 0, 1.0);
  EXPECT_EQ(job.clocks(0, 1), (std::vector<float>{-1, 0}));
  job.push(1, 1, 1, {1, 0}, 0, 0, 0.5);  // with its own learning rate: momentum 0.5 * -1 - 0.5 = -1
  EXPECT_EQ(job.clocks(1, 1), (std::vector<float>{-2, 0}));
}

// The servers count: what is replayed one after the other, in the order in which it came, by an optimizer that counts.
TEST(StaleSlice, UpdatesAsOneProcessWouldThatTakesAllPushesInTurn) {
  const OptimizerSpec specs[] = {{"torch_sgd", {{"momentum", 0.9}, {"dampening", 0.5}}},
                                 {"torch_adam", {{"beta2", 0.99}, {"epsilon", 1e-3}}},
                                 {"adam", {{"beta2", 0.99}, {"epsilon", 1e-3}}},
                                 {"torch_adagrad", {{"epsilon", 1e-3}}},
                                 {"adamax", {{"beta2", 0.99}}},
                                 {"nadam", {{"beta2", 0.99}, {"epsilon", 1e-3}}},
                                 {"ftml", {{"beta1", 0.9}, {"beta2", 0.99}, {"epsilon", 1e-3}}}};
  for (const OptimizerSpec& spec : specs) {
    SCOPED_TRACE(spec.name);
    constexpr int kWorkers = 3;
    Job job(kWorkers);
    job.server.set_optimizer(0, spec);
    define_stale(job, 2, kUnboundedStaleness);
    job.initialise(1, {1, -1});
    const auto optimizer = Optimizer::make(spec);
    std::vector<float> weight = {1, -1};
    std::vector<std::vector<float>> states(static_cast<size_t>(optimizer->state_count()), std::vector<float>(2));
    std::vector<void*> state;
    for (auto& one : states) state.push_back(one.data());
    optimizer->start_state(DType::kFloat32, weight.data(), state.data(), 2);
    std::mt19937 random(7);
    std::normal_distribution<float> normal;
    std::vector<uint64_t> round(kWorkers, 0);
    double schedule = 1;
    for (int update = 1; update <= 12; ++update) {
      const auto worker = static_cast<size_t>(random() % kWorkers);
      const std::vector<float> gradient = {normal(random), normal(random)};
      Header push = Job::header(FrameKind::kPush, 1, 0, ++round[worker], 2);
      push.scalars = {0.1, 0.01, 1, 0, spec.name == "torch_adagrad" ? 0.25 : 1};
      job.workers[worker].send(push, gradient.data());
      RoundScalars scalars = {0.1, 0.01, 1, static_cast<double>(update), 1};
      if (spec.name == "adam") scalars.lr *= std::sqrt(1 - std::pow(0.99, update)) / (1 - std::pow(0.9, update));
      if (spec.name == "adamax") scalars.lr /= 1 - std::pow(0.9, update);
      if (spec.name == "torch_adagrad") scalars.lr /= 1 + (update - 1) * 0.25;
      if (spec.name == "nadam") scalars.schedule = schedule *= 0.9 * (1 - 0.5 * std::pow(0.96, update * 0.004));
      optimizer->update(DType::kFloat32, weight.data(), nullptr, state.data(), gradient.data(), 2, scalars);
      Header answer;
      ASSERT_EQ(job.receive_value(static_cast<int>(worker), &answer), weight) << "update " << update;
      EXPECT_EQ(answer.scalars.updates, update);
    }
  }
}

TEST(StaleSlice, CountsOnFromWhatAStoredStateHasHad) {
  Job job(2);
  job.server.set_optimizer(0, {"torch_sgd", {{"momentum", 0.5}}});
  define_stale(job, 1, 3);
  job.initialise(1, {0});
  Header store = Job::header(FrameKind::kStore, 1, 0, 0, 1);
  store.part = 1;
  store.scalars.updates = 41;
  const float velocity = 2;
  job.workers[0].send(store, &velocity);
  job.workers[0].must_receive();
  job.push(1, 1, 1, {1}, 0, 0, 1.0);
  Header answer;
  EXPECT_EQ(job.receive_value(1, &answer), std::vector<float>{-2});  // a first update would have dropped the velocity
  EXPECT_EQ(answer.scalars.updates, 42);
  Header fetch = Job::header(FrameKind::kFetch, 1, 0, 0, 0);
  fetch.part = 1;
  fetch.encoding = static_cast<uint8_t>(Encoding::kAbsent);
  job.workers[0].send(fetch);
  EXPECT_EQ(job.workers[0].must_receive().scalars.updates, 42);
  store.scalars.updates = 0.5;
  job.workers[0].send(store, &velocity);
  EXPECT_NE(job.workers[0].receive_failure().find("a number of updates that is none"), std::string::npos);
}

// Rank 0 gives the key another value; worker 1 has a push under way that is from before, as it has not asked for it yet.
TEST(StaleSlice, ANewValueIsFreeOfPushesFromBeforeIt) {
  Job job(3);
  job.server.set_optimizer(0, {"sgd", {}});
  define_stale(job, 1, kUnboundedStaleness);
  job.initialise(1, {0});
  job.push(0, 1, 1, {-1}, 0, 0, 1.0);
  EXPECT_EQ(job.receive_value(0), std::vector<float>{1});
  const float value = 100;
  Header init = Job::header(FrameKind::kInit, 1, 0, 1, 1);
  job.workers[0].send(init, &value);
  EXPECT_EQ(job.receive_value(0), std::vector<float>{100});
  for (uint64_t round : {1, 2}) {
    job.push(1, 1, round, {-1}, 0, 0, 1.0);
    EXPECT_EQ(job.receive_value(1), std::vector<float>{100}) << "round " << round;
  }
  job.push(0, 1, 2, {-10}, 0, 0, 1.0);
  EXPECT_EQ(job.receive_value(0), std::vector<float>{110});
  Header request = Job::header(FrameKind::kInit, 1, 0, 2, 0);
  request.encoding = static_cast<uint8_t>(Encoding::kAbsent);
  job.workers[1].send(request);
  EXPECT_EQ(job.receive_value(1), std::vector<float>{110});
  job.push(1, 1, 3, {-1}, 0, 0, 1.0);
  EXPECT_EQ(job.receive_value(1), std::vector<float>{111});
  job.push(2, 1, 1, {-1}, 0, 0, 1.0);
  EXPECT_EQ(job.receive_value(2), std::vector<float>{111});
}

TEST(StaleSlice, AveragesOverAllWorkers) {
  Job job(2);
  job.server.set_optimizer(0, {"sgd", {}});
  job.axes.reduction = Reduction::kAverage;
  define_stale(job, 1, 3);
  job.initialise(1, {10});
  job.push(0, 1, 1, {4}, 0, 0, 1.0);
  EXPECT_EQ(job.receive_value(0), std::vector<float>{8});
}

TEST(StaleSlice, AWorkerMayBeginWhenOthersAreRoundsAhead) {
  Job job(2);
  job.server.set_optimizer(0, {"sgd", {}});
  define_stale(job, 1, 2);
  job.init(0, 1, 0, {5});
  EXPECT_EQ(job.receive_value(0), std::vector<float>{5});
  for (uint64_t round : {1, 2}) {
    job.push(0, 1, round, {1}, 0, 0, 1.0);
    EXPECT_EQ(job.receive_value(0), std::vector<float>{5 - static_cast<float>(round)});
  }
  job.init(1, 1, 0);
  EXPECT_EQ(job.receive_value(1), std::vector<float>{3});
  job.push(1, 1, 1, {1}, 0, 0, 1.0);
  EXPECT_EQ(job.receive_value(1), std::vector<float>{2});
}

TEST(StaleSlice, TheOptimizersStateCanBeFetchedBetweenOthersPushes) {
  StaleJob job(2, kUnboundedStaleness, options(), /*momentum=*/0.5);
  job.push(1, 1, 1, {1, 3}, 0, 0, 1.0);
  EXPECT_EQ(job.clocks(1, 1), (std::vector<float>{-1, -3}));
  Header fetch = Job::header(FrameKind::kFetch, 1, 0, 0, 0);
  fetch.part = 1;
  job.workers[0].send(fetch);
  const Header part = job.workers[0].must_receive();
  EXPECT_EQ(part.kind, FrameKind::kPart);
  ASSERT_EQ(job.workers[0].payload.size(), 2 * sizeof(float));
  float momentum[2];
  std::memcpy(momentum, job.workers[0].payload.data(), sizeof momentum);
  EXPECT_EQ(momentum[0], -1);
  EXPECT_EQ(momentum[1], -3);
}

TEST(StaleSlice, ItsCopiesAreReturned) {
  StaleJob job(2, 1);
  for (uint64_t round = 1; round <= 5; ++round) {
    for (int worker : {0, 1}) job.tick(worker, round);
    for (int worker : {0, 1}) job.clocks(worker, round);
  }
  EXPECT_TRUE(eventually([&] { return job.server.counters().buffer_bytes == 0; }));
}

TEST(StaleSlice, RefusesAPushWithoutAnOptimizer) {
  Job job(1);
  define_stale(job, 1, 1);
  job.initialise(1, {0});
  job.push(0, 1, 1, {1});
  EXPECT_NE(job.failure().find("have no optimizer"), std::string::npos) << job.failure();
}

TEST(StaleSlice, ASkipNeedsNoOptimizer) {
  Job job(1);
  define_stale(job, 1, 1);
  job.initialise(1, {7});
  job.skip(0, 1, 1);
  EXPECT_EQ(job.receive_value(0), (std::vector<float>{7}));
}

TEST(StaleSlice, RefusesASecondPushBeforeTheFirstIsAnswered) {
  StaleJob job(2, 1);
  for (uint64_t round : {1, 2}) job.tick(0, round);
  job.clocks(0, 1);
  job.tick(0, 3);  // round 2 waits for worker 1
  EXPECT_NE(job.failure().find("before its last push was answered"), std::string::npos) << job.failure();
}

TEST(StaleSlice, AWorkerThatLeavesWhileOthersWaitForItFailsTheJob) {
  StaleJob job(2, 1);
  for (uint64_t round : {1, 2}) job.tick(0, round);
  job.clocks(0, 1);
  ASSERT_TRUE(job.has_received(4));
  Header bye;
  bye.kind = FrameKind::kBye;
  job.workers[1].send(bye);
  EXPECT_NE(job.failure().find("round 1"), std::string::npos) << job.failure();
}

TEST(StaleSlice, AWorkerThatIsAheadMayLeave) {
  StaleJob job(2, 2);
  job.tick(0, 1);
  job.clocks(0, 1);
  Header bye;
  bye.kind = FrameKind::kBye;
  job.workers[0].send(bye);
  for (uint64_t round : {1, 2, 3}) {
    job.tick(1, round);
    EXPECT_EQ(job.clocks(1, round), (std::vector<float>{1, static_cast<float>(round)}));
  }
  job.tick(1, 4);  // for which worker 0 would have had to push a second time
  EXPECT_NE(job.failure().find("worker 0"), std::string::npos) << job.failure();
}

TEST(StaleSlice, WhoKeepsOthersWaitingIsNamed) {
  StaleJob job(3, 1, looking_often());
  for (int worker : {0, 2}) {
    job.tick(worker, 1);
    job.clocks(worker, 1);
    job.tick(worker, 2);
  }
  std::vector<Late> late;
  ASSERT_TRUE(eventually([&] { return (late = job.server.late()).size() == 1 && late[0].waiting == 2; }));
  EXPECT_EQ(late[0].worker, 1);
  EXPECT_EQ(late[0].round, 1u);
}

TEST(StaleSlice, AKeyWhoseWorkersMayBeLostIsRefused) {
  KeyPlan plan;
  plan.wire_key = 1;
  plan.elements = 4;
  plan.staleness = 1;
  Job job(1, outliving());
  EXPECT_THROW(job.server.define(plan, "key1", 0), Error);
}

}  // namespace
}  // namespace p3
