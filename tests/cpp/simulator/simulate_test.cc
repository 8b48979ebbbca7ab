// Whole jobs, by hand. See small_job.h: 1000 bytes/s, layers of 1 s forward and 2 s backward.
#include <gtest/gtest.h>

#include <algorithm>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
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

TEST(Simulate, APartGoesFromItsWorkerToAllOthers) {
  Job job = small_job(2, {500}, 3);
  job.slices = {{0, 0, 0, 500, 500, 0}, {0, 0, 0, 500, 500, 1}};
  // Both are at the server on host 0: worker 0's at once, and on host 1 a second later; worker 1's on host 0 then.
  const Result result = simulate(job);
  for (const auto& ends : result.ends_s) EXPECT_EQ(ends, (std::vector<double>{3, 7, 11}));
  EXPECT_DOUBLE_EQ(result.up[0].bytes, 2 * 500);
  EXPECT_DOUBLE_EQ(result.down[0].bytes, 2 * 500) << "nothing comes back to who has pushed it";
}

TEST(Simulate, NeitherDoItsMachinesOthersNeedIt) {
  Job job = small_job(2, {500}, 3);
  job.workers = {0, 0, 1};
  job.factors.assign(3, std::vector<double>(3, 1));
  job.slices = {{0, 0, 1, 500, 500, 0}, {0, 0, 1, 500, 500, 1}, {0, 0, 1, 500, 500, 2}};
  job.traced_iterations = 3;
  const auto come_to_host_0 = [&job] {
    const std::vector<Span> spans = simulate(job).spans;
    return std::count_if(spans.begin(), spans.end(), [](const Span& span) {
      return span.kind == Span::kValue && span.peer == 0 && span.round == 0;
    });
  };
  EXPECT_EQ(come_to_host_0(), 1);
  job.local_aggregation = false;  // each of its workers gets both others' parts
  EXPECT_EQ(come_to_host_0(), 4);
}

TEST(Simulate, APartOfTheNextRoundIsNotTakenForOneOfThisRound) {
  Job job = small_job(5, {500}, 3);
  job.workers = {0, 1, 2};
  job.servers = {3, 4};
  job.layers = {{0.01, 0.02}};
  job.factors.assign(3, std::vector<double>(3, 1));
  for (Clipping clipping : {Clipping::kNone, Clipping::kWait}) {
    job.clipping = clipping;
    // Worker 2's leaves its server for worker 0, which takes 5 s, and then for worker 1; the others are quick.
    for (int host : {0, 1}) job.hosts[static_cast<size_t>(host)].down.bytes_per_s = 1000 * kRate;
    job.slices = {{0, 0, 0, 10, 5000, 2}, {0, 0, 1, 10, 10, 0}, {0, 0, 1, 10, 10, 1}};
    const Result result = simulate(job);
    EXPECT_NEAR(result.ends_s[0][1], 5, 1);
    EXPECT_NEAR(result.ends_s[1][1], 10, 1) << "worker 0's part of its second round comes before that";
  }
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

// Layer 1's push of 2000 bytes, ready at 4 s, takes 2 s on each of two links: worker 0's is at server 1, and summed, at 8.
// Layer 0's 10 bytes are ready at 6, and worker 1's are at server 0 at 6.02.
Job clipped_job(Clipping clipping) {
  Job job = small_job(2, {10, 2000}, 2);
  job.clipping = clipping;
  job.norm_bytes = 100;
  return job;
}

TEST(Simulate, NotClippedEachLayerWaitsForItsOwnValues) {
  const Result result = simulate(clipped_job(Clipping::kNone));
  // Worker 0 has its first values at 6.02, its second ones at 8 + 4. Worker 1's first ones stand behind the long push.
  EXPECT_NEAR(result.ends_s[0][1], 12 + 5, 1e-9);
  EXPECT_NEAR(result.ends_s[1][1], 8.01 + 6, 1e-9);
  EXPECT_NEAR(result.waited_s[0][0], 0.02, 1e-9);
  EXPECT_NEAR(result.waited_s[0][1], 12 - 7.02, 1e-9);
  EXPECT_EQ(result.waited_to_clip_s, (std::vector<double>{0, 0}));
}

TEST(Simulate, ClippedByTheNormTheFirstLayerWaitsForAllSumsAndTheOthersForTheirOwnValues) {
  const Result result = simulate(clipped_job(Clipping::kNorm));
  // Server 1's part, 0.1 s on each link, overtakes its values: worker 0 has it at 8.2, and the values at 8.1 + 4. Server
  // 0's part is ready at 6.02 and comes to worker 1 at 8.1, behind the long push.
  EXPECT_NEAR(result.waited_to_clip_s[0], 8.2 - 6, 1e-9);
  EXPECT_NEAR(result.waited_to_clip_s[1], 8.1 - 6, 1e-9);
  EXPECT_NEAR(result.waited_s[0][0], 0, 1e-9);
  EXPECT_NEAR(result.waited_s[0][1], 12.1 - 9.2, 1e-9);
  EXPECT_NEAR(result.waited_s[1][0], 0.01, 1e-9);
  EXPECT_NEAR(result.ends_s[0][1], 12.1 + 5, 1e-9);
  EXPECT_NEAR(result.ends_s[1][1], 8.11 + 6, 1e-9);
  // Of the first round norm and values; of the second what is ready when worker 0 has ended, and so all from its host.
  EXPECT_NEAR(result.up[0].bytes, (100 + 10) + (2000 + 100 + 10), 1e-9);
  EXPECT_NEAR(result.up[1].bytes, (100 + 2000) + 10, 1e-9);
}

TEST(Simulate, ClippedAfterAWaitTheFirstLayerWaitsForAllValues) {
  const Result result = simulate(clipped_job(Clipping::kWait));
  EXPECT_NEAR(result.waited_to_clip_s[0], 12 - 6, 1e-9);
  EXPECT_NEAR(result.waited_to_clip_s[1], 8.01 - 6, 1e-9);
  EXPECT_NEAR(result.ends_s[0][1], 12 + 6, 1e-9);
  EXPECT_NEAR(result.ends_s[1][1], 8.01 + 6, 1e-9);
  EXPECT_EQ(result.waited_s, (std::vector<std::vector<double>>{{0, 0}, {0, 0}}));
}

TEST(Simulate, ALayerWithoutSlicesNeedsNoNormButTheBackwardPassBeforeIt) {
  Job job = clipped_job(Clipping::kNorm);
  job.layers = {{1, 0}, {1, 2}, {1, 2}};
  for (Slice& slice : job.slices) ++slice.layer;
  // All is as it was, a second later; until 8.2 + 1 the first layer hides 1 s of the wait.
  EXPECT_NEAR(simulate(job).waited_to_clip_s[0], 8.2 - 6 - 1, 1e-9);
  job.clipping = Clipping::kWait;
  EXPECT_NEAR(simulate(job).waited_to_clip_s[0], 12 - 6, 1e-9);
}

TEST(Simulate, AnIterationIsItsComputationAndItsWaits) {
  for (const Clipping clipping : {Clipping::kNone, Clipping::kNorm, Clipping::kWait})
    for (const bool at_end : {false, true})
      for (const bool aggregated : {false, true}) {
        Job job = small_job(3, {300, 1000, 50, 700, 1100, 20}, 6);
        job.workers = {0, 1, 2, 2};
        job.factors = {{1, 2, 1, 1, 1, 1}, {1, 1, 1, 1, 3, 1}, {1, 1, 1, 1, 1, 1}, {2, 1, 1, 1, 1, 1}};
        job.servers = {0, 1, 1};
        job.warmup = 2;
        job.clipping = clipping;
        job.norm_bytes = 96;
        job.releases_at_end = at_end;
        job.local_aggregation = aggregated;
        job.transport.segment_bytes = 64;
        job.sender.window_bytes = 200;
        job.sender.write_bytes = 64;
        const Result result = simulate(job);
        for (size_t w = 0; w < job.workers.size(); ++w) {
          double spent = result.waited_to_clip_s[w];
          for (const double waited : result.waited_s[w]) spent += waited;
          for (size_t iteration = 2; iteration < 6; ++iteration) spent += 18 * job.factors[w][iteration];
          EXPECT_NEAR(result.ends_s[w][5] - result.ends_s[w][1], spent, 1e-9);
        }
      }
}

TEST(Simulate, PushesFirstBringTheNormSooner) {
  Job job = small_job(3, {400, 400, 400, 400, 400, 400}, 4);
  for (Layer& layer : job.layers) layer = {1, 0.2};
  job.clipping = Clipping::kNorm;
  job.norm_bytes = 1;
  job.transport.segment_bytes = job.sender.write_bytes = 50;
  job.sender.window_bytes = 100;
  const double evenly = simulate(job).waited_to_clip_s[0];
  job.sender.pushes_first = true;
  EXPECT_LT(simulate(job).waited_to_clip_s[0], 0.9 * evenly);
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

// Host 2's pushes go to host 1, whose sums go to the server on host 0.
Job chained_job(int iterations) {
  Job job = small_job(3, {500}, iterations);
  job.leaders.assign(3, {Job::kServer, Job::kServer, 1});
  return job;
}

TEST(Simulate, ALeaderPushesASumAndPassesBackTheValue) {
  Job job = chained_job(2);
  job.traced_iterations = 2;
  const Result result = simulate(job);
  // From 3 on, 1 s for each hop: host 2's push is at host 1 at 4, the sum of both at the server at 5, the value at host 1
  // at 6 and at host 2 at 7.
  EXPECT_EQ(result.ends_s, (std::vector<std::vector<double>>{{3, 5 + 3}, {3, 6 + 3}, {3, 7 + 3}}));
  using Frames = std::vector<std::tuple<int, int, int, double, double>>;
  Frames frames;
  for (const Span& span : result.spans)
    if ((span.kind == Span::kPush || span.kind == Span::kValue) && span.round == 0)
      frames.emplace_back(span.kind, span.node, span.peer, span.begin_s, span.end_s);
  EXPECT_EQ(frames, (Frames{{Span::kPush, 2, 1, 3, 4},
                            {Span::kPush, 1, 0, 4, 5},
                            {Span::kValue, 0, 1, 5, 6},
                            {Span::kValue, 1, 2, 6, 7}}));
}

TEST(Simulate, ALeaderWaitsForItsOwnWorkersToo) {
  Job job = chained_job(2);
  job.factors[1] = {2, 1};  // ready at 6, two seconds after host 2's push has come
  EXPECT_EQ(simulate(job).ends_s, (std::vector<std::vector<double>>{{3, 7 + 3}, {6, 8 + 3}, {3, 9 + 3}}));
  job.workers.push_back(1);
  job.factors.push_back({3, 1});
  EXPECT_EQ(simulate(job).ends_s[3], (std::vector<double>{9, 11 + 3}));
}

TEST(Simulate, TheNormComesStraightFromTheServer) {
  Job job = chained_job(2);
  job.clipping = Clipping::kNorm;
  job.norm_bytes = 250;
  const Result result = simulate(job);
  // The server has the sum at 5; its parts of the norm are at host 1 at 5.5 and at host 2 at 5.75, and the value, which
  // leaves behind both, at host 1 at 6.5 and at host 2 at 7.5.
  EXPECT_EQ(result.ends_s, (std::vector<std::vector<double>>{{3, 5 + 3}, {3, 6.5 + 3}, {3, 7.5 + 3}}));
  EXPECT_EQ(result.waited_to_clip_s, (std::vector<double>{2, 2.5, 2.75}));
}

TEST(Simulate, ALeadersValuesYieldToItsPushes) {
  // Host 0 leads host 1 for the second slice, whose value comes back while host 0 still pushes the first one.
  Job job = small_job(3, {4000, 500}, 2);
  job.slices[0].layer = 1;
  job.slices[0].server = 1;
  job.slices[1].server = 2;
  job.leaders = {{-1, -1, -1}, {-1, -1, -1}, {-1, 0, -1}};
  job.traced_iterations = 2;
  job.transport.segment_bytes = job.sender.write_bytes = 50;
  job.sender.window_bytes = 200;
  for (const bool pushes_first : {false, true}) {
    job.sender.pushes_first = pushes_first;
    double pushed = 0, passed_on = 0;
    for (const Span& span : simulate(job).spans) {
      if (span.round > 0 || span.node != 0) continue;
      if (span.kind == Span::kPush && span.item == 0) pushed = span.end_s;
      if (span.kind == Span::kValue && span.item == 1) passed_on = span.end_s;
    }
    EXPECT_EQ(passed_on > pushed, pushes_first) << pushed << " and " << passed_on;
    EXPECT_GT(passed_on, 0);
  }
}

TEST(Simulate, AServersHostLeadsAsAnyOther) {
  // Nobody pushes to the server from afar: host 0 adds up both others' pushes, which share its link.
  Job job = small_job(3, {500}, 3);
  const Result plain = simulate(job);
  job.leaders.assign(3, {Job::kServer, 0, 0});
  const Result led = simulate(job);
  EXPECT_EQ(led.ends_s, plain.ends_s);
  EXPECT_EQ(led.waited_s, plain.waited_s);
  EXPECT_DOUBLE_EQ(led.up[0].bytes, plain.up[0].bytes);
}

TEST(Simulate, ThroughLeadersEachHostPushesASliceOnceAndGetsItOnce) {
  // An odd tree, another one for each server, over queues that lose something.
  Job job = small_job(5, {300, 1000, 50, 700, 1100, 20}, 4);
  job.leaders = {{-1, 0, 1, -1, 3}, {2, -1, -1, 2, 3}, {4, 4, -1, 2, -1}, {-1, -1, -1, -1, -1}, {1, 2, 3, 4, -1}};
  job.traced_iterations = 4;
  job.transport.segment_bytes = job.sender.write_bytes = 64;
  job.sender.window_bytes = 200;
  for (Host& host : job.hosts) host.up.queue_bytes = host.down.queue_bytes = 400;
  std::vector<std::vector<int>> pushes(6, std::vector<int>(5, 0)), values = pushes;
  for (const Span& span : simulate(job).spans) {
    if (span.round > 0) continue;
    const auto s = static_cast<size_t>(span.item);
    if (span.kind == Span::kPush) ++pushes[s][static_cast<size_t>(span.node)];
    if (span.kind == Span::kValue) ++values[s][static_cast<size_t>(span.peer)];
  }
  for (size_t s = 0; s < pushes.size(); ++s) {
    std::vector<int> once(5, 1);
    once[static_cast<size_t>(job.slices[s].server)] = 0;
    EXPECT_EQ(pushes[s], once) << s;
    EXPECT_EQ(values[s], once) << s;
  }
}

TEST(Simulate, AMachinesConnectionsToItsLeadersAreThoseThatShareTheLink) {
  // Nine hosts in groups of three: of each leave 2 (2 + 2) connections in place of 2 (9 - 1).
  Job job = small_job(9, {500});
  job.sender.window_bytes = 0;
  for (Host& host : job.hosts) host.up.bytes_per_s = host.down.bytes_per_s = 25e6;
  const double alone = simulate(job).window_bytes;
  for (int home = 0; home < 9; ++home) {
    job.leaders.emplace_back();
    for (int host = 0; host < 9; ++host)
      job.leaders.back().push_back(host % 3 == home % 3 ? Job::kServer : host - host % 3 + home % 3);
  }
  const double grouped = simulate(job).window_bytes;
  Job five = small_job(5, {500});
  five.sender.window_bytes = 0;
  for (Host& host : five.hosts) host.up.bytes_per_s = host.down.bytes_per_s = 25e6;
  EXPECT_EQ(grouped, simulate(five).window_bytes) << "2 (5 - 1) leave a host, too";
  EXPECT_GT(grouped, 1.5 * alone);
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
  EXPECT_DOUBLE_EQ(window(2), 89 << 10) << "a worker's connection and a server's share the link";
  EXPECT_DOUBLE_EQ(window(8), 12 << 10) << "fourteen share the link";
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
  EXPECT_EQ(why([](Job& job) { job.clipping = Clipping::kNorm; }), "a part of the norm has no bytes");
  EXPECT_EQ(why([](Job& job) { job.slices[0].part_of = 2; }), "a part is of no worker");
  const auto has_parts = [](Job& job) {
    job.slices[0].part_of = 0;
    job.clipping = Clipping::kNorm;
    job.norm_bytes = 16;
  };
  EXPECT_EQ(why(has_parts), "no server sums parts, so none tells their norm");
  const auto why_led = [&why](std::vector<std::vector<int>> leaders, auto&& spoil) {
    return why([&](Job& job) {
      job.leaders = std::move(leaders);
      spoil(job);
    });
  };
  const auto nothing_else = [](Job&) {};
  EXPECT_EQ(why_led({{-1, 0}}, nothing_else), "each server needs its leaders");
  EXPECT_EQ(why_led({{-1, 0}, {-1}}, nothing_else), "each host needs a leader, or the server");
  EXPECT_EQ(why_led({{-1, 0}, {1, 0}}, nothing_else), "from host 0 no way leads to the server");
  EXPECT_EQ(why_led({{-1, 0}, {-1, 1}}, nothing_else), "from host 1 no way leads to the server");
  EXPECT_EQ(why_led({{-1, 2}, {-1, -1}}, nothing_else), "leader on host 2: there are 2");
  EXPECT_EQ(why_led({{-1, 0}, {-1, -2}}, nothing_else), "leader on host -2: there are 2");
  EXPECT_EQ(why_led({{-1, 0}, {-1, -1}}, [](Job& job) { job.workers[1] = 0; }),
            "with leaders each host needs workers, which push as one");
  EXPECT_EQ(why_led({{-1, 0}, {-1, -1}}, [](Job& job) { job.local_aggregation = false; }),
            "with leaders each host needs workers, which push as one");
  EXPECT_EQ(why_led({{-1, 0}, {-1, -1}}, [](Job& job) { job.slices[0].part_of = 0; }), "leaders pass on no parts");
  EXPECT_EQ(why_led({{-1, 0}, {1, -1}}, nothing_else), "accepted");
  EXPECT_EQ(why([](Job&) {}), "accepted");
}

TEST(SimulateRing, TwoWorkersSendHalfThereAndHalfBack) {
  const Result result = simulate_ring(small_job(2, {1000}, 2), 1, 1);
  // 3 s of computation; two steps of 500 bytes, each 0.5 s on both links at once.
  EXPECT_EQ(result.ends_s[0], (std::vector<double>{4, 8}));
  EXPECT_EQ(result.ends_s[1], (std::vector<double>{4, 8}));
  EXPECT_DOUBLE_EQ(result.up[0].bytes, 1000);
}

TEST(SimulateRing, ClippingChangesNothingAsAllIsReducedBeforeAnyUpdate) {
  Job job = small_job(2, {500, 1000}, 3);
  job.norm_bytes = 96;
  const Result plain = simulate_ring(job, 1, 1);
  for (const Clipping clipping : {Clipping::kNorm, Clipping::kWait}) {
    job.clipping = clipping;
    EXPECT_EQ(simulate_ring(job, 1, 1).ends_s, plain.ends_s);
  }
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
