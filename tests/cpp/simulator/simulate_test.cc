// Whole jobs, by hand. See small_job.h: 1000 bytes/s, layers of 1 s forward and 2 s backward.
#include <gtest/gtest.h>

#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "simulator/small_job.h"

namespace p3::simulator {
namespace {

TEST(Simulate, OneSliceBetweenTwoHosts) {
  const Result result = simulate(small_job(2, {500}, 3));
  // Worker 0 has the server on its host, so worker 1's push decides: ready at 3, two links of 0.5 s, then back.
  // Worker 0 goes on at 4 and is done at 7, worker 1 at 5 and 8.
  EXPECT_EQ(result.ends_s[0], (std::vector<double>{3, 7, 12}));
  EXPECT_EQ(result.ends_s[1], (std::vector<double>{3, 8, 13}));
  EXPECT_DOUBLE_EQ(result.waited_s[0][0], 1 + 2);
  EXPECT_DOUBLE_EQ(result.waited_s[1][0], 2 + 2);
  EXPECT_DOUBLE_EQ(result.up[0].bytes, 1000) << "two values after the warm-up, which ends with the first iteration";
}

TEST(Simulate, LinksTellWhenASlicePassesThem) {
  // Worker 1 pushes at 3 s to the server on host 0, and its value comes back the same way.
  Job job = small_job(2, {500}, 2);
  job.traced_iterations = 2;
  using Passages = std::vector<std::tuple<int, int, double, double>>;
  const auto passages = [&job] {
    Passages found;
    for (const Span& span : simulate(job).spans)
      if ((span.kind == Span::kUp || span.kind == Span::kDown) && span.round == 0)
        found.emplace_back(span.kind, span.node, span.begin_s, span.end_s);
    return found;
  };
  EXPECT_TRUE(passages().empty());
  job.traces_links = true;
  EXPECT_EQ(
      passages(),
      (Passages{{Span::kUp, 1, 3, 3.5}, {Span::kDown, 0, 3.5, 4}, {Span::kUp, 0, 4, 4.5}, {Span::kDown, 1, 4.5, 5}}));
}

TEST(Simulate, OneHostNeedsNoNetwork) {
  const Result result = simulate(small_job(1, {1e9, 1e9}, 2));
  EXPECT_EQ(result.ends_s[0], (std::vector<double>{6, 12}));
  EXPECT_DOUBLE_EQ(result.up[0].bytes, 0);
}

TEST(Simulate, SlicesHideBehindTheComputationOfOtherLayers) {
  // The second layer's 1000 bytes take 2.2 s there and back, of the 3 s before its next use. The first has next to
  // nothing to send, but finds two segments of the other in front of it.
  Job job = small_job(2, {0.001, 1000}, 3);
  job.slices[1].server = 0;
  job.transport.segment_bytes = job.sender.write_bytes = 100;
  job.sender.window_bytes = 200;
  const Result result = simulate(job);
  EXPECT_DOUBLE_EQ(result.waited_s[1][1], 0);
  EXPECT_GT(result.waited_s[1][0], 0);
  EXPECT_LT(result.waited_s[1][0], 2 * 0.3);
  EXPECT_NEAR(result.ends_s[1][2], 18 + result.waited_s[1][0], 1e-9);
}

TEST(Simulate, LateGradientsLeaveWhenTheBackwardPassHasEnded) {
  // Both layers' slices leave at 6 s. The first, of next to nothing, is back at once; the second, of 500 bytes, needs
  // 1 s there and 1 s back, of which the first forward step hides one.
  Job job = small_job(2, {0.001, 500}, 2);
  job.slices[1].server = 0;
  job.releases_at_end = true;
  const Result result = simulate(job);
  EXPECT_NEAR(result.waited_s[1][0], 0, 0.01);
  EXPECT_NEAR(result.waited_s[1][1], 2 - 1, 0.01);
  EXPECT_NEAR(result.ends_s[1][1], 12 + 2 - 1, 0.01);
  job.releases_at_end = false;
  EXPECT_NEAR(simulate(job).ends_s[1][1], 12, 0.01) << "the first layer's backward step would hide all of it";
}

TEST(Simulate, LayerThatIsNeededFirstOvertakes) {
  Job job = small_job(2, {100, 1000, 1000}, 2);
  for (Slice& slice : job.slices) slice.server = 0;
  job.layers = {{1, 0.1}, {1, 0.1}, {1, 0.1}};
  job.transport.segment_bytes = job.sender.write_bytes = 100;
  job.sender.window_bytes = 100;
  const double with = simulate(job).waited_s[1][0];
  job.sender.priorities = false;
  const double without = simulate(job).waited_s[1][0];
  EXPECT_LT(with, without - 1);
}

TEST(Simulate, LocalAggregationSendsOneCopyForAHost) {
  Job job = small_job(2, {500}, 2);
  job.workers = {0, 1, 0, 1};
  job.factors.assign(4, {1, 1});
  job.traced_iterations = 2;
  const auto frames = [&job](Span::Kind kind) {
    int count = 0;
    for (const Span& span : simulate(job).spans) count += span.kind == kind && span.round == 0;
    return count;
  };
  EXPECT_EQ(frames(Span::kPush), 1);
  EXPECT_EQ(frames(Span::kValue), 1);
  job.local_aggregation = false;
  EXPECT_EQ(frames(Span::kPush), 2);
  EXPECT_EQ(frames(Span::kValue), 2);
}

TEST(Simulate, AllWaitForTheSlowestWorker) {
  Job job = small_job(2, {0.001}, 3);
  job.factors[0] = {2, 2, 2};
  const Result result = simulate(job);
  EXPECT_NEAR(result.ends_s[0][2], 18, 0.01);
  EXPECT_NEAR(result.ends_s[1][2], 12 + 3, 0.01);
  EXPECT_NEAR(result.waited_s[1][0], 3 + 3, 0.01);
}

TEST(Simulate, WhatIsLostArrivesInTheEnd) {
  Job job = small_job(4, {1000, 1000, 1000, 1000}, 3);
  job.transport.segment_bytes = job.sender.write_bytes = 50;
  for (Host& host : job.hosts) host.up.queue_bytes = host.down.queue_bytes = 400;
  for (const Congestion congestion : {Congestion::kNone, Congestion::kCubic, Congestion::kBbr}) {
    job.transport.congestion = congestion;
    const Result lossy = simulate(job);
    uint64_t lost = 0;
    for (const LinkUse& use : lossy.down) lost += use.lost;
    EXPECT_GT(lost, 0u);
    for (const auto& ends : lossy.ends_s) EXPECT_EQ(ends.size(), 3u);
  }
}

TEST(Simulate, SameJobGivesTheSameBits) {
  Job job = small_job(5, {300, 1000, 50, 700, 1100, 20}, 6);
  job.transport.segment_bytes = 64;
  job.sender.window_bytes = 200;
  job.transport.congestion = Congestion::kBbr;
  for (Host& host : job.hosts) host.up.queue_bytes = host.down.queue_bytes = 500;
  const Result one = simulate(job), other = simulate(job);
  EXPECT_EQ(one.ends_s, other.ends_s);
  EXPECT_EQ(one.waited_s, other.waited_s);
  EXPECT_EQ(one.events, other.events);
}

TEST(Simulate, ChoosesItsWindowsAsTheSocketsDo) {
  const auto window = [](int hosts) {
    Job job = small_job(hosts, {500});
    job.sender.window_bytes = 0;
    for (Host& host : job.hosts) host.up.bytes_per_s = host.down.bytes_per_s = 25e6;
    return simulate(job).window_bytes;
  };
  EXPECT_DOUBLE_EQ(window(2), 128 << 10) << "one connection to another host";
  EXPECT_DOUBLE_EQ(window(8), 16 << 10) << "seven share the link";
}

TEST(Simulate, JobsThatMakeNoSenseAreRefusedByName) {
  const auto why = [](auto&& spoil) {
    Job job = small_job(2, {500});
    spoil(job);
    try {
      simulate(job);
    } catch (const std::invalid_argument& error) {
      return std::string(error.what());
    }
    return std::string("accepted");
  };
  EXPECT_NE(why([](Job& job) { job.hosts[1].down.bytes_per_s = 0; }).find("downlink of host 1"), std::string::npos);
  EXPECT_EQ(why([](Job& job) { job.workers[0] = 2; }), "worker on host 2: there are 2");
  EXPECT_EQ(why([](Job& job) { job.slices[0].server = -1; }), "a slice has no server");
  EXPECT_EQ(why([](Job& job) { job.factors.pop_back(); }), "each worker needs its iterations' factors");
  EXPECT_EQ(why([](Job& job) { job.warmup = 2; }), "no iteration is left after the warm-up");
  EXPECT_EQ(why([](Job&) {}), "accepted");
}

TEST(SimulateRing, TwoWorkersSendHalfThereAndHalfBack) {
  const Result result = simulate_ring(small_job(2, {1000}, 2), 1, 1);
  // 3 s of computation; two steps of 500 bytes, each 0.5 s on both links at once.
  EXPECT_EQ(result.ends_s[0], (std::vector<double>{4, 8}));
  EXPECT_EQ(result.ends_s[1], (std::vector<double>{4, 8}));
  EXPECT_DOUBLE_EQ(result.up[0].bytes, 1000);
}

TEST(SimulateRing, FourWorkersSendOneAndAHalfTimesTheBucket) {
  const Result result = simulate_ring(small_job(4, {1000}, 1), 1, 1);
  for (const auto& ends : result.ends_s) EXPECT_NEAR(ends[0], 3 + 1.5, 1e-9);
}

TEST(SimulateRing, BucketsOverlapWithTheBackwardPassAndTheFirstIsSmall) {
  // Layer 1's bucket, 1000 bytes, is reduced while layer 0 computes backward for 2 s; layer 0's 500 follow.
  const Result result = simulate_ring(small_job(2, {500, 1000}, 1), 1e6, 1000);
  EXPECT_NEAR(result.ends_s[0][0], 6 + 0.5, 1e-9);
  const Result one_bucket = simulate_ring(small_job(2, {500, 1000}, 1), 1e6, 1e6);
  EXPECT_NEAR(one_bucket.ends_s[0][0], 6 + 1.5, 1e-9);
}

TEST(SimulateRing, SlowestLinkSetsThePace) {
  Job job = small_job(3, {900}, 1);
  job.hosts[1].up.bytes_per_s = kRate / 2;
  EXPECT_NEAR(simulate_ring(job, 1, 1).ends_s[2][0], 3 + 4 * 0.6, 1e-9);
}

}  // namespace
}  // namespace p3::simulator
