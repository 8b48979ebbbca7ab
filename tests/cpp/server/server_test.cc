#include "p3/server.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "server/server_job.h"

namespace p3 {
namespace {

TEST(Server, ALateWorkerStillGetsTheFirstValue) {
  Job job(2);
  job.define(1, 3);
  const std::vector<float> value = {1, 2, 3};
  // Worker 1 asks before the value is there, and before worker 0 has sent anything.
  job.workers[1].send(Job::header(FrameKind::kInit, 1, 0, 0, 0));
  job.workers[0].send(Job::header(FrameKind::kInit, 1, 0, 0, 3), value.data());
  EXPECT_EQ(job.receive_value(1), value);
  EXPECT_EQ(job.receive_value(0), value);
}

TEST(Server, GradientsAreAddedByRankWhateverTheirOrderOfArrival) {
  // (1e8 - 1e8) + 1 = 1, but 1e8 + (-1e8 + 1) = 0 in float32: the order shows in the sum.
  const std::vector<std::vector<float>> gradients = {{1e8f}, {-1e8f}, {1.0f}};
  for (std::vector<int> arrival : {std::vector<int>{0, 1, 2}, {2, 1, 0}, {1, 2, 0}, {2, 0, 1}}) {
    Job job(3);
    job.define(1, 1);
    job.initialise(1, {0});
    for (uint64_t i = 0; i < 3; ++i) {
      job.push(arrival[i], 1, 1, gradients[static_cast<size_t>(arrival[i])]);
      ASSERT_TRUE(job.has_received(3 + i + 1));  // three inits; else the order would be left to chance
    }
    for (int worker = 0; worker < 3; ++worker) EXPECT_EQ(job.receive_value(worker), std::vector<float>{1.0f});
  }
}

TEST(Server, EveryWorkerGetsTheUpdatedSliceAtOnceAndUnasked) {
  Job job(2);
  job.server.set_optimizer(0, {"sgd", {}});
  job.define(1, 2);
  job.initialise(1, {10, 20});
  job.push(0, 1, 1, {1, 2}, 0, 0, 0.5);
  job.push(1, 1, 1, {3, 4}, 0, 0, 0.5);
  for (int worker = 0; worker < 2; ++worker) {
    Header header;
    EXPECT_EQ(job.receive_value(worker, &header), (std::vector<float>{8, 17}));
    EXPECT_EQ(header.round, 1u);
  }
}

TEST(Server, AThrottledVanBroadcastsByPriorityAndTiesInSequence) {
  Job job(1, options(), 4096);
  for (uint32_t key : {0u, 1u, 2u}) job.define(key, 3 * kSlice);
  const std::vector<float> ones(kSlice, 1);
  for (uint32_t key : {0u, 1u, 2u})
    for (uint32_t slice = 0; slice < 3; ++slice) job.initialise(key, ones, slice);
  // The last layer's gradients come first; the worker reads nothing until the server has summed all of them.
  for (uint32_t key : {2u, 1u, 0u})
    for (uint32_t slice = 0; slice < 3; ++slice) job.push(0, key, 1, ones, slice, -static_cast<int32_t>(key));
  ASSERT_TRUE(eventually([&] { return job.server.counters().rounds == 9; }));
  std::vector<std::pair<uint32_t, uint32_t>> order;
  for (int i = 0; i < 9; ++i) {
    Header header;
    job.receive_value(0, &header);
    order.push_back({header.key, header.slice});
  }
  // The slice being written when more urgent ones became ready; then the rest in order.
  const auto ahead = order.front();
  EXPECT_EQ(ahead, (std::pair<uint32_t, uint32_t>{2, 0}));
  order.erase(order.begin());
  const std::vector<std::pair<uint32_t, uint32_t>> expected = {{0, 0}, {0, 1}, {0, 2}, {1, 0},
                                                               {1, 1}, {1, 2}, {2, 1}, {2, 2}};
  EXPECT_EQ(order, expected);
}

TEST(Server, WhatHasBeenReceivedIsSummedMostUrgentFirst) {
  Job job(1);
  constexpr uint32_t kKeys = 6;
  for (uint32_t key = 0; key < kKeys; ++key) {
    job.define(key, 1);
    job.initialise(key, {0});
  }
  // All pushes in one write, the last layer first: they are read in one turn, before any is summed.
  std::vector<char> bytes;
  for (uint32_t key = kKeys; key-- > 0;) {
    const Header push = Job::header(FrameKind::kPush, key, 0, 1, 1, -static_cast<int32_t>(key));
    const float gradient = 1;
    bytes.insert(bytes.end(), reinterpret_cast<const char*>(&push), reinterpret_cast<const char*>(&push + 1));
    bytes.insert(bytes.end(), reinterpret_cast<const char*>(&gradient), reinterpret_cast<const char*>(&gradient + 1));
  }
  job.workers[0].send_bytes(bytes.data(), bytes.size());
  for (uint32_t key = 0; key < kKeys; ++key) {
    Header value;
    job.receive_value(0, &value);
    EXPECT_EQ(value.key, key);
  }
}

TEST(Server, NaNAndInfinityArePassedOn) {
  Job job(2);
  job.define(1, 3);
  job.initialise(1, {0, 0, 0});
  const float nan = std::numeric_limits<float>::quiet_NaN(), infinity = std::numeric_limits<float>::infinity();
  job.push(0, 1, 1, {nan, infinity, infinity});
  job.push(1, 1, 1, {1, 1, -infinity});
  const std::vector<float> sum = job.receive_value(0);
  EXPECT_TRUE(std::isnan(sum[0]));
  EXPECT_EQ(sum[1], infinity);
  EXPECT_TRUE(std::isnan(sum[2]));
}

TEST(Server, HoldsOneCopyPerWorkerOfIncompleteSlicesAndNoMore) {
  for (SumOrder order : {SumOrder::kRank, SumOrder::kArrival}) {
    Job job(3, options(order));
    constexpr uint32_t kSlices = 4;
    job.define(1, kSlices * kSlice);
    const std::vector<float> ones(kSlice, 1);
    for (uint32_t slice = 0; slice < kSlices; ++slice) job.initialise(1, ones, slice);
    const uint64_t one_copy = kSlices * kSlice * sizeof(float);
    for (uint64_t round = 1; round <= 5; ++round) {
      uint64_t held = 0;
      for (int worker : {2, 1, 0}) {  // rank 0 last: the most that must be held
        for (uint32_t slice = 0; slice < kSlices; ++slice) job.push(worker, 1, round, ones, slice);
        held = order == SumOrder::kRank ? held + one_copy : one_copy;
        ASSERT_TRUE(worker == 0 || eventually([&] { return job.server.counters().buffer_bytes == held; }));
      }
      for (int worker = 0; worker < 3; ++worker)
        for (uint32_t slice = 0; slice < kSlices; ++slice)
          EXPECT_EQ(job.receive_value(worker), std::vector<float>(kSlice, 3));
    }
    EXPECT_EQ(job.server.counters().buffer_bytes, 0u);
    EXPECT_LE(job.server.counters().peak_buffer_bytes, 3 * one_copy);
    EXPECT_EQ(job.server.counters().rounds, 5u * kSlices);
  }
}

TEST(Server, ALateRankZeroLeavesSixSumsOfSixtyFourWorkers) {
  constexpr size_t kElements = 1000;
  for (int threads : {0, 1}) {
    Job job(64, options(SumOrder::kRank, threads));
    job.define(1, kElements);
    job.initialise(1, std::vector<float>(kElements));
    const std::vector<float> ones(kElements, 1);
    for (uint64_t round = 1; round <= 2; ++round) {
      for (int worker = 63; worker > 0; --worker) job.push(worker, 1, round, ones);
      EXPECT_TRUE(eventually([&] { return job.server.counters().buffer_bytes == 6 * kElements * sizeof(float); }));
      job.push(0, 1, round, ones);
      for (int worker = 0; worker < 64; ++worker)
        ASSERT_EQ(job.receive_value(worker), std::vector<float>(kElements, 64));
    }
    EXPECT_EQ(job.server.counters().buffer_bytes, 0u);
  }
}

TEST(Server, WorkersThatDisagreeOnTheLearningRateAreBothNamed) {
  Job job(2);
  job.server.set_optimizer(0, {"sgd", {}});
  job.define(1, 1);
  job.initialise(1, {0});
  job.push(0, 1, 1, {1}, 0, 0, 0.1);
  job.push(1, 1, 1, {1}, 0, 0, 0.2);
  const std::string text = job.failure();
  for (const char* part :
       {"worker 0 (there)", "worker 1 (there)", "round 1 of key 'key1'", "0.1", "0.2", "learning rate"})
    EXPECT_NE(text.find(part), std::string::npos) << text;
  for (RawPeer& worker : job.workers) EXPECT_EQ(worker.receive_failure(), text);
}

TEST(Server, ADeadWorkerFailsAllOthersAndNamesTheRoundItOwes) {
  Job job(3);
  job.define(1, 1);
  job.initialise(1, {0});
  job.push(0, 1, 1, {1});
  ASSERT_TRUE(job.has_received(4));
  job.workers[1].close();
  const std::string text = job.failure();
  EXPECT_NE(text.find("lost worker 1 (there)"), std::string::npos) << text;
  EXPECT_NE(text.find("round 1 of key 'key1'"), std::string::npos) << text;
  EXPECT_EQ(job.workers[0].receive_failure(), text);
  EXPECT_EQ(job.workers[2].receive_failure(), text);
}

TEST(Server, AWorkerThatLeavesEarlyIsNamed) {
  Header bye;
  bye.kind = FrameKind::kBye;
  for (bool push_first : {true, false}) {
    Job job(2);
    job.define(1, 1);
    job.initialise(1, {0});
    if (push_first) {
      job.push(0, 1, 1, {1});
      ASSERT_TRUE(job.has_received(3));
    }
    job.workers[1].send(bye);
    if (!push_first) job.push(0, 1, 1, {1});
    const std::string text = job.failure();
    EXPECT_NE(text.find("worker 1 (there) ended, but others still push round 1 of key 'key1'"), std::string::npos)
        << text;
  }
}

TEST(Server, IsFinishedWhenEveryWorkerHasSaidGoodbye) {
  Job job(2);
  Header bye;
  bye.kind = FrameKind::kBye;
  job.workers[0].send(bye);
  job.workers[0].close();
  job.workers[1].send(bye);
  EXPECT_TRUE(wait_readable(job.server.event_fd()));
  EXPECT_TRUE(job.server.finished());
  EXPECT_FALSE(job.server.error().has_value());
}

TEST(Server, NothingAWorkerSendsIsTrusted) {
  struct Case {
    const char* what;
    void (*change)(Header&);
  };
  const Case cases[] = {
      {"out of turn", [](Header& h) { h.round = 2; }},
      {"out of turn", [](Header& h) { h.round = 0; }},
      {"out of turn",
       [](Header& h) {
         h.kind = FrameKind::kInit;
         h.round = 1;
       }},
      {"another encoding", [](Header& h) { h.encoding = static_cast<uint8_t>(Encoding::kFloat16); }},
      {"another encoding",
       [](Header& h) {
         h.kind = FrameKind::kInit;
         h.round = 0;
         h.encoding = static_cast<uint8_t>(Encoding::kAbsent);
         h.payload_bytes = 0;
       }},
      {"unknown encoding", [](Header& h) { h.encoding = static_cast<uint8_t>(kLastEncoding) + 1; }},
      {"absent slice", [](Header& h) { h.encoding = static_cast<uint8_t>(Encoding::kAbsent); }},
      {"unexpected", [](Header& h) { h.kind = FrameKind::kPart; }},
      {"of no key", [](Header& h) { h.key = 8; }},
      {"of no key", [](Header& h) { h.slice = 1; }},
      {"of no key", [](Header& h) { h.slice = 0xffffffff; }},
      {"another size", [](Header& h) { h.payload_bytes = 0xffffffff; }},
      {"another size", [](Header& h) { h.payload_bytes = 0; }},
      {"another element type", [](Header& h) { h.dtype = 1; }},
      {"unexpected", [](Header& h) { h.kind = FrameKind::kValue; }},
      {"magic", [](Header& h) { h.magic = 0x20544547; }},
      {"version", [](Header& h) { h.version = 9; }},
  };
  for (const Case& each : cases) {
    Job job(1);
    job.define(1, 4);
    job.initialise(1, {0, 0, 0, 0});
    Header header = Job::header(FrameKind::kPush, 1, 0, 1, 4);
    each.change(header);
    job.workers[0].send_bytes(&header, sizeof header);
    const std::string text = job.failure();
    EXPECT_NE(text.find(each.what), std::string::npos) << text;
    EXPECT_NE(text.find("worker 0 (there)"), std::string::npos) << text;
  }
}

TEST(Server, AConnectionCutAtAnyByteIsALossAndLeaksNothing) {
  const std::vector<float> gradient(20, 1);
  Header header = Job::header(FrameKind::kPush, 1, 0, 1, gradient.size());
  std::vector<char> frame(sizeof header + header.payload_bytes);
  std::memcpy(frame.data(), &header, sizeof header);
  std::memcpy(frame.data() + sizeof header, gradient.data(), header.payload_bytes);
  std::vector<std::unique_ptr<Job>> jobs;  // side by side, for each waits a moment until the worker counts as lost
  for (size_t length = 0; length < frame.size(); length += 7) {
    Job& job = *jobs.emplace_back(std::make_unique<Job>(2, looking_often()));
    job.define(1, gradient.size());
    job.initialise(1, gradient);
    job.workers[0].send_bytes(frame.data(), length);
    job.workers[0].close();
  }
  for (const auto& job : jobs) EXPECT_NE(job->failure().find("lost worker 0 (there)"), std::string::npos);
}

class SummingThreads : public testing::TestWithParam<int> {};

TEST_P(SummingThreads, GiveTheSameValues) {
  Job job(2, options(SumOrder::kRank, GetParam()));
  job.define(1, 7 * kSlice);
  const std::vector<float> ones(kSlice, 1);
  for (uint32_t slice = 0; slice < 7; ++slice) job.initialise(1, ones, slice);
  for (uint64_t round = 1; round <= 3; ++round) {
    for (int worker = 0; worker < 2; ++worker)
      for (uint32_t slice = 0; slice < 7; ++slice)
        job.push(worker, 1, round, std::vector<float>(kSlice, float(worker + 1)), slice);
    for (int worker = 0; worker < 2; ++worker)
      for (uint32_t slice = 0; slice < 7; ++slice) EXPECT_EQ(job.receive_value(worker), std::vector<float>(kSlice, 3));
  }
}

INSTANTIATE_TEST_SUITE_P(Server, SummingThreads, testing::Values(0, 1, 3));

}  // namespace
}  // namespace p3
