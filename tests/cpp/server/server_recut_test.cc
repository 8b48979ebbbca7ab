// Keys that are cut anew while all workers rest, on their server.
#include "server/server_job.h"

namespace p3 {
namespace {

using Values = std::vector<float>;

KeyPlan cut(uint32_t wire_key, uint64_t elements, uint32_t slice_elements) {
  KeyPlan plan;
  plan.wire_key = wire_key;
  plan.elements = elements;
  plan.slice_elements = slice_elements;
  return plan;
}

struct RecutJob : Job {
  explicit RecutJob(int num_workers = 2, ServerOptions with = options()) : Job(num_workers, std::move(with)) {
    define(1, 4);
    initialise(1, {1, 2, 3, 4});
    for (int worker = 0; worker < num_workers; ++worker) push(worker, 1, 1, {1, 1, 1, 1});
    for (int worker = 0; worker < num_workers; ++worker) receive_value(worker);
  }

  void expect_round_of_two_slices(uint64_t round) {
    for (uint32_t slice : {0, 1})
      for (int worker : {0, 1}) push(worker, 2, round, {float(worker), float(round)}, slice);
    for (int worker : {0, 1})
      for (int slices = 0; slices < 2; ++slices) {
        Header got;
        EXPECT_EQ(receive_value(worker, &got), (Values{1, 2 * float(round)}));
        EXPECT_EQ(got.round, round);
        EXPECT_EQ(got.key, 2u);
      }
  }
};

TEST(Recut, RoundsGoOnWithTheNextOneAndNothingIsLeftOfTheFormerCut) {
  RecutJob job;
  const uint64_t before = job.server.counters().value_bytes;
  job.server.recut(cut(2, 4, 2), 1, 1);
  EXPECT_EQ(job.server.counters().keys, 1u);
  // What it has sent may be borrowed for a moment.
  EXPECT_TRUE(eventually([&] { return job.server.counters().value_bytes == before; }));
  job.expect_round_of_two_slices(2);
  job.expect_round_of_two_slices(3);
  EXPECT_FALSE(job.server.error());
}

TEST(Recut, AFrameOfTheFormerCutIsRefused) {
  RecutJob job;
  job.server.recut(cut(2, 4, 2), 1, 1);
  job.push(0, 1, 2, {1, 1, 1, 1});
  EXPECT_NE(failure_of(job.server).find("of no key"), std::string::npos);
}

TEST(Recut, APushOfAnotherRoundIsRefused) {
  RecutJob job;
  job.server.recut(cut(2, 4, 2), 1, 1);
  job.push(0, 2, 1, {1, 1});
  EXPECT_NE(failure_of(job.server).find("out of turn"), std::string::npos);
}

TEST(Recut, ANewFirstValueMayFollow) {
  RecutJob job;
  job.server.recut(cut(2, 4, 2), 1, 1);
  for (uint32_t slice : {0, 1}) {
    job.workers[0].send(Job::header(FrameKind::kInit, 2, slice, 1, 2), Values{5, 6}.data());
    job.workers[1].send(Job::header(FrameKind::kInit, 2, slice, 1, 0));
    for (int worker : {0, 1}) EXPECT_EQ(job.receive_value(worker), (Values{5, 6}));
  }
  job.expect_round_of_two_slices(2);
}

TEST(Recut, WhoHasDepartedIsNotWaitedFor) {
  ServerOptions with = options();
  with.outlives_workers = true;
  with.local_aggregation = false;
  RecutJob job(2, std::move(with));
  job.server.dismiss_worker(1);
  job.server.recut(cut(2, 4, 2), 1, 1);
  for (uint32_t slice : {0, 1}) {
    job.push(0, 2, 2, {7, 8}, slice);
    EXPECT_EQ(job.receive_value(0), (Values{7, 8}));
  }
}

TEST(Recut, IsRefusedUnlessTheKeyRestsAndItsServersOnlySum) {
  RecutJob job;
  const auto refused = [&](const KeyPlan& plan, uint32_t predecessor, uint64_t round, const std::string& why) {
    try {
      job.server.recut(plan, predecessor, round);
      ADD_FAILURE() << "not refused: " << why;
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kUsage);
      EXPECT_NE(std::string(error.what()).find(why), std::string::npos) << error.what();
    }
  };
  refused(cut(2, 4, 2), 7, 1, "there is no key 7");
  refused(cut(2, 4, 2), 1, 2, "a round of it is under way");
  refused(cut(2, 5, 2), 1, 1, "its servers keep more of it than sums");
  KeyPlan other = cut(2, 4, 2);
  other.reduction = Reduction::kMean;
  refused(other, 1, 1, "its servers keep more of it than sums");
  job.server.set_optimizer(0, {"sgd", {{"momentum", 0.0}}});
  refused(cut(2, 4, 2), 1, 1, "its servers keep more of it than sums");
}

}  // namespace
}  // namespace p3
