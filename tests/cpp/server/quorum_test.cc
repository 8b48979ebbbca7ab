// Keys with a quorum: rounds that close without who is late, and what becomes of that.
#include "server/discipline/quorum/quorum.h"

#include <gtest/gtest.h>

#include <chrono>
#include <string>
#include <vector>

#include "server/server_job.h"

namespace p3 {
namespace {

using Time = Quorum::Clock::time_point;
using std::chrono::seconds;

// "0 1*": workers 0 and 1 are answered, 1 without its push.
std::string answers_of(const Quorum::Settled& settled) {
  std::string made;
  for (const auto& [worker, is_in_value] : settled.answers)
    made += (made.empty() ? "" : " ") + std::to_string(worker) + (is_in_value ? "" : "*");
  return made;
}

TEST(Quorum, ARoundClosesWhenAllHavePushedOrAGraceBehindTheQuorum) {
  const Time now{};
  Quorum quorum(3, 2, seconds(5));
  EXPECT_FALSE(quorum.settle(now).closes);
  EXPECT_FALSE(quorum.push(0, now));
  EXPECT_FALSE(quorum.settle(now + seconds(100)).closes);
  EXPECT_FALSE(quorum.is_over_at());
  EXPECT_FALSE(quorum.push(1, now + seconds(200)));
  EXPECT_FALSE(quorum.settle(now + seconds(204)).closes);
  EXPECT_EQ(quorum.is_over_at(), now + seconds(205));
  EXPECT_TRUE(Quorum(quorum).settle(now + seconds(205)).closes);
  EXPECT_FALSE(quorum.push(2, now + seconds(203)));
  EXPECT_EQ(answers_of(quorum.settle(now + seconds(203))), "0 1 2");
}

TEST(Quorum, WhoIsLateIsAnsweredAtOnceAndCountsOnceInTheOpenRound) {
  const Time now{};
  Quorum quorum(3, 2, seconds(0));
  for (int worker : {0, 1}) EXPECT_FALSE(quorum.push(worker, now));
  EXPECT_EQ(answers_of(quorum.settle(now)), "0 1");
  EXPECT_TRUE(quorum.push(2, now));
  EXPECT_EQ(answers_of(quorum.settle(now)), "2*");
  EXPECT_FALSE(quorum.push(2, now));
  EXPECT_EQ(answers_of(quorum.settle(now)), "");  // one worker, whatever it has pushed
  EXPECT_FALSE(quorum.push(0, now));
  EXPECT_EQ(answers_of(quorum.settle(now)), "0 2");
}

TEST(Quorum, WhoIsLateAndClosesARoundHasThatValue) {
  Quorum quorum(3, 1, seconds(0));
  EXPECT_FALSE(quorum.push(0, Time{}));
  EXPECT_EQ(answers_of(quorum.settle(Time{})), "0");
  EXPECT_TRUE(quorum.push(1, Time{}));
  EXPECT_EQ(answers_of(quorum.settle(Time{})), "1");
}

TEST(Quorum, NobodyWaitsForWhoStandsAsideAndBehindAMeetingAllAreLevel) {
  const Time now{};
  Quorum quorum(3, 3, seconds(1000));
  quorum.stand_aside(2);
  for (int worker : {0, 1}) {
    EXPECT_FALSE(quorum.settle(now).closes);
    EXPECT_FALSE(quorum.push(worker, now));
  }
  EXPECT_EQ(answers_of(quorum.settle(now)), "0 1");
  for (int worker : {0, 1}) {
    EXPECT_FALSE(quorum.settle(now).have_met);
    quorum.stand_aside(worker);
  }
  const Quorum::Settled met = quorum.settle(now);
  EXPECT_TRUE(met.have_met);
  EXPECT_EQ(answers_of(met), "0 1 2");
  EXPECT_FALSE(quorum.settle(now).have_met);
  EXPECT_FALSE(quorum.push(2, now));  // it has not pushed before, and is not late all the same
  EXPECT_FALSE(quorum.settle(now).closes);
}

// With SGD and a rate of 1 the value is the sum of the rounds' means, its sign apart.
struct QuorumJob : Job {
  QuorumJob(int num_workers, uint32_t quorum, double grace_s, int threads = 0, bool outlives_workers = false)
      : Job(num_workers, with(threads, outlives_workers)) {
    server.set_optimizer(0, {"sgd", {}});
    KeyPlan plan;
    plan.wire_key = 1;
    plan.elements = 1;
    plan.staleness = kUnboundedStaleness;
    plan.quorum = quorum;
    plan.grace_s = grace_s;
    server.define(plan, "key1", 0);
    initialise(1, {0});
  }

  static ServerOptions with(int threads, bool outlives_workers) {
    ServerOptions made = options(SumOrder::kRank, threads);
    made.outlives_workers = outlives_workers;
    made.local_aggregation = made.local_aggregation && !outlives_workers;
    return made;
  }

  void give(int worker, uint64_t round, float difference, double weight = 1) {
    Header made = header(FrameKind::kPush, 1, 0, round, 1);
    made.scalars.lr = 1;
    made.scalars.rescale = weight;
    const float sent = -difference * static_cast<float>(weight);
    workers[static_cast<size_t>(worker)].send(made, &sent);
  }

  // The answer to this worker's push of that round.
  float value(int worker, uint64_t round, bool is_late = false) {
    Header got;
    const std::vector<float> value = receive_value(worker, &got);
    EXPECT_EQ(got.round, round);
    EXPECT_EQ(least_clock(got), is_late ? round - 1 : round);
    return value.at(0);
  }
};

class QuorumSlices : public testing::TestWithParam<int> {};  // by threads that sum

TEST_P(QuorumSlices, GoOnWithoutAWorkerAndCountItLater) {
  QuorumJob job(3, 2, 0, GetParam());
  for (int worker : {0, 1}) job.give(worker, 1, 2);
  for (int worker : {0, 1}) EXPECT_EQ(job.value(worker, 1), 2);
  job.give(2, 1, 5, 2);
  EXPECT_EQ(job.value(2, 1, /*is_late=*/true), 2);  // at once
  job.give(1, 2, 8);
  EXPECT_EQ(job.value(1, 2), 8);  // 2 + (2 * 5 + 8) / 3
  job.give(0, 2, 1);
  EXPECT_EQ(job.value(0, 2, /*is_late=*/true), 8);
  for (int worker : {0, 1, 2}) job.skip(worker, 1, worker == 2 ? 2 : 3);
  for (int worker : {0, 1, 2}) EXPECT_EQ(job.value(worker, worker == 2 ? 2 : 3), 9);  // what had come closes a round
}

TEST_P(QuorumSlices, CloseWhenTheGraceIsOverThoughNothingComes) {
  QuorumJob job(2, 1, 0.05, GetParam());
  job.give(1, 1, 3);
  EXPECT_EQ(job.value(1, 1), 3);
}

TEST_P(QuorumSlices, WaitForAllWhoAreInTime) {
  QuorumJob job(3, 1, 1e6, GetParam());
  for (uint64_t round : {1, 2}) {
    for (int worker : {2, 0, 1}) job.give(worker, round, static_cast<float>(worker));
    for (int worker : {0, 1, 2}) EXPECT_EQ(job.value(worker, round), static_cast<float>(round));
  }
}

TEST_P(QuorumSlices, NeedNobodyWhoIsGone) {
  QuorumJob job(3, 2, 1e6, GetParam(), /*outlives_workers=*/true);
  job.give(2, 1, 9);
  job.give(0, 1, 3);
  ASSERT_TRUE(job.has_received(5));
  job.server.dismiss_worker(2);  // what it has sent counts
  job.give(1, 1, 0);
  for (int worker : {0, 1}) EXPECT_EQ(job.value(worker, 1), 4);
  for (uint64_t round : {2, 4}) {  // also behind a meeting
    for (int worker : {0, 1}) job.give(worker, round, 1);
    for (int worker : {0, 1}) EXPECT_EQ(job.value(worker, round), 4 + static_cast<float>(round) / 2);
    for (int worker : {0, 1}) job.skip(worker, 1, round + 1);
    for (int worker : {0, 1}) EXPECT_EQ(job.value(worker, round + 1), 4 + static_cast<float>(round) / 2);
  }
  job.skip(0, 1, 6);
  ASSERT_TRUE(job.has_received(5 + 1 + 8 + 1));
  job.server.dismiss_worker(1);  // the other one waits for it alone
  EXPECT_EQ(job.value(0, 6), 6);
  job.give(0, 7, 1);
  EXPECT_EQ(job.value(0, 7), 7);
}

INSTANTIATE_TEST_SUITE_P(Threads, QuorumSlices, testing::Values(0, 2));

}  // namespace
}  // namespace p3
