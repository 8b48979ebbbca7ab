// Local aggregation: real workers and a real server over sockets, and leaders whose neighbours are played by the test.
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "worker/local_job.h"

namespace p3 {
namespace {

template <typename T>
void expect_canonical_sums(const std::vector<int>& machines, bool aggregated, DType dtype) {
  constexpr size_t kElements = 2500;
  Job job(machines, aggregated);
  const int key = job.declare(kElements, dtype);
  std::vector<T> zeros(kElements);
  std::vector<std::vector<T>> landings(machines.size(), zeros);
  ASSERT_EQ(job.init(key, zeros, landings), "");
  for (unsigned round = 1; round <= 3; ++round) {
    std::vector<std::vector<T>> gradients;
    for (unsigned i = 0; i < machines.size(); ++i)
      gradients.push_back(as<T>(random_values(kElements, 100 * round + i)));
    for (size_t i = machines.size(); i-- > 0;)  // the last first: order must not come from arrival
      job.workers[i]->push(key, gradients[i].data(), landings[i].data(), 0, {}, job.pending.done());
    ASSERT_EQ(job.pending.wait_for(machines.size()), "");
    const auto expected = canonical_sum(gradients, Machines(machines));
    for (size_t i = 0; i < machines.size(); ++i) ASSERT_EQ(landings[i], expected) << "worker " << i;
  }
}

TEST(CanonicalOrder, HoldsWithAndWithoutAggregation) {
  for (const auto& machines : kPlacements)
    for (bool aggregated : {false, true}) expect_canonical_sums<float>(machines, aggregated, DType::kFloat32);
}

TEST(CanonicalOrder, RoundsEachMachinesSumOfHalfPrecision) {
  for (const auto& machines : kPlacements)
    for (bool aggregated : {false, true}) {
      expect_canonical_sums<half>(machines, aggregated, DType::kFloat16);
      expect_canonical_sums<bfloat16>(machines, aggregated, DType::kBfloat16);
    }
}

TEST(Machines, AreNumberedByTheirLowestRanks) {
  const Machines machines(std::vector<int>{9, 3, 9, 5, 3});
  EXPECT_EQ(machines.count(), 3);
  EXPECT_EQ(machines.workers(0), (std::vector<int>{0, 2}));
  EXPECT_EQ(machines.workers(1), (std::vector<int>{1, 4}));
  EXPECT_EQ(machines.leader_of(4), 1);
  EXPECT_EQ(machines.place(4), 1);
  EXPECT_TRUE(machines.is_alone(3));
  EXPECT_FALSE(machines.is_alone(0));
}

TEST(Machines, OfGroupsHaveTheLeaderAtThatPlaceModuloTheirSize) {
  const Machines groups({0, 0, 0, 1, 1}, 2);
  for (int worker : {0, 1, 2}) EXPECT_EQ(groups.leader_of(worker), 2);
  for (int worker : {3, 4}) EXPECT_EQ(groups.leader_of(worker), 3);
}

TEST(LocalAggregation, OnePushOfEachMachineReachesTheServer) {
  Job job({0, 0, 1, 1}, true);
  constexpr size_t kElements = 5000;
  const int key = job.declare(kElements);
  std::vector<float> zeros(kElements), gradient(kElements, 1);
  std::vector<std::vector<float>> landings(4, zeros);
  ASSERT_EQ(job.init(key, zeros, landings), "");
  ASSERT_TRUE(eventually([&] { return job.server->counters().traffic.slices_sent == 20; }));  // the first values
  const auto before = job.server->counters().traffic;
  for (size_t i = 0; i < 4; ++i)
    job.workers[i]->push(key, gradient.data(), landings[i].data(), 0, {}, job.pending.done());
  ASSERT_EQ(job.pending.wait_for(4), "");
  const auto traffic = [&] { return job.server->counters().traffic; };
  EXPECT_EQ(traffic().slices_received - before.slices_received, 10u);  // 5 slices, 2 machines
  // A frame counts as sent when its sender looks again, which may be after it has arrived.
  EXPECT_TRUE(eventually([&] { return traffic().slices_sent - before.slices_sent == 10; }));
  for (const auto& landing : landings) EXPECT_EQ(landing, std::vector<float>(kElements, 4));
  EXPECT_TRUE(eventually([&] { return job.workers[1]->counters().local.slices_sent == 5; }));
  EXPECT_EQ(job.workers[1]->counters().local.slices_received, 5u);
  EXPECT_EQ(job.workers[0]->counters().local.slices_received, 5u);
  EXPECT_EQ(job.workers[1]->counters().traffic.slices_sent, 5u);  // the request for the first value
  EXPECT_EQ(job.workers[0]->counters().buffer_bytes, 0u);         // it completes once all have left
}

TEST(LocalAggregation, AveragesOverThoseWhoTakePartAndCompletesWhenAllSkip) {
  for (bool aggregated : {false, true}) {
    Job job({0, 0, 1}, aggregated);
    job.reduction = Reduction::kAverage;
    const int key = job.declare(10);
    std::vector<float> zeros(10), six(10, 6), landing(10);
    std::vector<std::vector<float>> landings(3, zeros);
    ASSERT_EQ(job.init(key, zeros, landings), "");
    job.workers[0]->skip(key, landings[0].data(), 0, job.pending.done());  // the leader has no gradient, nor scalars
    for (size_t i : {size_t{1}, size_t{2}})
      job.workers[i]->push(key, six.data(), landings[i].data(), 0, RoundScalars{0.5}, job.pending.done());
    ASSERT_EQ(job.pending.wait_for(3), "");
    for (const auto& one : landings) EXPECT_EQ(one, six);
    for (size_t i = 0; i < 3; ++i) {
      landings[i].assign(10, 1);
      job.workers[i]->skip(key, landings[i].data(), 0,
                           [&, done = job.pending.done()](const Error* error, bool updated) {
                             EXPECT_FALSE(updated);
                             done(error, updated);
                           });
    }
    ASSERT_EQ(job.pending.wait_for(3), "");
    for (const auto& one : landings) EXPECT_EQ(one, std::vector<float>(10, 1));
  }
}

// A value of a rule's field that differs from the announced one comes through leaders, and must be the same on all.
TEST(LocalAggregation, OtherFieldsOfTheOptimizerReachTheServerAndMustBeTheSame) {
  const auto momentum = [](double value) {
    return RoundSettings({1}, std::make_shared<const FieldValues>(FieldValues{value, 0, 0, 0, 0}));
  };
  for (const std::vector<int>& machines : {std::vector<int>{0, 0, 1}, {0, 1, 1}, {0, 0, 0}}) {
    Job job(machines, true);
    job.server->set_optimizer(0, {"torch_sgd", {{"momentum", 0.5}}});
    const int key = job.declare(10);
    std::vector<float> zeros(10), ones(10, 1);
    std::vector<std::vector<float>> landings(3, zeros);
    ASSERT_EQ(job.init(key, zeros, landings), "");
    const auto round = [&](const std::vector<float>& gradient, const std::vector<RoundSettings>& settings) {
      for (size_t i = 0; i < 3; ++i)
        job.workers[i]->push(key, gradient.data(), landings[i].data(), 0, settings[i], job.pending.done());
      return job.pending.wait_for(3);
    };
    ASSERT_EQ(round(ones, std::vector<RoundSettings>(3, RoundScalars{1})), "");
    ASSERT_EQ(round(zeros, std::vector<RoundSettings>(3, momentum(0.25))), "");
    for (const auto& one : landings) EXPECT_EQ(one, std::vector<float>(10, -3.75f));
    ASSERT_EQ(round(zeros, std::vector<RoundSettings>(3, RoundScalars{1})), "");
    for (const auto& one : landings) EXPECT_EQ(one, std::vector<float>(10, -4.125f));
    const std::string text = round(zeros, {momentum(0.25), momentum(0.25), momentum(0.125)});
    EXPECT_NE(text.find(" disagree in round 4 of key 'key0'"), std::string::npos) << text;
    EXPECT_NE(text.find(" 0.125)"), std::string::npos) << text;
  }
}

TEST(LocalAggregation, NeighboursThatDisagreeAreNamed) {
  Job job({0, 0}, true);
  const int key = job.declare(10);
  std::vector<float> zeros(10);
  std::vector<std::vector<float>> landings(2, zeros);
  ASSERT_EQ(job.init(key, zeros, landings), "");
  job.workers[0]->push(key, zeros.data(), landings[0].data(), 0, RoundScalars{0.5}, job.pending.done());
  job.workers[1]->push(key, zeros.data(), landings[1].data(), 0, RoundScalars{0.25}, job.pending.done());
  const std::string text = job.pending.wait_for(2);
  EXPECT_NE(text.find("worker 0 (here) (lr 0.5"), std::string::npos) << text;
  EXPECT_NE(text.find("worker 1 (here) (lr 0.25"), std::string::npos) << text;
  EXPECT_NE(text.find("round 1 of key 'key0'"), std::string::npos) << text;
  EXPECT_TRUE(wait_readable(job.server->event_fd()));
}

TEST(LocalAggregation, WhoLeavesBeforeItsNeighboursIsNamed) {
  for (size_t leaver : {size_t{0}, size_t{1}}) {
    for (bool pushed_before : {false, true}) {
      Job job({0, 0}, true);
      const int key = job.declare(10);
      std::vector<float> zeros(10);
      std::vector<std::vector<float>> landings(2, zeros);
      ASSERT_EQ(job.init(key, zeros, landings), "");
      const size_t stayer = 1 - leaver;
      const auto push = [&] {
        job.workers[stayer]->push(key, zeros.data(), landings[stayer].data(), 0, {}, job.pending.done());
      };
      if (pushed_before) {
        push();
        ASSERT_TRUE(eventually([&] { return job.workers[0]->counters().buffer_bytes > 0; }));  // the leader has it
      }
      const bool orderly = job.workers[leaver]->close(10);
      EXPECT_TRUE(orderly || pushed_before);  // it may hear of its mistake before it has left
      if (!pushed_before) push();
      const std::string text = job.pending.wait_for(1);
      EXPECT_NE(text.find(name_of_worker(leaver) + " ended, but others still push round 1 of key 'key0'"),
                std::string::npos)
          << text;
    }
  }
}

TEST(LocalAggregation, ALeaderMayLeaveOnceItsNeighboursNeedNothing) {
  Job job({0, 0, 0}, true);
  const int key = job.declare(10);
  std::vector<float> zeros(10);
  std::vector<std::vector<float>> landings(3, zeros);
  ASSERT_EQ(job.init(key, zeros, landings), "");
  for (size_t i = 0; i < 3; ++i) job.workers[i]->push(key, zeros.data(), landings[i].data(), 0, {}, job.pending.done());
  ASSERT_EQ(job.pending.wait_for(3), "");
  for (auto& worker : job.workers) EXPECT_TRUE(worker->close(10));
  EXPECT_TRUE(wait_readable(job.server->event_fd()));
  EXPECT_TRUE(job.server->finished());
  EXPECT_FALSE(job.server->error());
}

TEST(MachinesPush, SaysThatAnyOfItsWorkersGoesOn) {
  for (const bool theirs : {false, true}) {
    Leader job;
    Header push = Leader::push_of();
    push.encoding = static_cast<uint8_t>(Encoding::kAbsent);
    push.payload_bytes = 0;
    for (const bool is_first : {true, false}) {
      push.part = is_first && theirs;
      job.neighbour->send(push);
      job.worker.skip(job.key, job.landing.data(), 0, job.pending.done());
      Header answer = job.server->must_receive();
      EXPECT_EQ(answer.of_machine, 1);
      EXPECT_EQ(answer.part, push.part) << "round " << push.round;
      answer.kind = FrameKind::kValue;
      answer.part = 0;
      job.server->send(answer);
      job.neighbour->must_receive();
      EXPECT_EQ(job.pending.wait_for(1), "");
      ++push.round;
    }
  }
}

TEST(MachinesPush, CarriesTheSumTheCountAndTheLeadersPriority) {
  Leader job;
  job.worker.push(job.key, job.ones.data(), job.landing.data(), -7, RoundScalars{0.5}, job.pending.done());
  Header theirs = Leader::push_of();
  theirs.priority = 9;
  theirs.scalars.lr = 0.5;
  job.neighbour->send(theirs, job.ones.data());
  Header header = job.server->must_receive();
  EXPECT_EQ(header.kind, FrameKind::kPush);
  EXPECT_EQ(header.of_machine, 1);
  EXPECT_EQ(header.contributors, 2);
  EXPECT_EQ(header.priority, -7);
  EXPECT_EQ(header.scalars.lr, 0.5);
  std::vector<float> sum(4);
  std::memcpy(sum.data(), job.server->payload.data(), 16);
  EXPECT_EQ(sum, std::vector<float>(4, 2));
  header.kind = FrameKind::kValue;
  header.contributors = 0;
  job.server->send(header, job.ones.data());
  const Header passed = job.neighbour->must_receive();
  EXPECT_EQ(passed.kind, FrameKind::kValue);
  EXPECT_EQ(passed.of_machine, 0);
  EXPECT_EQ(passed.priority, -7);
  EXPECT_EQ(std::memcmp(job.neighbour->payload.data(), job.ones.data(), 16), 0);
  EXPECT_EQ(job.pending.wait_for(1), "");
  EXPECT_EQ(job.landing, job.ones);
}

TEST(MachinesPush, OfANeighbourThatCannotBeIsRefused) {
  const auto refusal = [](auto change) {
    Leader job;
    Header header = Leader::push_of();
    change(header);
    job.neighbour->send(header, job.ones.data());
    return job.failure();
  };
  EXPECT_NE(refusal([](Header& h) { h.key = 4; }).find("unexpected"), std::string::npos);
  EXPECT_NE(refusal([](Header& h) { h.slice = 1; }).find("of no slice of its key"), std::string::npos);
  EXPECT_NE(refusal([](Header& h) { h.round = 2; }).find("out of turn"), std::string::npos);
  EXPECT_NE(refusal([](Header& h) { h.payload_bytes = 12; }).find("another size"), std::string::npos);
  EXPECT_NE(refusal([](Header& h) { h.dtype = 1; }).find("another element type"), std::string::npos);
  EXPECT_NE(refusal([](Header& h) { h.encoding = 1; }).find("another encoding"), std::string::npos);
  EXPECT_NE(refusal([](Header& h) { h.contributors = h.of_machine = 1; }).find("whole machine"), std::string::npos);
}

TEST(MachinesPush, ComesOnceARound) {
  Leader job;
  for (int i = 0; i < 2; ++i) job.neighbour->send(Leader::push_of(), job.ones.data());
  EXPECT_NE(job.failure().find("out of turn"), std::string::npos);
}

TEST(MachinesPush, OfALostNeighbourIsNamed) {
  Leader job;
  job.worker.push(job.key, job.ones.data(), job.landing.data(), 0, {}, job.pending.done());
  ASSERT_TRUE(eventually([&] { return job.worker.counters().buffer_bytes > 0; }));  // it waits for the neighbour's
  job.neighbour->close();
  const std::string text = job.pending.wait_for(1);
  EXPECT_NE(text.find("lost worker 1 (there) while waiting for round 1 of key 'w'"), std::string::npos) << text;
  EXPECT_NE(job.server->receive_failure().find("lost worker 1"), std::string::npos);
}

// About one dense key.
struct ServerOfSlices : ServerOfTwoMachines {
  ServerOfSlices() {
    KeyPlan plan;
    plan.wire_key = 3;
    plan.elements = 4;
    server->define(plan, "w", 0);
  }
  void init(size_t worker) {
    Header header = Leader::push_of(0);
    header.kind = FrameKind::kInit;
    if (worker > 0) {
      header.encoding = static_cast<uint8_t>(Encoding::kAbsent);
      header.payload_bytes = 0;
    }
    workers[worker].send(header, ones.data());
  }
  void init_all() {
    for (size_t worker = 0; worker < 3; ++worker) init(worker);
    for (RawPeer& worker : workers) EXPECT_EQ(worker.must_receive().kind, FrameKind::kValue);
  }

  const std::vector<float> ones = {1, 1, 1, 1};
};

TEST(ServerOfMachines, LetsNobodyPushAKeyThatItsLeaderMayNotKnow) {
  ServerOfSlices job;
  job.init(2);
  ASSERT_TRUE(eventually([&] { return job.server->counters().traffic.slices_received == 1; }));
  for (int i = 0; i < 2; ++i) {  // what came before is worked off
    job.init(0);
    EXPECT_EQ(job.workers[0].must_receive().kind, FrameKind::kValue);
  }
  EXPECT_FALSE(job.workers[2].readable(0));
  job.init(1);
  EXPECT_EQ(job.workers[2].must_receive().kind, FrameKind::kValue);
}

TEST(ServerOfMachines, SaysThatALeaderLeftWhileOthersWaitForIt) {
  ServerOfSlices job;
  job.init(0);
  job.init(2);
  EXPECT_EQ(job.workers[0].must_receive().kind, FrameKind::kValue);
  ASSERT_TRUE(eventually([&] { return job.server->counters().traffic.slices_received == 2; }));
  Header bye;
  bye.kind = FrameKind::kBye;
  job.workers[1].send(bye);
  EXPECT_NE(job.failure().find("worker 1 (there) ended, but others still wait for its value of key 'w'"),
            std::string::npos);
}

TEST(ServerOfMachines, RefusesPushesThatAreAnothersToSend) {
  const auto refusal = [](size_t worker, uint8_t of_machine, uint16_t contributors) {
    ServerOfSlices job;
    job.init_all();
    Header header = Leader::push_of();
    header.of_machine = of_machine;
    header.contributors = contributors;
    job.workers[worker].send(header, job.ones.data());
    return job.failure();
  };
  EXPECT_NE(refusal(0, 1, 1).find("another worker's to send"), std::string::npos);  // it is alone
  EXPECT_NE(refusal(1, 0, 0).find("another worker's to send"), std::string::npos);  // of the machine or not at all
  EXPECT_NE(refusal(1, 1, 3).find("another worker's to send"), std::string::npos);  // they are two
  EXPECT_NE(refusal(2, 0, 0).find("another worker's to send"), std::string::npos);  // its leader's
  EXPECT_NE(refusal(2, 1, 2).find("another worker's to send"), std::string::npos);
}

}  // namespace
}  // namespace p3
