// Keys whose values come back encoded, on their server: what leaves after a round, and what those get who ask.
#include <cstring>
#include <limits>

#include "p3/codec.h"
#include "server/server_job.h"

namespace p3 {
namespace {

constexpr size_t kElements = 40;
constexpr float kInfinity = std::numeric_limits<float>::infinity();

struct ChangesJob : Job {
  explicit ChangesJob(int num_workers, bool updates = true) : Job(num_workers) {
    axes.value_codec = Encoding::kEightBit;
    if (updates) server.set_optimizer(0, {"sgd", {{"momentum", 0.0}}});
    define(1, kElements);
    exact = published = std::vector<float>(kElements, 1);
    initialise(1, published);
  }

  // Plain SGD with a learning rate of 1.
  void push_to_all(uint64_t round, const std::vector<float>& gradient) {
    for (size_t worker = 0; worker < workers.size(); ++worker)
      push(static_cast<int>(worker), 1, round, gradient, 0, 0, /*lr=*/1);
    for (size_t i = 0; i < kElements; ++i) exact[i] -= gradient[i] * float(workers.size());
  }

  // What every worker is sent, which it adds to what it has.
  void expect_change(uint64_t round) {
    std::vector<float> change(kElements), left_out(kElements);
    for (size_t i = 0; i < kElements; ++i) change[i] = exact[i] - published[i];
    std::vector<char> payload(axes.value_codec.bytes(kElements));
    encode(axes.value_codec, change.data(), left_out.data(), payload.data(), kElements);
    add_encoded_to_sum(axes.value_codec, published.data(), payload.data(), kElements);
    for (RawPeer& worker : workers) {
      const Header got = worker.must_receive();
      EXPECT_EQ(got.kind, FrameKind::kChange);
      EXPECT_EQ(static_cast<Encoding>(got.encoding), Encoding::kEightBit);
      EXPECT_EQ(got.round, round);
      EXPECT_EQ(worker.payload, payload);
    }
  }

  void expect_value(int worker, const std::vector<float>& value) {
    Header got;
    EXPECT_EQ(receive_value(worker, &got), value);
    EXPECT_EQ(static_cast<Encoding>(got.encoding), Encoding::kPlain);
  }

  std::vector<float> fetch(uint8_t part, uint64_t round) {
    Header header = Job::header(FrameKind::kFetch, 1, 0, round, 0);
    header.part = part;
    workers[0].send(header);
    EXPECT_EQ(workers[0].must_receive().kind, FrameKind::kPart);
    std::vector<float> content(kElements);
    std::memcpy(content.data(), workers[0].payload.data(), kElements * sizeof(float));
    return content;
  }

  std::vector<float> gradient(uint64_t round) const {
    std::vector<float> made(kElements);
    for (size_t i = 0; i < kElements; ++i) made[i] = float((i * 7919 + round * 104729) % 2003) / 999 - 1;
    return made;
  }

  std::vector<float> exact, published;
};

TEST(ServerChanges, GoToAllWorkersAndKeepTheExactValue) {
  ChangesJob job(2);
  for (uint64_t round = 1; round <= 4; ++round) {
    job.push_to_all(round, job.gradient(round));
    job.expect_change(round);
    EXPECT_NE(job.published, job.exact);
    EXPECT_EQ(job.fetch(kMaster, round), job.exact);
  }
}

TEST(ServerChanges, WhoAsksForTheValueGetsWhatAllHave) {
  ChangesJob job(2);
  job.push_to_all(1, job.gradient(1));
  job.expect_change(1);
  const std::vector<float> other(kElements, 3);
  for (const std::vector<float>& value : {other, job.gradient(5)}) {
    job.init(0, 1, 1, value);
    job.init(1, 1, 1);
    for (int worker : {0, 1}) job.expect_value(worker, value);
    EXPECT_EQ(job.fetch(kMaster, 1), value);
  }
}

TEST(ServerChanges, OfARoundThatAllSkipThereIsNone) {
  ChangesJob job(2);
  job.push_to_all(1, job.gradient(1));
  job.expect_change(1);
  for (int worker : {0, 1}) job.skip(worker, 1, 2);
  for (int worker : {0, 1}) {
    Header got;
    EXPECT_TRUE(job.receive_value(worker, &got).empty());
    EXPECT_EQ(static_cast<Encoding>(got.encoding), Encoding::kAbsent);
  }
  EXPECT_EQ(job.fetch(kMaster, 2), job.exact);
  job.push_to_all(3, job.gradient(3));
  job.expect_change(3);
}

TEST(ServerChanges, ThatWouldNotBeFiniteAreTheWholeExactValue) {
  ChangesJob job(2);
  std::vector<float> gradient = job.gradient(1);
  gradient[7] = kInfinity;
  job.push_to_all(1, gradient);
  EXPECT_EQ(job.exact[7], -kInfinity);
  for (int worker : {0, 1}) job.expect_value(worker, job.exact);
  job.published = job.exact;
  job.init(0, 1, 1, std::vector<float>(kElements, 2));
  job.init(1, 1, 1);
  job.exact = job.published = std::vector<float>(kElements, 2);
  for (int worker : {0, 1}) job.expect_value(worker, job.published);
  job.push_to_all(2, job.gradient(2));
  job.expect_change(2);
}

TEST(ServerChanges, WithoutAnOptimizerSumsAreEncodedWithWhatTheLastOnesLeftOut) {
  ChangesJob job(2, /*updates=*/false);
  std::vector<float> left_out(kElements), sum(kElements);
  for (uint64_t round = 1; round <= 4; ++round) {
    const std::vector<float> gradient = job.gradient(round);
    for (int worker : {0, 1}) job.push(worker, 1, round, gradient);
    for (size_t i = 0; i < kElements; ++i) sum[i] = gradient[i] + gradient[i];
    std::vector<char> payload(job.axes.value_codec.bytes(kElements));
    encode(job.axes.value_codec, sum.data(), left_out.data(), payload.data(), kElements);
    for (RawPeer& worker : job.workers) {
      const Header got = worker.must_receive();
      EXPECT_EQ(got.kind, FrameKind::kValue);
      EXPECT_EQ(static_cast<Encoding>(got.encoding), Encoding::kEightBit);
      EXPECT_EQ(worker.payload, payload);
    }
    EXPECT_EQ(job.fetch(kLeftOut, round), left_out);
  }
}

TEST(ServerChanges, AreRefusedWhereThereCanBeNone) {
  Job job(1);
  KeyPlan plan;
  plan.elements = 300;
  plan.value_codec = Encoding::kEightBit;
  const auto refused = [&](const KeyPlan& one) { EXPECT_THROW(job.server.define(one, "w", 0), Error); };
  KeyPlan stale = plan, halves = plan, rows = plan, steps = plan, of_steps = plan;
  stale.staleness = 1;
  halves.dtype = DType::kFloat16;
  rows.row_elements = rows.partitions = 3;
  steps.codec = {Encoding::kTopK, {0.1, 0, 0, 1}};
  steps.update = Update::kSteps;
  of_steps.value_codec = steps.codec;
  for (const KeyPlan& one : {stale, halves, rows, steps, of_steps}) refused(one);
  plan.value_codec = {Encoding::kTwoBit, -1.0};
  refused(plan);
}

}  // namespace
}  // namespace p3
