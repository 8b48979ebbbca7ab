// Keys of factors in jobs of real workers and real servers over sockets.
#include "numeric/products/factors.h"

#include <gtest/gtest.h>

#include <cstring>
#include <numeric>

#include "worker/local_job.h"

namespace p3 {
namespace {

constexpr FactorShape kShape{3, 40, 70};  // parts of 330 elements

std::vector<int> machines_of_their_own(int workers) {
  std::vector<int> machines(static_cast<size_t>(workers));
  std::iota(machines.begin(), machines.end(), 0);
  return machines;
}

KeyPlan plan_for(int workers) {
  KeyPlan plan;
  plan.elements = kShape.part_elements();
  plan.slice_elements = 100;
  plan.parts = static_cast<uint32_t>(workers);
  plan.update = Update::kWorkers;
  return plan;
}

// `num_servers` servers; slices of 100 elements. `machines`: of each worker.
class FactorsJob {
 public:
  FactorsJob(int num_workers, int num_servers, Reduction reduction, const OptimizerSpec* spec)
      : FactorsJob(machines_of_their_own(num_workers), num_servers, reduction, spec) {}
  FactorsJob(const std::vector<int>& machines, int num_servers, Reduction reduction, const OptimizerSpec* spec,
             bool aggregated = true)
      : weights(machines.size(), first_weight()) {
    const auto num_workers = static_cast<int>(machines.size());
    const Machines places(machines);
    KeyPlan plan = plan_for(num_workers);
    plan.reduction = reduction;
    for (int rank = 0; rank < num_workers; ++rank)
      workers.push_back(
          std::make_unique<Worker>(rank, num_servers, timeless(name_of_worker(static_cast<size_t>(rank)))));
    for (int rank = 0; rank < num_workers; ++rank) {
      const int leader = places.leader_of(rank);
      if (!aggregated || leader == rank) continue;
      const auto [up, down] = unix_pair();
      workers[static_cast<size_t>(rank)]->add_local(leader, stream_of(up), name_of_worker(static_cast<size_t>(leader)));
      workers[static_cast<size_t>(leader)]->add_local(rank, stream_of(down), name_of_worker(static_cast<size_t>(rank)));
    }
    for (int server = 0; server < num_servers; ++server) {
      const std::string label = "server " + std::to_string(server) + " (here)";
      ServerOptions options;
      options.node = timeless(label);
      options.machines = places;
      options.local_aggregation = aggregated;
      servers.push_back(Server::make(server, num_servers, num_workers, options));
      for (int rank = 0; rank < num_workers; ++rank) {
        const auto [ours, its] = unix_pair();
        workers[static_cast<size_t>(rank)]->add_server(server, stream_of(ours), label);
        servers.back()->add_worker(rank, stream_of(its), name_of_worker(static_cast<size_t>(rank)));
      }
      servers.back()->set_optimizer(0, {"sgd", {}});  // of the store: gathered keys have none
      servers.back()->define(plan, "w (factors)", 0);
      servers.back()->start();
    }
    for (auto& worker : workers) {
      worker->start();
      key = worker->declare_factors("w (factors)", kShape, num_workers);
      if (spec != nullptr) worker->set_optimizer(key, *spec);
      worker->agree(key, plan);
      worker->init(key, nullptr, weights[0].data(), 0, pending.done());
    }
    EXPECT_EQ(pending.wait_for(workers.size()), "");
    for (size_t rank = 0; rank < workers.size(); ++rank) must_have_counted_all(rank);
  }
  ~FactorsJob() {
    for (auto& worker : workers) worker->close(1);
  }

  // A frame that has been answered is counted by its sender a moment later. Returns what that comes to.
  Traffic must_have_counted_all(size_t rank) {
    const auto counted = [&] { return workers[rank]->counters().traffic; };
    EXPECT_TRUE(eventually([&] { return counted().slices_sent >= counted().slices_received; }));
    return counted();
  }

  static std::vector<float> first_weight() {
    std::vector<float> weight(kShape.elements());
    std::iota(weight.begin(), weight.end(), -500.f);
    return weight;
  }

  // One round, in which those take part whose factors are not empty.
  std::string round(const std::vector<std::vector<float>>& factors, const RoundSettings& settings) {
    for (size_t rank = 0; rank < workers.size(); ++rank)
      if (factors[rank].empty())
        workers[rank]->skip(key, weights[rank].data(), 0, pending.done());
      else
        workers[rank]->push(key, factors[rank].data(), weights[rank].data(), 0, settings, pending.done());
    return pending.wait_for(workers.size());
  }

  int key = 0;
  Pending pending;
  std::vector<std::vector<float>> weights;
  std::vector<std::unique_ptr<Server>> servers;
  std::vector<std::unique_ptr<Worker>> workers;
};

std::vector<float> whole_numbers(unsigned seed) {
  std::mt19937 random(seed);
  std::vector<float> factors(kShape.part_elements());
  for (float& value : factors) value = static_cast<float>(random() % 7) - 3;
  return factors;
}

std::vector<float> gradient_of(const std::vector<std::vector<float>>& factors) {
  std::vector<const float*> parts;
  for (const auto& part : factors)
    if (!part.empty()) parts.push_back(part.data());
  std::vector<float> sum(kShape.elements());
  FactorSum(kShape).rows(parts, 0, kShape.outputs, sum.data());
  return sum;
}

RoundScalars with_rate(double lr) {
  RoundScalars scalars;
  scalars.lr = lr;
  return scalars;
}

void expect_exact_updates(const std::vector<int>& machines) {
  const OptimizerSpec sgd{"sgd", {{"momentum", 0.5}}};
  for (bool aggregated : {false, true})
    for (int num_servers : {1, 3}) {
      FactorsJob job(machines, num_servers, Reduction::kSum, &sgd, aggregated);
      std::vector<float> expected = FactorsJob::first_weight(), momentum(kShape.elements());
      for (unsigned round = 1; round <= 4; ++round) {
        std::vector<std::vector<float>> factors;
        for (unsigned rank = 0; rank < machines.size(); ++rank) factors.push_back(whole_numbers(round * 100 + rank));
        ASSERT_EQ(job.round(factors, with_rate(0.25)), "");
        const std::vector<float> gradient = gradient_of(factors);
        for (size_t i = 0; i < expected.size(); ++i) {
          momentum[i] = 0.5f * momentum[i] - 0.25f * gradient[i];
          expected[i] += momentum[i];
        }
        for (const auto& weight : job.weights) ASSERT_EQ(weight, expected);
      }
    }
}

TEST(Factors, EveryWorkerMakesTheSameExactUpdate) {
  for (int workers : {1, 2, 5}) expect_exact_updates(machines_of_their_own(workers));
}

TEST(Factors, SoDoWorkersThatShareMachines) {
  for (const auto& machines : kPlacements) expect_exact_updates(machines);
}

TEST(Factors, WithoutAnOptimizerTheSumOrAnAverageLands) {
  for (const std::vector<int>& machines : {std::vector<int>{0, 1, 2}, {0, 0, 1}, {0, 1, 1}, {0, 0, 0}})
    for (const auto& [reduction, divisor] :
         std::map<Reduction, int>{{Reduction::kSum, 1}, {Reduction::kAverage, 2}, {Reduction::kMean, 3}}) {
      FactorsJob job(machines, 2, reduction, nullptr);
      const std::vector<std::vector<float>> factors = {whole_numbers(1), {}, whole_numbers(2)};
      ASSERT_EQ(job.round(factors, {}), "");
      std::vector<float> expected = gradient_of(factors);
      for (float& value : expected) value /= static_cast<float>(divisor);
      for (const auto& sum : job.weights) EXPECT_EQ(sum, expected);
    }
}

void expect_that_who_skips_follows(const std::vector<int>& machines) {
  const OptimizerSpec sgd{"sgd", {}};
  FactorsJob job(machines, 2, Reduction::kSum, &sgd);
  const std::vector<std::vector<float>> factors = {{}, whole_numbers(3), {}};
  ASSERT_EQ(job.round(factors, with_rate(1)), "");
  std::vector<float> expected = FactorsJob::first_weight();
  const std::vector<float> gradient = gradient_of(factors);
  for (size_t i = 0; i < expected.size(); ++i) expected[i] -= gradient[i];
  for (const auto& weight : job.weights) ASSERT_EQ(weight, expected);

  bool updated = true;
  job.workers[0]->skip(job.key, job.weights[0].data(), 0, [&, done = job.pending.done()](const Error* error, bool is) {
    updated = is;
    done(error, is);
  });
  for (size_t rank : {size_t{1}, size_t{2}})
    job.workers[rank]->skip(job.key, job.weights[rank].data(), 0, job.pending.done());
  ASSERT_EQ(job.pending.wait_for(3), "");
  EXPECT_FALSE(updated);
  for (const auto& weight : job.weights) EXPECT_EQ(weight, expected);
}

TEST(Factors, WhoSkipsFollowsTheOthersAndIsToldWhenAllDo) {
  for (const std::vector<int>& machines : {std::vector<int>{0, 1, 2}, {0, 0, 1}, {0, 1, 1}, {0, 0, 0}})
    expect_that_who_skips_follows(machines);
}

// Who skips a round has none of its own, and must update by those of the others, to have the same bits.
TEST(Factors, OtherFieldsOfTheOptimizerReachWhoSkips) {
  const OptimizerSpec sgd{"torch_sgd", {{"momentum", 0.5}}};
  for (const std::vector<int>& machines : {std::vector<int>{0, 1, 2}, {0, 0, 1}, {0, 1, 1}, {0, 0, 0}}) {
    FactorsJob job(machines, 2, Reduction::kSum, &sgd);
    std::vector<float> expected = FactorsJob::first_weight(), velocity(kShape.elements());
    const std::vector<std::vector<float>> factors = {{}, whole_numbers(3), {}};
    const std::vector<float> gradient = gradient_of(factors);
    for (const double momentum : {0.5, 0.25, 0.75, 0.5}) {
      RoundSettings settings = with_rate(1);
      if (momentum != 0.5) settings.fields = std::make_shared<const FieldValues>(FieldValues{momentum, 0, 0, 0, 0});
      ASSERT_EQ(job.round(factors, settings), "");
      for (size_t i = 0; i < expected.size(); ++i) {
        velocity[i] = static_cast<float>(momentum) * velocity[i] + gradient[i];
        expected[i] -= velocity[i];
      }
      for (const auto& weight : job.weights) ASSERT_EQ(weight, expected);
    }
  }
}

TEST(Factors, OtherNumbersOfARoundFailTheJobByName) {
  const OptimizerSpec sgd{"sgd", {}};
  for (const std::vector<int>& machines : {std::vector<int>{0, 1}, {0, 0}}) {
    FactorsJob job(machines, 1, Reduction::kSum, &sgd);
    const std::vector<float> factors = whole_numbers(1);
    for (size_t rank = 0; rank < 2; ++rank)
      job.workers[rank]->push(job.key, factors.data(), job.weights[rank].data(), 0, with_rate(rank == 0 ? 0.1 : 0.2),
                              job.pending.done());
    const std::string error = job.pending.wait_for(2);
    EXPECT_NE(error.find("disagree in round 1 of key 'w (factors)'"), std::string::npos) << error;
  }
}

// Of `slices` slices each worker sends its own with their content, and only headers of the others'; as many come back.
TEST(Factors, ACardCarriesEachPartOnceToEachOtherWorker) {
  const OptimizerSpec sgd{"sgd", {}};
  constexpr int kWorkers = 4;
  FactorsJob job(kWorkers, 2, Reduction::kSum, &sgd);
  const Traffic before = job.must_have_counted_all(2);
  std::vector<std::vector<float>> factors;
  for (unsigned rank = 0; rank < kWorkers; ++rank) factors.push_back(whole_numbers(rank));
  ASSERT_EQ(job.round(factors, with_rate(1)), "");
  const Traffic after = job.must_have_counted_all(2);
  const uint64_t part = kShape.part_elements() * sizeof(float), headers = 4 * kWorkers * sizeof(Header);
  EXPECT_EQ(after.slices_sent - before.slices_sent, 4 * kWorkers);
  EXPECT_NEAR(static_cast<double>(after.bytes_sent - before.bytes_sent), static_cast<double>(part + headers), 200);
  EXPECT_NEAR(static_cast<double>(after.bytes_received - before.bytes_received),
              static_cast<double>((kWorkers - 1) * part + headers), 200);
}

// Two workers on one machine, one on another: the parts of the first two leave once, and the third's comes once.
TEST(Factors, AMachineCarriesEachPartOnce) {
  const OptimizerSpec sgd{"sgd", {}};
  FactorsJob job({0, 0, 1}, 2, Reduction::kSum, &sgd);
  const auto counted = [&](size_t rank) { return job.workers[rank]->counters(); };
  std::vector<Counters> before;
  for (size_t rank = 0; rank < 3; ++rank) before.push_back(counted(rank));
  ASSERT_EQ(job.round({whole_numbers(1), whole_numbers(2), whole_numbers(3)}, with_rate(1)), "");
  const uint64_t part = kShape.part_elements() * sizeof(float), headers = 3 * 4 * sizeof(Header);
  const auto sent = [&](size_t rank) { return counted(rank).traffic.bytes_sent - before[rank].traffic.bytes_sent; };
  const auto received = [&](size_t rank) {
    return counted(rank).traffic.bytes_received - before[rank].traffic.bytes_received;
  };
  const auto is_about = [](uint64_t bytes, uint64_t expected) { return bytes >= expected && bytes <= expected + 200; };
  EXPECT_TRUE(eventually([&] { return is_about(sent(0), 2 * part + headers); })) << sent(0);
  EXPECT_TRUE(is_about(received(0), part + headers)) << received(0);
  EXPECT_TRUE(is_about(sent(1), 0)) << sent(1);
  EXPECT_TRUE(is_about(received(1), 0)) << received(1);
  EXPECT_TRUE(eventually([&] { return is_about(sent(2), part + headers); })) << sent(2);
  EXPECT_TRUE(is_about(received(2), 2 * part + headers)) << received(2);
  EXPECT_TRUE(
      eventually([&] { return is_about(counted(1).local.bytes_sent - before[1].local.bytes_sent, part + headers); }));
  EXPECT_EQ(counted(1).local.bytes_received - before[1].local.bytes_received, 2 * part + headers);
  EXPECT_TRUE(eventually([&] { return counted(0).buffer_bytes == 0; }));
}

const auto kPartBytes = static_cast<uint32_t>(kShape.part_elements() * sizeof(float));

// The leader of workers 0 and 1; worker 1, and the server of these and of worker 2, are played by the test.
struct LeaderOfParts {
  LeaderOfParts() : worker(0, 1, timeless("worker 0 (here)")) {
    start_as_leader(worker, server, neighbour);
    KeyPlan plan = plan_for(3);
    plan.slice_elements = static_cast<uint32_t>(plan.elements);  // slice i is worker i's
    key = worker.declare_factors("w", kShape, 3);
    worker.agree(key, plan);
  }
  static Header push_of_neighbour(uint32_t slice) {
    Header header;
    header.kind = FrameKind::kPush;
    header.slice = slice;
    header.round = 1;
    header.part = slice != 1;
    header.encoding = static_cast<uint8_t>(slice == 1 ? Encoding::kPlain : Encoding::kAbsent);
    header.payload_bytes = slice == 1 ? kPartBytes : 0;
    return header;
  }
  std::string failure() {
    EXPECT_TRUE(wait_readable(worker.event_fd()));
    return worker.error() ? worker.error()->what() : "";
  }

  const std::vector<float> mine = whole_numbers(1), neighbours = whole_numbers(2), theirs = whole_numbers(3);
  std::vector<float> weight = FactorsJob::first_weight();
  Pending pending;
  std::unique_ptr<RawPeer> server, neighbour;
  int key;
  Worker worker;
};

TEST(MachinesParts, LeaveOnceWithTheNumbersOfWhoTakesPartAndGoRound) {
  LeaderOfParts job;
  job.worker.push(job.key, job.mine.data(), job.weight.data(), -7, {}, job.pending.done());
  for (uint32_t slice = 0; slice < 3; ++slice)
    job.neighbour->send(LeaderOfParts::push_of_neighbour(slice), job.neighbours.data());
  std::vector<Header> pushes;
  for (int i = 0; i < 3; ++i) {
    pushes.push_back(job.server->must_receive());
    const Header& push = pushes.back();
    const bool is_ours = push.slice < 2;
    EXPECT_EQ(push.of_machine, 1);
    EXPECT_EQ(push.priority, -7);
    EXPECT_EQ(push.contributors, is_ours);
    EXPECT_EQ(push.part, !is_ours);  // takes part in the round of the other machine's
    ASSERT_EQ(push.payload_bytes, is_ours ? kPartBytes : 0);
    const std::vector<float>& part = push.slice == 0 ? job.mine : job.neighbours;
    EXPECT_TRUE(!is_ours || std::memcmp(job.server->payload.data(), part.data(), kPartBytes) == 0);
  }
  for (Header answer : pushes) {
    answer.kind = FrameKind::kValue;
    answer.contributors = answer.part = 0;
    answer.encoding = static_cast<uint8_t>(answer.slice == 2 ? Encoding::kPlain : Encoding::kAbsent);
    answer.payload_bytes = answer.slice == 2 ? kPartBytes : 0;
    job.server->send(answer, job.theirs.data());
    const Header passed = job.neighbour->must_receive();
    EXPECT_EQ(passed.slice, answer.slice);
    EXPECT_EQ(passed.of_machine, 0);
    ASSERT_EQ(passed.payload_bytes, answer.slice == 1 ? 0 : kPartBytes);
    const std::vector<float>& part = answer.slice == 0 ? job.mine : job.theirs;
    EXPECT_TRUE(answer.slice == 1 || std::memcmp(job.neighbour->payload.data(), part.data(), kPartBytes) == 0);
  }
  EXPECT_EQ(job.pending.wait_for(1), "");
  EXPECT_EQ(job.weight, gradient_of({job.mine, job.neighbours, job.theirs}));
}

TEST(MachinesParts, ThatCannotBeAreRefused) {
  const auto refusal = [](auto change) {
    LeaderOfParts job;
    Header header = LeaderOfParts::push_of_neighbour(1);
    change(header);
    job.neighbour->send(header, job.neighbours.data());
    return job.failure();
  };
  for (uint32_t slice : {0u, 2u})
    EXPECT_NE(refusal([&](Header& h) { h.slice = slice; }).find("another worker's to send"), std::string::npos);
  EXPECT_NE(refusal([](Header& h) { h.payload_bytes = 12; }).find("another size"), std::string::npos);
  EXPECT_NE(refusal([](Header& h) { h.part = 2; }).find("malformed"), std::string::npos);
  EXPECT_NE(refusal([](Header& h) { h.encoding = 1; }).find("another encoding"), std::string::npos);

  // Of this machine's own parts no content comes back, which would be written to where they leave from.
  LeaderOfParts job;
  job.worker.push(job.key, job.mine.data(), job.weight.data(), 0, {}, job.pending.done());
  for (uint32_t slice = 0; slice < 3; ++slice)
    job.neighbour->send(LeaderOfParts::push_of_neighbour(slice), job.neighbours.data());
  Header answer;
  do answer = job.server->must_receive();
  while (answer.slice != 1);
  answer.kind = FrameKind::kValue;
  answer.contributors = 0;
  job.server->send(answer, job.theirs.data());
  EXPECT_NE(job.failure().find("in another encoding than agreed"), std::string::npos);
}

TEST(Factors, AGatedRoundLeavesWhenAllIsReady) {
  FactorsJob job(2, 1, Reduction::kSum, nullptr);
  const std::vector<float> factors = whole_numbers(5);
  job.workers[0]->push(job.key, factors.data(), job.weights[0].data(), 0, {}, job.pending.done(), /*gated=*/true);
  job.workers[1]->push(job.key, factors.data(), job.weights[1].data(), 0, {}, job.pending.done());
  job.workers[0]->ready(job.key, 100);
  EXPECT_EQ(job.workers[0]->counters().traffic.slices_sent, 8u);  // its first words alone, of 2 x 4 slices
  job.workers[0]->ready(job.key, kShape.part_elements());
  ASSERT_EQ(job.pending.wait_for(2), "");
  EXPECT_EQ(job.weights[0], gradient_of({factors, factors}));
}

TEST(Factors, EachWorkersStateCanBeReadAndReplaced) {
  const OptimizerSpec sgd{"sgd", {{"momentum", 0.5}}};
  FactorsJob job(2, 1, Reduction::kSum, &sgd);
  const std::vector<float> content(kShape.elements(), 4.f);
  for (auto& worker : job.workers) worker->store(job.key, 1, content.data(), job.pending.done());
  ASSERT_EQ(job.pending.wait_for(2), "");
  const std::vector<std::vector<float>> factors = {whole_numbers(1), whole_numbers(2)};
  ASSERT_EQ(job.round(factors, with_rate(1)), "");
  std::vector<float> state(kShape.elements());
  job.workers[1]->fetch(job.key, 1, state.data(), job.pending.done());
  ASSERT_EQ(job.pending.wait_for(1), "");
  const std::vector<float> first = FactorsJob::first_weight(), gradient = gradient_of(factors);
  for (size_t i = 0; i < state.size(); ++i) {
    ASSERT_EQ(state[i], 2 - gradient[i]);
    ASSERT_EQ(job.weights[0][i], first[i] + state[i]);
  }
  EXPECT_THROW(job.workers[0]->fetch(job.key, 2, state.data(), job.pending.done()), Error);
}

TEST(Factors, WrongUseIsRefused) {
  FactorsJob job(2, 1, Reduction::kSum, nullptr);
  const OptimizerSpec sgd{"sgd", {}};
  EXPECT_THROW(job.workers[0]->declare_factors("empty", {0, 3, 3}, 2), Error);
  const int dense = job.workers[0]->declare("dense", 5, DType::kFloat32);
  EXPECT_THROW(job.workers[0]->set_optimizer(dense, sgd), Error);
  KeyPlan plan;
  plan.wire_key = 7;
  plan.elements = kShape.part_elements();
  plan.parts = 3;
  plan.update = Update::kWorkers;
  EXPECT_THROW(job.servers[0]->define(plan, "of three", 0), Error);
  plan.parts = 2;
  plan.update = Update::kWorkers;
  plan.staleness = 1;
  EXPECT_THROW(job.servers[0]->define(plan, "apart", 0), Error);
  EXPECT_EQ(job.workers[0]->landing_bytes(job.key), kShape.elements() * sizeof(float));
  EXPECT_EQ(job.workers[0]->bytes(job.key, 0), kShape.part_elements() * sizeof(float));
}

}  // namespace
}  // namespace p3
