// Keys of factors in jobs of real workers and real servers over sockets.
#include "numeric/factors.h"

#include <gtest/gtest.h>

#include <cmath>
#include <numeric>

#include "worker/local_job.h"

namespace p3 {
namespace {

constexpr FactorShape kShape{3, 40, 70};  // parts of 330 elements

// `servers` servers; slices of 100 elements.
class FactorsJob {
 public:
  FactorsJob(int num_workers, int num_servers, bool average, const OptimizerSpec* spec)
      : weights(static_cast<size_t>(num_workers), first_weight()) {
    KeyPlan plan;
    plan.elements = kShape.part_elements();
    plan.slice_elements = 100;
    plan.parts = static_cast<uint32_t>(num_workers);
    for (int rank = 0; rank < num_workers; ++rank)
      workers.push_back(std::make_unique<Worker>(rank, num_servers, node(name_of_worker(static_cast<size_t>(rank)))));
    for (int server = 0; server < num_servers; ++server) {
      const std::string label = "server " + std::to_string(server) + " (here)";
      ServerOptions options;
      options.node = node(label);
      servers.push_back(Server::make(server, num_servers, num_workers, options));
      for (int rank = 0; rank < num_workers; ++rank) {
        const auto [ours, its] = unix_pair();
        workers[static_cast<size_t>(rank)]->add_server(server, stream_of(ours), label);
        servers.back()->add_worker(rank, stream_of(its), name_of_worker(static_cast<size_t>(rank)));
      }
      servers.back()->set_optimizer(0, {});  // of the store: gathered keys have none
      servers.back()->define(plan, "w (factors)", 0);
      servers.back()->start();
    }
    for (auto& worker : workers) {
      worker->start();
      key = worker->declare_factors("w (factors)", kShape, num_workers, average);
      if (spec != nullptr) worker->set_optimizer(key, *spec);
      worker->agree(key, plan);
      worker->init(key, nullptr, weights[0].data(), 0, pending.done());
    }
    EXPECT_EQ(pending.wait_for(workers.size()), "");
  }
  ~FactorsJob() {
    for (auto& worker : workers) worker->close(1);
  }

  static std::vector<float> first_weight() {
    std::vector<float> weight(kShape.elements());
    std::iota(weight.begin(), weight.end(), -500.f);
    return weight;
  }

  // One round, in which those take part whose factors are not empty.
  std::string round(const std::vector<std::vector<float>>& factors, const RoundScalars& scalars) {
    for (size_t rank = 0; rank < workers.size(); ++rank)
      if (factors[rank].empty())
        workers[rank]->skip(key, weights[rank].data(), 0, pending.done());
      else
        workers[rank]->push(key, factors[rank].data(), weights[rank].data(), 0, scalars, pending.done());
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

TEST(Factors, EveryWorkerMakesTheSameExactUpdate) {
  OptimizerSpec sgd;
  sgd.momentum = 0.5;
  for (int num_workers : {1, 2, 5})
    for (int num_servers : {1, 3}) {
      FactorsJob job(num_workers, num_servers, false, &sgd);
      std::vector<float> expected = FactorsJob::first_weight(), momentum(kShape.elements());
      for (unsigned round = 1; round <= 4; ++round) {
        std::vector<std::vector<float>> factors;
        for (int rank = 0; rank < num_workers; ++rank)
          factors.push_back(whole_numbers(round * 100 + static_cast<unsigned>(rank)));
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

TEST(Factors, WithoutAnOptimizerTheSumOrTheAverageLands) {
  for (bool average : {false, true}) {
    FactorsJob job(3, 2, average, nullptr);
    const std::vector<std::vector<float>> factors = {whole_numbers(1), {}, whole_numbers(2)};
    ASSERT_EQ(job.round(factors, {}), "");
    std::vector<float> expected = gradient_of(factors);
    if (average)
      for (float& value : expected) value /= 2;
    for (const auto& sum : job.weights) EXPECT_EQ(sum, expected);
  }
}

TEST(Factors, WhoSkipsFollowsTheOthersAndIsToldWhenAllDo) {
  OptimizerSpec sgd;
  FactorsJob job(3, 2, false, &sgd);
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

TEST(Factors, OtherNumbersOfARoundFailTheJobByName) {
  OptimizerSpec sgd;
  FactorsJob job(2, 1, false, &sgd);
  const std::vector<float> factors = whole_numbers(1);
  for (size_t rank = 0; rank < 2; ++rank)
    job.workers[rank]->push(job.key, factors.data(), job.weights[rank].data(), 0, with_rate(rank == 0 ? 0.1 : 0.2),
                            job.pending.done());
  const std::string error = job.pending.wait_for(2);
  EXPECT_NE(error.find("disagree in round 1 of key 'w (factors)'"), std::string::npos) << error;
}

// Of `slices` slices each worker sends its own with their content, and only headers of the others'; as many come back.
TEST(Factors, ACardCarriesEachPartOnceToEachOtherWorker) {
  OptimizerSpec sgd;
  constexpr int kWorkers = 4;
  FactorsJob job(kWorkers, 2, false, &sgd);
  const auto bytes_of = [&](size_t rank) { return job.workers[rank]->counters().traffic; };
  const Traffic before = bytes_of(2);
  std::vector<std::vector<float>> factors;
  for (unsigned rank = 0; rank < kWorkers; ++rank) factors.push_back(whole_numbers(rank));
  ASSERT_EQ(job.round(factors, with_rate(1)), "");
  const Traffic after = bytes_of(2);
  const uint64_t part = kShape.part_elements() * sizeof(float), headers = 4 * kWorkers * sizeof(Header);
  EXPECT_EQ(after.slices_sent - before.slices_sent, 4 * kWorkers);
  EXPECT_NEAR(static_cast<double>(after.bytes_sent - before.bytes_sent), static_cast<double>(part + headers), 200);
  EXPECT_NEAR(static_cast<double>(after.bytes_received - before.bytes_received),
              static_cast<double>((kWorkers - 1) * part + headers), 200);
}

TEST(Factors, AGatedRoundLeavesWhenAllIsReady) {
  FactorsJob job(2, 1, false, nullptr);
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
  OptimizerSpec sgd;
  sgd.momentum = 0.5;
  FactorsJob job(2, 1, false, &sgd);
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
  FactorsJob job(2, 1, false, nullptr);
  OptimizerSpec sgd;
  EXPECT_THROW(job.workers[0]->declare_factors("empty", {0, 3, 3}, 2, false), Error);
  const int dense = job.workers[0]->declare("dense", 5, DType::kFloat32);
  EXPECT_THROW(job.workers[0]->set_optimizer(dense, sgd), Error);
  KeyPlan plan;
  plan.wire_key = 7;
  plan.elements = kShape.part_elements();
  plan.parts = 3;
  EXPECT_THROW(job.servers[0]->define(plan, "of three", 0), Error);
  plan.parts = 2;
  plan.staleness = 1;
  EXPECT_THROW(job.servers[0]->define(plan, "apart", 0), Error);
  EXPECT_EQ(job.workers[0]->landing_bytes(job.key), kShape.elements() * sizeof(float));
  EXPECT_EQ(job.workers[0]->bytes(job.key, 0), kShape.part_elements() * sizeof(float));
}

}  // namespace
}  // namespace p3
