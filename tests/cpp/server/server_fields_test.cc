// Rounds that go by other values of the optimizer's fields than were announced.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "p3/server.h"
#include "server/server_job.h"

namespace p3 {
namespace {

const OptimizerSpec kMomentum{"torch_sgd", {{"momentum", 0.5}}};

// In the order of the rule's fields: momentum, dampening, nesterov, maximize, multi_precision.
FieldValues with_momentum(double momentum) { return {momentum, 0, 0, 0, 0}; }

struct FieldsJob : Job {
  using Job::Job;

  // From here on, of what this worker sends.
  void tell(int worker, const FieldValues& values) {
    Header header;
    header.kind = FrameKind::kFields;
    header.payload_bytes = static_cast<uint32_t>(values.size() * sizeof(double));
    workers[static_cast<size_t>(worker)].send(header, values.data());
  }
  float round_of_both(uint64_t round, float gradient) {
    for (int worker : {0, 1}) push(worker, 1, round, {gradient / 2}, 0, 0, 1);
    receive_value(0);
    return receive_value(1)[0];
  }
};

class ServerFields : public testing::TestWithParam<int> {
 protected:
  static ServerOptions with() { return options(SumOrder::kRank, GetParam()); }
};

TEST_P(ServerFields, HoldForThePushesBehindThemOnTheSameConnection) {
  FieldsJob job(2, with());
  job.server.set_optimizer(0, kMomentum);
  job.define(1, 1);
  job.initialise(1, {0});
  EXPECT_EQ(job.round_of_both(1, 8), -8);  // velocity 8
  for (int worker : {0, 1}) job.tell(worker, with_momentum(0.25));
  EXPECT_EQ(job.round_of_both(2, 0), -10);  // velocity 2
  EXPECT_EQ(job.round_of_both(3, 0), -10.5);
  for (int worker : {0, 1}) job.tell(worker, with_momentum(0));  // the velocity stays
  EXPECT_EQ(job.round_of_both(4, 4), -14.5);
  for (int worker : {0, 1}) job.tell(worker, {});  // as announced
  EXPECT_EQ(job.round_of_both(5, 0), -14.75);
}

TEST_P(ServerFields, MustBeTheSameOnAllWorkersAndAreNamedWhereTheyAreNot) {
  for (const FieldValues& others : {FieldValues{}, with_momentum(0.75)}) {
    FieldsJob job(2, with());
    job.server.set_optimizer(0, kMomentum);
    job.define(1, 1);
    job.initialise(1, {0});
    job.tell(0, with_momentum(0.25));
    if (!others.empty()) job.tell(1, others);
    job.push(0, 1, 1, {1});
    ASSERT_TRUE(job.has_received(3));
    job.push(1, 1, 1, {1});
    const std::string text = job.failure();
    EXPECT_NE(text.find("rescale_grad 1, momentum 0.25)"), std::string::npos) << text;
    EXPECT_NE(text.find(others.empty() ? "rescale_grad 1, momentum 0.5)" : "rescale_grad 1, momentum 0.75)"),
              std::string::npos)
        << text;
    EXPECT_NE(text.find("disagree in round 1 of key 'key1'"), std::string::npos) << text;
  }
}

TEST_P(ServerFields, AreRefusedWhereTheOptimizerCannotHaveThem) {
  for (const auto& [values, problem] : std::vector<std::pair<FieldValues, std::string>>{
           {{-1, 0, 0, 0, 0},
            "key 'key1': optimizer torch_sgd: momentum is -1; it must be a finite number of at least 0"},
           {{0.5}, "key 'key1': optimizer torch_sgd: 1 values for its 5 fields"}}) {
    FieldsJob job(1, with());
    job.server.set_optimizer(0, kMomentum);
    job.define(1, 1);
    job.initialise(1, {0});
    job.tell(0, values);
    job.push(0, 1, 1, {1});
    EXPECT_NE(job.failure().find(problem), std::string::npos) << job.failure();
  }
}

INSTANTIATE_TEST_SUITE_P(Threads, ServerFields, testing::Values(0, 2));

}  // namespace
}  // namespace p3
