// Keys that are cut anew while their job rests, on their worker.
#include "worker/worker_job.h"

namespace p3 {
namespace {

using Values = std::vector<float>;

KeyPlan cut(uint32_t wire_key, uint64_t elements, uint32_t slice_elements, const Compression& codec = {}) {
  KeyPlan plan = plan_of(wire_key, elements);
  plan.slice_elements = slice_elements;
  plan.codec = codec;
  return plan;
}

struct RecutJob : OneServer {
  explicit RecutJob(const Compression& codec = {}) : OneServer(unix_pair()), handle(key(1, 4, codec)) {
    worker.init(handle, landing.data(), landing.data(), 0, results.expect(0));
    answer(server.must_receive(), landing);
    EXPECT_TRUE(results.wait_for(1));
  }

  int handle;
  Values landing = Values(4), gradient{1, 2, 3, 4};
};

TEST(Recut, TheNextRoundGoesByTheOtherCut) {
  RecutJob job;
  job.worker.recut(job.handle, cut(2, 4, 3));
  EXPECT_EQ(job.worker.round(job.handle), 0u);
  job.worker.push(job.handle, job.gradient.data(), job.landing.data(), 0, {}, job.results.expect(1));
  for (const Values& part : {Values{1, 2, 3}, Values{4}}) {
    const Header push = job.server.must_receive();
    EXPECT_EQ(push.key, 2u);
    EXPECT_EQ(push.round, 1u);
    EXPECT_EQ(push.payload_bytes, part.size() * sizeof(float));
    job.answer(push, Values(part.size(), 10 * part[0]));
  }
  ASSERT_TRUE(job.results.wait_for(2));
  EXPECT_EQ(job.landing, (Values{10, 10, 10, 40}));
  EXPECT_EQ(job.worker.round(job.handle), 1u);
}

TEST(Recut, WhatCompressionHasLeftOutStays) {
  const Compression codec = Encoding::kEightBit;
  RecutJob job(codec);
  const auto residual = [&] {
    Values kept(job.worker.residual_floats(job.handle));
    const size_t before = job.results.finished().size();
    job.worker.capture(job.handle, 1, kept.data(), job.results.expect(2));
    Header copied = job.server.must_receive();
    copied.kind = FrameKind::kPart;
    job.server.send(copied);
    EXPECT_TRUE(job.results.wait_for(before + 1));
    return kept;
  };
  job.worker.push(job.handle, job.gradient.data(), job.landing.data(), 0, {}, job.results.expect(1));
  job.answer(job.server.must_receive(), Values(4, 0));
  ASSERT_TRUE(job.results.wait_for(2));
  const Values before = residual();
  job.worker.recut(job.handle, cut(2, 4, 4, codec));
  EXPECT_EQ(residual(), before);
  EXPECT_NE(before, Values(4));
}

TEST(Recut, IsRefusedWhileAnOperationIsUnderWayOrForAnotherKey) {
  RecutJob job;
  const auto refused = [&](const KeyPlan& plan, const std::string& why) {
    try {
      job.worker.recut(job.handle, plan);
      ADD_FAILURE() << "not refused: " << why;
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find(why), std::string::npos) << error.what();
    }
  };
  refused(cut(2, 5, 2), "cannot be cut anew, or not so");
  KeyPlan elsewhere = cut(2, 4, 2);
  elsewhere.servers = {1};
  refused(elsewhere, "cannot be cut anew, or not so");
  job.worker.push(job.handle, job.gradient.data(), job.landing.data(), 0, {}, job.results.expect(1));
  refused(cut(2, 4, 2), "it has operations under way");
  job.answer(job.server.must_receive(), Values(4, 0));
  ASSERT_TRUE(job.results.wait_for(2));
  job.worker.recut(job.handle, cut(2, 4, 2));
}

}  // namespace
}  // namespace p3
