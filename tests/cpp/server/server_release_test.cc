// A store that all workers have done with: its keys and all that is kept of them go, and no others.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "server/rows_job.h"
#include "server/server_job.h"

namespace p3 {
namespace {

bool is_dropped(Server& server, int store) {
  return eventually([&] { return server.drop_store(store); });
}

KeyPlan plan_of(uint32_t wire_key, uint64_t elements, uint64_t staleness = 0) {
  KeyPlan plan;
  plan.wire_key = wire_key;
  plan.elements = elements;
  plan.staleness = staleness;
  return plan;
}

class ReleasedStore : public testing::TestWithParam<int> {};  // summing threads

TEST_P(ReleasedStore, LeavesNothingBehindAndItsNumberIsFree) {
  Job job(2, options(SumOrder::kRank, GetParam()));
  const OptimizerSpec momentum{"sgd", {{"momentum", 0.5}}};
  job.server.define(plan_of(9, 5), "another store's", 1);
  const uint64_t before = job.server.counters().value_bytes;
  for (uint32_t life = 0; life < 3; ++life) {
    const uint32_t key = 1 + 2 * life, late = key + 1;
    job.server.set_optimizer(0, momentum);  // refused for a store that has one
    job.server.define(plan_of(key, 1000), "w", 0);
    job.server.define(plan_of(late, 1000, /*staleness=*/1), "apart", 0);
    const std::vector<float> value(1000, 1), gradient(1000, 0.5f);
    for (uint32_t one : {key, late}) {
      job.initialise(one, value);
      for (int worker : {0, 1}) job.push(worker, one, 1, gradient, 0, 0, 1);
      for (int worker : {0, 1}) job.receive_value(worker);
    }
    EXPECT_EQ(job.server.counters().keys, 3u);
    EXPECT_GE(job.server.counters().value_bytes, before + 2 * 2 * 4000);  // two values and momenta
    ASSERT_TRUE(is_dropped(job.server, 0));
    EXPECT_EQ(job.server.counters().keys, 1u);
    EXPECT_EQ(job.server.counters().value_bytes, before);
  }
  EXPECT_FALSE(job.server.error());
}

TEST_P(ReleasedStore, StaysAsLongAsARoundIsIncompleteOrAFrameIsUnderWay) {
  Job job(2, options(SumOrder::kRank, GetParam()), 4096);
  constexpr uint32_t kLarge = 4 * kSlice;
  job.define(1, kLarge);
  const std::vector<float> ones(kSlice, 1);
  for (uint32_t slice = 0; slice < 4; ++slice) job.initialise(1, ones, slice);
  job.push(0, 1, 1, ones);
  ASSERT_TRUE(job.has_received(4 * 2 + 1));
  for (int i = 0; i < 50; ++i) ASSERT_FALSE(job.server.drop_store(0));
  EXPECT_GT(job.server.counters().value_bytes, 0u);
}

TEST(ReleasedStoreOfOneThread, GoesOnlyWhenASlowWorkerHasReadWhatItSent) {
  Job job(1, options(), 4096);  // no socket takes a slice at once
  job.define(1, kSlice);
  const std::vector<float> ones(kSlice, 1);
  job.initialise(1, ones);
  job.push(0, 1, 1, ones);
  ASSERT_TRUE(job.has_updated(1));  // and its value is on its way, from where it lies
  EXPECT_FALSE(job.server.drop_store(0));
  EXPECT_EQ(job.server.counters().keys, 0u);
  EXPECT_EQ(job.receive_value(0), ones);
  EXPECT_TRUE(is_dropped(job.server, 0));
  EXPECT_EQ(job.server.counters().value_bytes, 0u);
}

TEST(ReleasedStoreOfOneThread, TakesItsRowsAlong) {
  for (uint64_t staleness : {0, 2}) {
    RowsJob job(2, true, options(), staleness);
    job.fill(3);
    EXPECT_GT(job.server.counters().value_bytes, 0u);
    ASSERT_TRUE(is_dropped(job.server, 0));
    EXPECT_EQ(job.server.counters().value_bytes, 0u);
    EXPECT_FALSE(job.server.error());
  }
}

TEST(ReleasedStoreOfOneThread, HasNoFramesAnyMore) {
  Job job(2);
  job.define(1, 3);
  job.initialise(1, {1, 2, 3});
  ASSERT_TRUE(is_dropped(job.server, 0));
  job.push(0, 1, 1, {1, 1, 1});
  EXPECT_NE(job.failure().find("of no key"), std::string::npos) << job.failure();
}

TEST(ReleasedStoreOfOneThread, ThatWasNeverThereIsFree) {
  Job job(1);
  EXPECT_TRUE(job.server.drop_store(7));
}

INSTANTIATE_TEST_SUITE_P(Threads, ReleasedStore, testing::Values(0, 2));

}  // namespace
}  // namespace p3
