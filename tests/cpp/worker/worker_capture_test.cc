// What a worker asks of its servers for a snapshot, when, and what it keeps itself. Its server is played by the test.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "worker/worker_job.h"

namespace p3 {
namespace {

void answer_capture(RawPeer& server, Header request) {
  request.kind = FrameKind::kPart;
  server.send(request);
}

TEST(WorkerCapture, AsksForEverySliceBetweenTwoRoundsAndIsDoneWhenAllAreCopied) {
  OneServer job(unix_pair());
  const int key = job.key(1, kSlice + 1);
  std::vector<float>&gradient = job.array(kSlice + 1, 1), &landing = job.array(kSlice + 1);
  job.worker.push(key, gradient.data(), landing.data(), 0, {}, job.results.expect(1));
  job.worker.capture(key, 4711, nullptr, job.results.expect(2));
  job.worker.push(key, gradient.data(), landing.data(), 0, {}, job.results.expect(3));
  for (int i = 0; i < 2; ++i) {
    const Header push = job.server.must_receive();
    EXPECT_EQ(push.kind, FrameKind::kPush);
    EXPECT_FALSE(job.worker.captured_plan(key).has_value());
    job.answer(push, std::vector<float>(push.slice == 0 ? kSlice : 1, 2));
  }
  std::vector<Header> requests;
  for (uint32_t slice : {0u, 1u}) {
    const Header& request = requests.emplace_back(job.server.must_receive());
    EXPECT_EQ(request.kind, FrameKind::kCapture);
    EXPECT_EQ(request.slice, slice);
    EXPECT_EQ(request.round, 1u);
    EXPECT_EQ(snapshot_of(request), 4711u);
    EXPECT_EQ(request.encoding, static_cast<uint8_t>(Encoding::kAbsent));
    EXPECT_EQ(request.payload_bytes, 0u);
  }
  EXPECT_FALSE(job.server.readable(0));  // the next round waits
  ASSERT_TRUE(job.results.wait_for(1));
  answer_capture(job.server, requests[1]);
  EXPECT_EQ(job.results.finished(), std::vector<int>{1});
  answer_capture(job.server, requests[0]);
  ASSERT_TRUE(job.results.wait_for(2));
  EXPECT_EQ(job.results.finished(), (std::vector<int>{1, 2}));
  EXPECT_EQ(job.worker.captured_plan(key)->wire_key, 1u);
  const Header next = job.server.must_receive();
  EXPECT_EQ(next.kind, FrameKind::kPush);
  EXPECT_EQ(next.round, 2u);
}

TEST(WorkerCapture, OfAKeyOfRowsAsksForEveryPartition) {
  OneServer job(unix_pair());
  KeyPlan plan = plan_of(3, 20);
  plan.row_elements = 2;
  plan.partitions = 4;
  const int key = job.worker.declare_rows("emb", 10, 2, DType::kFloat32);
  job.worker.capture(key, 0, nullptr, job.results.expect(1));
  job.worker.agree(key, plan);
  for (uint32_t partition = 0; partition < plan.partitions; ++partition) {
    const Header request = job.server.must_receive();
    EXPECT_EQ(request.kind, FrameKind::kCapture);
    EXPECT_EQ(request.slice, partition);
    answer_capture(job.server, request);
  }
  ASSERT_TRUE(job.results.wait_for(1));
  EXPECT_EQ(job.results.text(0), "");
  EXPECT_EQ(job.worker.captured_plan(key)->partitions, 4u);
}

// Its servers are played by the test; nothing of a capture reaches them.
TEST(WorkerCapture, OnOtherRanksIsDoneInItsTurnWithoutAWord) {
  auto [ours, its] = unix_pair();
  std::vector<float> gradient(2, 1), landing(2);
  Results results;
  RawPeer server(ours);
  Worker worker(1, 1, options());
  worker.add_server(0, stream_of(its), "server 0 (there)");
  worker.start();
  const int key = worker.declare("key1", 2, DType::kFloat32);
  worker.agree(key, plan_of(1, 2));
  worker.capture(key, 0, nullptr, results.expect(0));
  ASSERT_TRUE(results.wait_for(1));
  worker.push(key, gradient.data(), landing.data(), 0, {}, results.expect(1));
  for (int id : {2, 3}) worker.capture(key, 0, nullptr, results.expect(id));
  worker.push(key, gradient.data(), landing.data(), 0, {}, results.expect(4));
  Header push = server.must_receive();
  EXPECT_EQ(push.round, 1u);
  EXPECT_EQ(results.finished(), std::vector<int>{0});
  push.kind = FrameKind::kValue;
  server.send(push, gradient.data());
  ASSERT_TRUE(results.wait_for(4));
  std::vector<int> finished = results.finished();
  std::sort(finished.begin(), finished.end());  // threads of the core tell of the push and of what is done at once
  EXPECT_EQ(finished, (std::vector<int>{0, 1, 2, 3}));
  push = server.must_receive();
  EXPECT_EQ(push.kind, FrameKind::kPush);
  EXPECT_EQ(push.round, 2u);
}

const Compression kTwoBitHalf{Encoding::kTwoBit, 0.5f};

TEST(WorkerCapture, GivesTheResidualBetweenTheRounds) {
  OneServer job(unix_pair());
  const int key = job.key(1, 3, kTwoBitHalf), plain = job.key(2, 3);
  EXPECT_TRUE(job.worker.keeps_residual(key));
  EXPECT_FALSE(job.worker.keeps_residual(plain));
  std::vector<float>&gradient = job.array(3), &landing = job.array(3), &residual = job.array(3, 9);
  gradient = {0.75f, -0.25f, 0};
  job.worker.push(key, gradient.data(), landing.data(), 0, {}, job.results.expect(1));
  job.worker.capture(key, 0, residual.data(), job.results.expect(2));
  job.worker.push(key, gradient.data(), landing.data(), 0, {}, job.results.expect(3));
  job.answer(job.server.must_receive(), {1, 1, 1});
  const Header request = job.server.must_receive();
  EXPECT_EQ(request.kind, FrameKind::kCapture);
  answer_capture(job.server, request);
  ASSERT_TRUE(job.results.wait_for(2));
  EXPECT_EQ(residual, (std::vector<float>{0.25f, -0.25f, 0}));
}

TEST(WorkerCapture, GoesOnWithARestoredResidual) {
  OneServer job(unix_pair());
  const int key = job.key(1, 3, kTwoBitHalf), plain = job.key(2, 3);
  const std::vector<float> residual = {0.25f, -0.25f, 0};
  job.worker.restore_residual(key, residual.data());
  std::vector<float>&gradient = job.array(3, 0.25f), &landing = job.array(3);
  job.worker.push(key, gradient.data(), landing.data(), 0, {}, job.results.expect(1));
  job.server.must_receive();
  EXPECT_EQ(static_cast<uint8_t>(job.server.payload[0]), 0b11000000);  // 0.5, 0, 0.25
  EXPECT_THROW(job.worker.restore_residual(key, residual.data()), Error);
  EXPECT_THROW(job.worker.restore_residual(plain, residual.data()), Error);
  EXPECT_THROW(job.worker.capture(plain, 0, landing.data(), job.results.expect(2)), Error);
}

TEST(WorkerCapture, RefusesAnswersThatDoNotFit) {
  struct Case {
    const char* what;
    void (*change)(Header&);
  };
  const Case cases[] = {
      {"unexpected", [](Header& h) { h.kind = FrameKind::kValue; }},
      {"unexpected", [](Header& h) { h.part = 1; }},
      {"out of turn", [](Header& h) { h.round = 1; }},
      {"misplaced", [](Header& h) { h.slice = 1; }},
      {"wrongly sized", [](Header& h) { h.dtype = 1; }},
      {"in another encoding", [](Header& h) { h.encoding = 0; }},
  };
  for (const Case& each : cases) {
    OneServer job(unix_pair());
    job.worker.capture(job.key(1, 1), 0, nullptr, job.results.expect(1));
    Header answer = job.server.must_receive();
    answer.kind = FrameKind::kPart;
    each.change(answer);
    job.server.send(answer);
    ASSERT_TRUE(job.results.wait_for(1));
    EXPECT_NE(job.results.text(0).find(each.what), std::string::npos) << job.results.text(0);
  }
}

TEST(WorkerCapture, EndsWithTheJobsError) {
  OneServer job(unix_pair());
  job.worker.capture(job.key(1, 1), 0, nullptr, job.results.expect(1));
  job.server.must_receive();
  job.server.close();
  ASSERT_TRUE(job.results.wait_for(1));
  EXPECT_NE(job.results.text(0), "");
}

}  // namespace
}  // namespace p3
