// What a worker does besides plain pushes: skips, compressed gradients, init again, the optimizer's state, counters.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "base/half.h"
#include "p3/codec.h"
#include "p3/worker.h"
#include "transport/encoded.h"
#include "worker/worker_job.h"

namespace p3 {
namespace {

Encoding encoding_of(const Header& header) { return static_cast<Encoding>(header.encoding); }

constexpr Compression kHalves{Encoding::kFloat16, 0.5f}, kTwoBits{Encoding::kTwoBit, 0.5f},
    kOneBit{Encoding::kOneBit, 0.5f};

TEST(WorkerSkip, SendsNoGradientAndTakesTheOthersValue) {
  OneServer job(unix_pair());
  std::vector<float>& landing = job.array(2 * kSlice, 7);
  const int key = job.key(3, landing.size());
  job.worker.skip(key, landing.data(), -5, job.results.expect(0));
  for (uint32_t slice = 0; slice < 2; ++slice) {
    const Header header = job.server.must_receive();
    EXPECT_EQ(header.kind, FrameKind::kPush);
    EXPECT_EQ(encoding_of(header), Encoding::kAbsent);
    EXPECT_EQ(header.payload_bytes, 0u);
    EXPECT_EQ(header.round, 1u);
    EXPECT_EQ(header.slice, slice);
    EXPECT_EQ(header.priority, -5);
    job.answer(header, std::vector<float>(kSlice, float(slice)));
  }
  ASSERT_TRUE(job.results.wait_for(1));
  EXPECT_EQ(job.results.text(0), "");
  EXPECT_TRUE(job.results.updated(0));
  EXPECT_EQ(landing.front(), 0);
  EXPECT_EQ(landing.back(), 1);
}

TEST(WorkerSkip, OfAllLeavesTheLandingArrayAsItIs) {
  OneServer job(unix_pair());
  std::vector<float>& landing = job.array(2 * kSlice, 7);
  const int key = job.key(3, landing.size());
  for (int round = 1; round <= 3; ++round) {
    job.worker.skip(key, landing.data(), 0, job.results.expect(round));
    for (int slice = 0; slice < 2; ++slice) job.answer(job.server.must_receive(), {});
  }
  ASSERT_TRUE(job.results.wait_for(3));
  for (size_t i = 0; i < 3; ++i) EXPECT_FALSE(job.results.updated(i));
  EXPECT_EQ(landing, std::vector<float>(2 * kSlice, 7));
  // The next push is of the next round, and its result counts as one.
  const std::vector<float>& gradient = job.array(2 * kSlice);
  job.worker.push(key, gradient.data(), landing.data(), 0, {}, job.results.expect(4));
  for (int slice = 0; slice < 2; ++slice) {
    const Header header = job.server.must_receive();
    EXPECT_EQ(header.round, 4u);
    job.answer(header, std::vector<float>(kSlice, 8));
  }
  ASSERT_TRUE(job.results.wait_for(4));
  EXPECT_TRUE(job.results.updated(3));
}

TEST(WorkerStaleness, TellsWhatIsInAllOfTheLastRoundThatHasLanded) {
  OneServer job(unix_pair());
  std::vector<float>& gradient = job.array(2 * kSlice, 1);
  std::vector<float>& landing = job.array(2 * kSlice);
  const int key = job.worker.declare("key3", landing.size(), DType::kFloat32);
  KeyPlan plan = plan_of(3, landing.size());
  plan.staleness = 4;
  job.worker.agree(key, plan);
  const auto answer = [&](Header push, uint64_t least) {
    set_least_clock(push, least);
    job.answer(push, std::vector<float>(kSlice, 2));
  };
  uint64_t least = 0;
  for (const auto& [first, second] : {std::pair{0, 1}, {5, 3}, {3, 3}}) {
    const LandedRound before = job.worker.landed_round(key);
    job.worker.push(key, gradient.data(), landing.data(), 0, {}, job.results.expect(0));
    job.worker.push(key, gradient.data(), landing.data(), 0, {}, job.results.expect(0));  // leaves behind the first
    const Header slices[] = {job.server.must_receive(), job.server.must_receive()};
    answer(slices[0], static_cast<uint64_t>(first));
    EXPECT_EQ(job.worker.landed_round(key).round, before.round);
    EXPECT_EQ(job.worker.landed_round(key).least_clock, least);
    answer(slices[1], static_cast<uint64_t>(second));
    ASSERT_TRUE(job.results.wait_for(before.round + 1));
    least = static_cast<uint64_t>(std::min({first, second, static_cast<int>(before.round) + 1}));
    EXPECT_EQ(job.worker.landed_round(key).round, before.round + 1);
    EXPECT_EQ(job.worker.landed_round(key).least_clock, least);
    for (int slice = 0; slice < 2; ++slice) answer(job.server.must_receive(), least);
    ASSERT_TRUE(job.results.wait_for(before.round + 2));
  }
}

TEST(WorkerMore, LeavesAtFlush) {
  OneServer job(unix_pair());
  std::vector<float>& gradient = job.array(10, 1);
  std::vector<float>& landing = job.array(10);
  const int key = job.key(3, 10);
  job.worker.push(key, gradient.data(), landing.data(), 0, {}, job.results.expect(0), false, true);
  job.worker.flush();
  job.answer(job.server.must_receive(), std::vector<float>(10, 2));
  ASSERT_TRUE(job.results.wait_for(1));
  EXPECT_EQ(landing, std::vector<float>(10, 2));
  job.worker.flush();  // of nothing
}

TEST(WorkerMore, LeavesWithTheNextPush) {
  OneServer job(unix_pair());
  std::vector<float>& gradient = job.array(10, 1);
  std::vector<float>& landing = job.array(10);
  const int keys[] = {job.key(3, 10), job.key(4, 10)};
  for (int round = 1; round <= 20; ++round) {
    job.worker.push(keys[0], gradient.data(), landing.data(), -1, {}, job.results.expect(0), false, true);
    job.worker.push(keys[1], gradient.data(), landing.data(), 0, {}, job.results.expect(1));
    for (int i = 0; i < 2; ++i) job.answer(job.server.must_receive(), std::vector<float>(10, 2));
    ASSERT_TRUE(job.results.wait_for(static_cast<size_t>(2 * round)));
  }
}

TEST(WorkerCompression, HalvesGoOutAndSumsComeBackAsHalves) {
  OneServer job(unix_pair());
  const size_t n = kSlice + 1025;
  std::vector<float>& gradient = job.array(n);
  std::vector<float>& landing = job.array(n + 1, -1);
  std::vector<float> expected(n);
  for (size_t i = 0; i < n; ++i) gradient[i] = float(i) * 0.37f;
  const int key = job.key(3, n, kHalves);
  job.worker.push(key, gradient.data(), landing.data(), 0, {}, job.results.expect(0));
  for (size_t offset : {size_t{0}, size_t{kSlice}}) {
    Header header = job.server.must_receive();
    const size_t count = std::min<size_t>(kSlice, n - offset);
    EXPECT_EQ(encoding_of(header), Encoding::kFloat16);
    EXPECT_EQ(header.dtype, static_cast<uint8_t>(DType::kFloat32));
    const auto first = gradient.begin() + static_cast<ptrdiff_t>(offset);
    const std::vector<char> sent = encoded(kHalves, {first, first + static_cast<ptrdiff_t>(count)});
    ASSERT_EQ(job.server.payload, sent);
    const std::vector<float> values = decoded(kHalves, sent, count);
    std::copy(values.begin(), values.end(), expected.begin() + static_cast<ptrdiff_t>(offset));
    header.kind = FrameKind::kValue;
    job.server.send(header, sent.data());  // the sum of one
  }
  ASSERT_TRUE(job.results.wait_for(1));
  EXPECT_EQ(job.results.text(0), "");
  expected.push_back(-1);
  EXPECT_EQ(landing, expected);
}

class WorkerWithResidual : public testing::TestWithParam<Compression> {};

TEST_P(WorkerWithResidual, KeepsWhatIsLeftOutOfEachSliceAlsoOverASkip) {
  const Compression compression = GetParam();
  OneServer job(unix_pair());
  const size_t n = kSlice + 21;
  std::vector<float>& gradient = job.array(n);
  std::vector<float>& landing = job.array(n);
  std::vector<float> residual(n);
  const int key = job.key(3, n, compression);
  int done = 0;
  for (int round = 1; round <= 4; ++round) {
    for (size_t i = 0; i < n; ++i) gradient[i] = float((int(i) * 7 + round) % 23 - 11) * 0.05f;
    const bool skips = round == 3;
    if (skips)
      job.worker.skip(key, landing.data(), 0, job.results.expect(round));
    else
      job.worker.push(key, gradient.data(), landing.data(), 0, {}, job.results.expect(round));
    for (size_t offset : {size_t{0}, size_t{kSlice}}) {
      const Header header = job.server.must_receive();
      const size_t count = std::min<size_t>(kSlice, n - offset);
      if (!skips) {
        std::vector<char> expected(encoded_bytes(compression, DType::kFloat32, count));
        encode(compression, gradient.data() + offset, residual.data() + offset, expected.data(), count);
        EXPECT_EQ(encoding_of(header), compression.encoding);
        ASSERT_EQ(job.server.payload, expected) << "round " << round;
      }
      job.answer(header, std::vector<float>(count, float(round)));
    }
    ASSERT_TRUE(job.results.wait_for(static_cast<size_t>(++done)));
    EXPECT_EQ(landing, std::vector<float>(n, float(round)));
  }
}

// A loss scaler leaves out the second round and halves its scale: the third is as if there had been no second.
TEST_P(WorkerWithResidual, GoesBackBehindAPushThatWasLeftOutAndFollowsTheScale) {
  const Compression compression = GetParam();
  OneServer job(unix_pair());
  const size_t n = kSlice + 21;
  std::vector<float>&gradient = job.array(n), &landing = job.array(n), &captured = job.array(n);
  std::vector<float> residual(n);
  const int key = job.key(3, n, compression);
  EXPECT_THROW(job.worker.change_residual(key, true, 1), Error);  // nothing was kept
  for (double factor : {-0.5, -1.0, HUGE_VAL, std::nan("")})
    EXPECT_THROW(job.worker.change_residual(key, false, factor), Error);
  job.worker.keep_former_residual(key);
  for (int round = 1; round <= 4; ++round) {
    for (size_t i = 0; i < n; ++i) gradient[i] = float((int(i) * 7 + round) % 23 - 11) * 0.05f;
    std::vector<float> sent = residual;
    job.worker.push(key, gradient.data(), landing.data(), 0, {}, job.results.expect(round));
    EXPECT_THROW(job.worker.change_residual(key, false, 2), Error);  // under way
    for (size_t offset : {size_t{0}, size_t{kSlice}}) {
      const Header header = job.server.must_receive();
      const size_t count = std::min<size_t>(kSlice, n - offset);
      std::vector<char> expected(encoded_bytes(compression, DType::kFloat32, count));
      encode(compression, gradient.data() + offset, sent.data() + offset, expected.data(), count);
      ASSERT_EQ(job.server.payload, expected) << "round " << round;
      job.answer(header, std::vector<float>(count, float(round)));
    }
    ASSERT_TRUE(job.results.wait_for(static_cast<size_t>(round)));
    if (round != 2) residual = sent;
    if (round != 2) continue;
    job.worker.change_residual(key, true, 0.5);
    for (float& one : residual) one *= 0.5f;
  }
  job.worker.change_residual(key, true, 1);  // of the last round, whose residual is then that of the third
  job.worker.change_residual(key, false, 4);
  job.worker.capture(key, 0, captured.data(), job.results.expect(5));
  for (int i = 0; i < 2; ++i) {
    Header header = job.server.must_receive();
    header.kind = FrameKind::kPart;
    job.server.send(header, nullptr);
  }
  ASSERT_TRUE(job.results.wait_for(5));
  EXPECT_NE(captured, residual);
  for (size_t i = 0; i < n; ++i) gradient[i] = float((int(i) * 7 + 4) % 23 - 11) * 0.05f;
  for (size_t offset : {size_t{0}, size_t{kSlice}}) {
    const size_t count = std::min<size_t>(kSlice, n - offset);
    for (size_t i = offset; i < offset + count; ++i) captured[i] /= 4;
    std::vector<char> expected(encoded_bytes(compression, DType::kFloat32, count));
    encode(compression, gradient.data() + offset, captured.data() + offset, expected.data(), count);
  }
  EXPECT_EQ(captured, residual);  // what was captured was from before the fourth push
}

INSTANTIATE_TEST_SUITE_P(WorkerCompression, WorkerWithResidual, testing::Values(kTwoBits, kOneBit),
                         [](const auto& with) { return with.index == 0 ? "TwoBits" : "OneBit"; });

TEST(WorkerCompression, CompressedSlicesLeaveByPriorityToo) {
  OneServer job(tcp_pair(4096));
  const uint64_t elements = 4 * kSlice;
  std::vector<float>& gradient = job.array(elements);
  std::vector<float>& landing = job.array(elements);
  for (int layer : {2, 1, 0}) {
    const int key = job.key(static_cast<uint32_t>(layer), elements, kHalves);
    job.worker.push(key, gradient.data(), landing.data(), -layer, {}, job.results.expect(layer));
    ASSERT_TRUE(job.server.readable(kDeadlineMs));
  }
  std::vector<uint32_t> order;
  for (int i = 0; i < 12; ++i) order.push_back(job.server.must_receive().key);
  EXPECT_EQ(order, (std::vector<uint32_t>{2, 0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2}));
}

TEST(WorkerInit, MayComeAgainAtAnyRound) {
  OneServer job(unix_pair());
  std::vector<float>& data = job.array(10, 1);
  std::vector<float>& landing = job.array(10);
  const int key = job.key(3, 10);
  job.worker.init(key, data.data(), landing.data(), 0, job.results.expect(0));
  job.worker.push(key, data.data(), landing.data(), 0, {}, job.results.expect(1));
  job.worker.init(key, data.data(), landing.data(), 0, job.results.expect(2));
  job.worker.push(key, data.data(), landing.data(), 0, {}, job.results.expect(3));
  const std::vector<std::pair<FrameKind, uint64_t>> expected = {
      {FrameKind::kInit, 0}, {FrameKind::kPush, 1}, {FrameKind::kInit, 1}, {FrameKind::kPush, 2}};
  for (size_t i = 0; i < expected.size(); ++i) {
    const Header header = job.server.must_receive();
    EXPECT_EQ(header.kind, expected[i].first);
    EXPECT_EQ(header.round, expected[i].second);
    EXPECT_EQ(job.server.payload.size(), 40u);
    job.answer(header, std::vector<float>(10, float(i)));
    ASSERT_TRUE(job.results.wait_for(i + 1));
    EXPECT_EQ(landing, std::vector<float>(10, float(i)));
  }
}

TEST(WorkerState, IsFetchedAndStoredInTheTypeOfSumsBetweenTheRounds) {
  OneServer job(unix_pair());
  std::vector<half> weight(kSlice + 5), value(kSlice + 5);
  std::vector<float>& state = job.array(kSlice + 5);
  const std::vector<float>& content = job.array(kSlice + 5, 4);
  const int key = job.key(3, weight.size(), {}, DType::kFloat16);
  job.worker.push(key, weight.data(), value.data(), 0, {}, job.results.expect(0));
  job.worker.fetch(key, kMaster, state.data(), job.results.expect(1));
  job.worker.store(key, 2, content.data(), job.results.expect(2));
  const size_t counts[] = {kSlice, 5};
  for (FrameKind kind : {FrameKind::kPush, FrameKind::kFetch, FrameKind::kStore}) {
    for (size_t count : counts) {
      Header header = job.server.must_receive();
      EXPECT_EQ(header.kind, kind);
      EXPECT_EQ(header.round, 1u);
      if (kind == FrameKind::kPush) {
        header.kind = FrameKind::kValue;
        job.server.send(header, job.server.payload.data());
        continue;
      }
      EXPECT_EQ(header.dtype, static_cast<uint8_t>(DType::kFloat32));
      const bool fetches = kind == FrameKind::kFetch;
      EXPECT_EQ(header.part, fetches ? kMaster : 2);
      EXPECT_EQ(encoding_of(header), fetches ? Encoding::kAbsent : Encoding::kPlain);
      ASSERT_EQ(job.server.payload.size(), fetches ? 0 : count * sizeof(float));
      if (!fetches) {
        EXPECT_EQ(std::memcmp(job.server.payload.data(), content.data(), count * sizeof(float)), 0);
      }
      header.kind = FrameKind::kPart;
      header.encoding = static_cast<uint8_t>(fetches ? Encoding::kPlain : Encoding::kAbsent);
      header.payload_bytes = static_cast<uint32_t>(fetches ? count * sizeof(float) : 0);
      job.server.send(header, std::vector<float>(count, float(count)).data());
    }
  }
  ASSERT_TRUE(job.results.wait_for(3));
  EXPECT_EQ(job.results.finished(), (std::vector<int>{0, 1, 2}));
  for (size_t i = 0; i < 3; ++i) EXPECT_EQ(job.results.text(i), "");
  EXPECT_EQ(state.front(), float(kSlice));
  EXPECT_EQ(state.back(), 5);
}

TEST(WorkerAnswers, OfAnotherKindPartOrEncodingAreRefused) {
  struct Case {
    const char* what;
    FrameKind asked;  // kBye: a skip
    Compression compression;
    void (*change)(Header&);
  };
  const auto to = [](Header& h, Encoding encoding) {
    h.encoding = static_cast<uint8_t>(encoding);
    h.payload_bytes = static_cast<uint32_t>(encoded_bytes(encoding, DType::kFloat32, 16));
  };
  static const auto as = to;
  const Case cases[] = {
      {"another encoding", FrameKind::kPush, {}, [](Header& h) { as(h, Encoding::kAbsent); }},
      {"another encoding", FrameKind::kPush, {}, [](Header& h) { as(h, Encoding::kFloat16); }},
      {"another encoding", FrameKind::kPush, kTwoBits, [](Header& h) { as(h, Encoding::kTwoBit); }},
      {"another encoding", FrameKind::kPush, kTwoBits, [](Header& h) { as(h, Encoding::kFloat16); }},
      {"another encoding", FrameKind::kPush, kOneBit, [](Header& h) { as(h, Encoding::kOneBit); }},
      {"another encoding", FrameKind::kInit, kHalves, [](Header& h) { as(h, Encoding::kFloat16); }},
      {"another encoding", FrameKind::kInit, {}, [](Header& h) { as(h, Encoding::kAbsent); }},
      {"another encoding", FrameKind::kFetch, kHalves, [](Header& h) { as(h, Encoding::kFloat16); }},
      {"another encoding", FrameKind::kFetch, {}, [](Header& h) { as(h, Encoding::kAbsent); }},
      {"another encoding", FrameKind::kStore, {}, [](Header& h) { as(h, Encoding::kPlain); }},
      {"wrongly sized", FrameKind::kPush, kHalves,
       [](Header& h) {
         as(h, Encoding::kFloat16);
         h.payload_bytes *= 2;
       }},
      {"wrongly sized", FrameKind::kFetch, {}, [](Header& h) { h.payload_bytes += 4; }},
      {"wrongly sized", FrameKind::kFetch, {}, [](Header& h) { h.dtype = 1; }},
      {"unexpected", FrameKind::kFetch, {}, [](Header& h) { h.part = 2; }},
      {"unexpected", FrameKind::kFetch, {}, [](Header& h) { h.kind = FrameKind::kValue; }},
      {"unexpected", FrameKind::kPush, {}, [](Header& h) { h.kind = FrameKind::kPart; }},
      {"unexpected", FrameKind::kPush, {}, [](Header& h) { h.part = 1; }},
      {"unexpected", FrameKind::kInit, {}, [](Header& h) { h.kind = FrameKind::kPart; }},
      {"another encoding", FrameKind::kBye, {}, [](Header& h) { as(h, Encoding::kFloat16); }},
  };
  for (const Case& each : cases) {
    SCOPED_TRACE(&each - cases);
    OneServer job(unix_pair());
    std::vector<float>& data = job.array(16, 3);
    std::vector<float>& landing = job.array(16, 3);
    const int key = job.key(3, 16, each.compression);
    const Worker::Done done = job.results.expect(0);
    const bool about_state = each.asked == FrameKind::kFetch || each.asked == FrameKind::kStore;
    if (each.asked == FrameKind::kPush) job.worker.push(key, data.data(), landing.data(), 0, {}, done);
    if (each.asked == FrameKind::kInit) job.worker.init(key, data.data(), landing.data(), 0, done);
    if (each.asked == FrameKind::kFetch) job.worker.fetch(key, 1, landing.data(), done);
    if (each.asked == FrameKind::kStore) job.worker.store(key, 1, data.data(), done);
    if (each.asked == FrameKind::kBye) job.worker.skip(key, landing.data(), 0, done);
    Header answer = job.server.must_receive();
    answer.kind = about_state ? FrameKind::kPart : FrameKind::kValue;
    as(answer, each.asked == FrameKind::kStore ? Encoding::kAbsent : Encoding::kPlain);
    each.change(answer);
    job.server.send_bytes(&answer, sizeof answer);
    ASSERT_TRUE(job.results.wait_for(1));
    EXPECT_NE(job.results.text(0).find(each.what), std::string::npos) << job.results.text(0);
    EXPECT_EQ(landing, std::vector<float>(16, 3));
  }
}

TEST(WorkerCounters, TellOfEachKeyAndEachServer) {
  OneServer job(unix_pair());
  std::vector<float>& data = job.array(10);
  std::vector<float>& landing = job.array(10);
  const int first = job.key(0, 10), second = job.key(1, 10);
  job.worker.init(first, data.data(), landing.data(), 0, job.results.expect(0));
  job.answer(job.server.must_receive(), data);
  ASSERT_TRUE(job.results.wait_for(1));
  for (size_t round = 1; round <= 3; ++round) {
    job.worker.push(first, data.data(), landing.data(), 0, {}, job.results.expect(1));
    job.answer(job.server.must_receive(), data);
    ASSERT_TRUE(job.results.wait_for(1 + round));
  }
  const KeyCounters counters = job.worker.key_counters(first);
  EXPECT_EQ(counters.rounds, 3u);
  EXPECT_GT(counters.longest_wait_s, 0);
  EXPECT_LE(counters.longest_wait_s, counters.waited_s);
  EXPECT_EQ(job.worker.key_counters(second).rounds, 0u);
  const Traffic traffic = job.worker.traffic_with(0);
  EXPECT_EQ(traffic.slices_sent, 4u);
  EXPECT_EQ(traffic.slices_received, 4u);
  EXPECT_EQ(traffic.queued_slices, 0u);
  EXPECT_GE(traffic.peak_queued_slices, 1u);
  EXPECT_GT(traffic.queued_s, 0);
  EXPECT_GT(job.worker.counters().system_calls, traffic.slices_sent + traffic.slices_received);
  EXPECT_THROW(job.worker.traffic_with(1), Error);
  EXPECT_THROW(job.worker.traffic_with(-1), Error);
  EXPECT_THROW(job.worker.key_counters(2), Error);
}

TEST(WorkerCounters, MayBeReadWhileTheWorkerFails) {
  OneServer job(unix_pair());
  std::thread reader([&job] {
    while (!job.worker.error()) job.worker.counters();
    for (int i = 0; i < 1000; ++i) job.worker.counters();
  });
  job.worker.fail(Error(ErrorKind::kRemote, "worker 0 (test): out of cheese"));
  EXPECT_EQ(job.server.receive_failure(), "worker 0 (test): out of cheese");
  reader.join();
}

TEST(WorkerDeclare, RefusesAnImpossibleCompression) {
  OneServer job(unix_pair());
  EXPECT_THROW(job.worker.declare("x", 10, DType::kFloat32, {Encoding::kTwoBit, 0}), Error);
}

}  // namespace
}  // namespace p3
