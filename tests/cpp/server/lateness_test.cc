// Who keeps others waiting, and for how long: as the server sees it.
#include "p3/lateness.h"

#include <gtest/gtest.h>

#include "p3/server.h"
#include "server/server_job.h"

namespace p3 {
namespace {

std::vector<Late> someone_late(Job& job, size_t workers) {
  std::vector<Late> late;
  EXPECT_TRUE(eventually([&] { return (late = job.server.late()).size() == workers; }));
  return late;
}

TEST(Lateness, AWorkerWhosePushIsMissingIsNamedUntilItComes) {
  Job job(3, looking_often());
  job.define(1, 2);
  job.initialise(1, {0, 0});
  job.push(0, 1, 1, {1, 1});
  job.push(2, 1, 1, {1, 1});
  const std::vector<Late> late = someone_late(job, 1);
  ASSERT_EQ(late.size(), 1u);
  EXPECT_EQ(late[0].worker, 1);
  EXPECT_EQ(late[0].key, "key1");
  EXPECT_EQ(late[0].round, 1u);
  EXPECT_EQ(late[0].waiting, 2);
  EXPECT_GT(late[0].waited_s, 0);
  job.push(1, 1, 1, {1, 1});
  someone_late(job, 0);
  const std::vector<double> means = job.server.mean_lateness_s();
  EXPECT_EQ(means.size(), 3u);
}

TEST(Lateness, WorkersThatWaitForEachOthersKeysAreBothNamed) {
  Job job(2, looking_often());
  for (uint32_t key : {1, 2}) {
    job.define(key, 2);
    job.initialise(key, {0, 0});
  }
  job.push(0, 1, 1, {1, 1});
  job.push(1, 2, 1, {1, 1});
  const std::vector<Late> late = someone_late(job, 2);
  ASSERT_EQ(late.size(), 2u);
  EXPECT_EQ(late[0].key, "key2");
  EXPECT_EQ(late[1].key, "key1");
}

TEST(Lateness, OfARoundIsItsWorstSliceAndTheNewestRoundsCountMost) {
  Lateness lateness;
  lateness.note(1, 0.1);
  lateness.note(1, 8.0);
  lateness.note(1, 0.2);
  EXPECT_EQ(lateness.mean_s(), 0);  // the round is not over
  lateness.note(2, 0);
  EXPECT_DOUBLE_EQ(lateness.mean_s(), 1);
  for (uint64_t round = 3; round < 100; ++round) lateness.note(round, 2.0);
  EXPECT_NEAR(lateness.mean_s(), 2, 0.01);
}

}  // namespace
}  // namespace p3
