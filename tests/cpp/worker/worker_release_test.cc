// Keys that a worker has done with, and forgets.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "worker/local_job.h"

namespace p3 {
namespace {

std::string refusal_of(Worker& worker, int key) {
  try {
    worker.release(key);
    return "";
  } catch (const Error& error) {
    return error.what();
  }
}

// Each life has a key of its own, and the keys before are gone; on one machine, with a leader, and on two.
TEST(ReleasedKey, IsForgottenByWorkersLeadersAndTheServer) {
  constexpr size_t kElements = 2500;
  for (const auto& machines : kPlacements) {
    Job job(machines, true);
    for (int life = 0; life < 4; ++life) {
      const int key = job.declare(kElements);
      std::vector<float> first(kElements, 1.0f), gradient(kElements, 2.0f);
      std::vector<std::vector<float>> landings(machines.size(), first);
      ASSERT_EQ(job.init(key, first, landings), "");
      for (size_t i = 0; i < machines.size(); ++i)
        job.workers[i]->push(key, gradient.data(), landings[i].data(), 0, {}, job.pending.done());
      ASSERT_EQ(job.pending.wait_for(machines.size()), "");
      for (const auto& landing : landings)
        ASSERT_EQ(landing, std::vector<float>(kElements, 2.0f * static_cast<float>(machines.size())));
      for (auto& worker : job.workers) {
        ASSERT_TRUE(eventually([&] { return worker->is_idle(key); }));
        ASSERT_EQ(refusal_of(*worker, key), "");
        EXPECT_NE(refusal_of(*worker, key).find("there is no key with handle"), std::string::npos);
      }
      ASSERT_TRUE(eventually([&] { return job.server->drop_store(0); }));
      EXPECT_EQ(job.server->counters().keys, 0u);
      EXPECT_EQ(job.server->counters().value_bytes, 0u);
    }
  }
}

TEST(ReleasedKey, StaysWhileAnOperationWaitsForItsPlan) {
  Job job({0}, true);
  const int key = job.workers[0]->declare("not agreed", 10, DType::kFloat32);
  std::vector<float> first(10, 1), landing(10);
  job.workers[0]->init(key, first.data(), landing.data(), 0, [](const Error*, bool) {});
  EXPECT_NE(refusal_of(*job.workers[0], key).find("has operations under way"), std::string::npos);
}

TEST(ReleasedKey, OfALeaderStaysWhileANeighboursPushIsThere) {
  Job job({0, 0}, true);
  const int key = job.declare(1000);
  std::vector<float> first(1000, 1), ones(1000, 1);
  std::vector<std::vector<float>> landings(2, first);
  ASSERT_EQ(job.init(key, first, landings), "");
  job.workers[1]->push(key, ones.data(), landings[1].data(), 0, {}, job.pending.done());
  ASSERT_TRUE(eventually([&] { return job.workers[0]->counters().buffer_bytes > 0; }));
  EXPECT_FALSE(job.workers[1]->is_idle(key));
  EXPECT_NE(refusal_of(*job.workers[1], key).find("has operations under way"), std::string::npos);
  job.workers[0]->push(key, ones.data(), landings[0].data(), 0, {}, job.pending.done());
  ASSERT_EQ(job.pending.wait_for(2), "");
  for (auto& worker : job.workers) {
    EXPECT_TRUE(eventually([&] { return worker->is_idle(key); }));
    EXPECT_EQ(refusal_of(*worker, key), "");
  }
}

}  // namespace
}  // namespace p3
