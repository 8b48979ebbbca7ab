// Keys with deep gradient compression on their worker: what leaves, and what is made of what comes back.
#include <cstring>

#include "codec/dgc.h"
#include "wire/top_k.h"
#include "worker/worker_job.h"

namespace p3 {
namespace {

Compression top_k(double ratio, uint64_t warmup_rounds = 0, bool masking = true) {
  return {Encoding::kTopK, {ratio, static_cast<double>(warmup_rounds), 0, masking ? 1.0 : 0.0}};
}

RoundScalars scalars(double lr, double rescale = 1, double wd = 0) { return {lr, wd, rescale, 0, 1}; }

// The worker's part of each slice of a key, with the functions that have tests of their own.
struct Expected {
  Expected(size_t n, const Dgc& its_options, float its_momentum)
      : options(its_options), momentum(its_momentum), u(n), v(n) {}

  std::vector<char> payload(const std::vector<float>& gradient, size_t offset, size_t count, uint64_t round,
                            float rate) {
    const size_t sent = elements_to_send(options, round, count);
    std::vector<char> made(sent == count ? count * sizeof(float) : top_k_bytes(sent, count));
    encode_step({momentum, rate, options.masking, sent}, gradient.data() + offset, u.data() + offset, v.data() + offset,
                made.data(), count);
    return made;
  }

  const Dgc options;
  const float momentum;
  std::vector<float> u, v;
};

struct StepsJob : OneServer {
  StepsJob() : OneServer(unix_pair()) {}

  // Answers a push with that step.
  void answer_step(const Header& request, const std::vector<std::pair<size_t, float>>& chosen, size_t elements,
                   double decay = 0) {
    std::vector<char> payload(top_k_bytes(chosen.size(), elements));
    TopKWriter writer(payload.data(), chosen.size(), elements);
    for (const auto& [offset, value] : chosen) writer.add(offset, value);
    Header header = request;
    header.kind = FrameKind::kValue;
    header.encoding = static_cast<uint8_t>(Encoding::kTopK);
    header.payload_bytes = static_cast<uint32_t>(payload.size());
    header.scalars = scalars(1, 1, decay);
    server.send(header, payload.data());
  }
};

TEST(WorkerSteps, LeaveSliceBySliceWithWarmUpAlsoOverASkip) {
  for (bool masking : {true, false}) {
    StepsJob job;
    const size_t n = kSlice + 2;  // the last slice is too small for offsets
    const Compression compression = top_k(0.001, 5, masking);
    Expected expected(n, dgc_of(compression), 0.5f);
    std::vector<float>&gradient = job.array(n), &landing = job.array(n);
    const int key = job.key(3, n, compression);
    job.worker.set_momentum(key, 0.5, 0);
    for (uint64_t round = 1; round <= 7; ++round) {
      for (size_t i = 0; i < n; ++i) gradient[i] = float((i * 7919 + round * 104729) % 2003) - 1000.5f;
      const bool skips = round == 3;
      if (skips)
        job.worker.skip(key, landing.data(), 0, job.results.expect(0));
      else
        job.worker.push(key, gradient.data(), landing.data(), 0, scalars(0.1, 0.3), job.results.expect(0));
      for (size_t offset : {size_t{0}, size_t{kSlice}}) {
        const Header header = job.server.must_receive();
        const bool is_small = offset > 0;
        const size_t count = is_small ? 2 : kSlice;
        if (!skips) {
          ASSERT_EQ(job.server.payload, expected.payload(gradient, offset, count, round, 0.1f * 0.3f)) << round;
          EXPECT_EQ(static_cast<Encoding>(header.encoding), is_small ? Encoding::kPlain : Encoding::kTopK);
        }
        if (is_small)
          job.answer(header, {1, 2});
        else
          job.answer_step(header, {{5, 1.0f}}, count);
      }
      ASSERT_TRUE(job.results.wait_for(round));
      EXPECT_EQ(landing[5], -float(round));
      EXPECT_EQ(landing[kSlice + 1], 2);
    }
  }
}

TEST(WorkerSteps, OfAnEmptyKeyAreEmpty) {
  StepsJob job;
  std::vector<float>& landing = job.array(1);
  const int key = job.key(3, 0, top_k(0.1));
  job.worker.push(key, nullptr, landing.data(), 0, scalars(1), job.results.expect(0));
  Header header = job.server.must_receive();
  EXPECT_EQ(static_cast<Encoding>(header.encoding), Encoding::kPlain);
  EXPECT_EQ(header.payload_bytes, 0u);
  header.kind = FrameKind::kValue;
  job.server.send(header);
  ASSERT_TRUE(job.results.wait_for(1));
  EXPECT_EQ(job.results.text(0), "");
}

TEST(WorkerSteps, AreSubtractedFromWhatLandedLastBehindTheDecay) {
  StepsJob job;
  const size_t n = 20;
  std::vector<float>&value = job.array(n, 8), &landing = job.array(n);
  const int key = job.key(3, n, top_k(0.1));
  job.worker.init(key, value.data(), landing.data(), 0, job.results.expect(0));
  job.answer(job.server.must_receive(), value);
  ASSERT_TRUE(job.results.wait_for(1));
  std::vector<float> expected(n, 8);
  for (size_t round = 1; round <= 3; ++round) {
    const double decay = round == 2 ? 0.25 : 0;
    job.worker.push(key, value.data(), landing.data(), 0, scalars(1), job.results.expect(1));
    job.answer_step(job.server.must_receive(), {{0, 0.5f}, {round, -1.0f}, {n - 1, 3.0f}}, n, decay);
    ASSERT_TRUE(job.results.wait_for(1 + round));
    EXPECT_EQ(job.results.text(round), "");
    EXPECT_TRUE(job.results.updated(round));
    if (decay > 0)
      for (float& weight : expected) weight -= 0.25f * weight;
    expected[0] -= 0.5f;
    expected[round] += 1;
    expected[n - 1] -= 3;
    EXPECT_EQ(landing, expected);
  }
  job.worker.push(key, value.data(), landing.data(), 0, scalars(1), job.results.expect(2));
  job.answer(job.server.must_receive(), value);  // the whole value
  ASSERT_TRUE(job.results.wait_for(5));
  EXPECT_EQ(landing, value);
}

TEST(WorkerSteps, AreClippedByTheNormOfTheWholeKey) {
  StepsJob job;
  const size_t n = kSlice + 100;
  std::vector<float>&gradient = job.array(n), &landing = job.array(n);
  gradient[0] = 3;
  gradient[kSlice] = -4;
  const int key = job.key(3, n, top_k(0.01));
  job.worker.set_momentum(key, 0, 1.25);  // the rescaled norm is 2.5
  job.worker.push(key, gradient.data(), landing.data(), 0, scalars(2, 0.5), job.results.expect(0));
  for (float expected : {1.5f, -2.0f}) {
    job.server.must_receive();
    float first = 0;
    each_of_top_k(job.server.payload.data(), expected > 0 ? kSlice : 100, [&](size_t offset, float value) {
      if (offset == 0) first = value;
    });
    EXPECT_EQ(first, expected);
  }
  EXPECT_THROW(
      job.worker.push(key, gradient.data(), landing.data(), 0, scalars(1), job.results.expect(0), /*gated=*/true),
      Error);
}

TEST(WorkerSteps, LeaveAsTheGradientBecomesReady) {
  StepsJob job;
  const size_t n = 2 * kSlice;
  const Compression compression = top_k(0.001);
  Expected expected(n, dgc_of(compression), 0);
  std::vector<float>&gradient = job.array(n), &landing = job.array(n);
  const int key = job.key(3, n, compression);
  job.worker.push(key, gradient.data(), landing.data(), 0, scalars(1), job.results.expect(0), /*gated=*/true);
  for (size_t offset : {size_t{0}, size_t{kSlice}}) {
    for (size_t i = 0; i < kSlice; ++i) gradient[offset + i] = float((i * 7919 + offset) % 2003);
    job.worker.ready(key, offset + kSlice);
    job.answer_step(job.server.must_receive(), {}, kSlice);
    EXPECT_EQ(job.server.payload, expected.payload(gradient, offset, kSlice, 1, 1));
  }
  ASSERT_TRUE(job.results.wait_for(1));
}

TEST(WorkerSteps, GoOnFromACaptureWithTheWarmUp) {
  const Compression compression = top_k(0.02, 8);
  const size_t n = 1000;
  std::vector<float> kept, gradient(n), landing(n);
  for (size_t i = 0; i < n; ++i) gradient[i] = float((i * 7919) % 1009);
  std::vector<std::vector<char>> whole, resumed;
  const auto run = [&](StepsJob& job, int key, int rounds, std::vector<std::vector<char>>& sent) {
    job.worker.set_momentum(key, 0.9, 0);
    for (int round = 1; round <= rounds; ++round) {
      job.worker.push(key, gradient.data(), landing.data(), 0, scalars(1), job.results.expect(0));
      job.answer_step(job.server.must_receive(), {}, n);
      sent.push_back(job.server.payload);
      ASSERT_TRUE(job.results.wait_for(static_cast<size_t>(round)));
    }
  };
  {
    StepsJob job;
    run(job, job.key(1, n, compression), 6, whole);
  }
  {
    StepsJob job;
    const int key = job.key(1, n, compression);
    run(job, key, 3, resumed);
    EXPECT_TRUE(job.worker.keeps_residual(key));
    kept.resize(job.worker.residual_floats(key));
    EXPECT_EQ(kept.size(), 2 * n + 2);
    job.worker.capture(key, 0, kept.data(), job.results.expect(1));
    Header answer = job.server.must_receive();
    EXPECT_EQ(answer.kind, FrameKind::kCapture);
    answer.kind = FrameKind::kPart;
    job.server.send(answer);
    ASSERT_TRUE(job.results.wait_for(4));
  }
  {
    StepsJob job;
    const int key = job.key(1, n, compression);
    job.worker.restore_residual(key, kept.data());
    run(job, key, 3, resumed);
    EXPECT_THROW(job.worker.restore_residual(key, kept.data()), Error);
  }
  EXPECT_EQ(resumed, whole);
}

TEST(WorkerSteps, HaveAMomentumThatIsSetBeforeThem) {
  StepsJob job;
  std::vector<float>&gradient = job.array(10, 1), &landing = job.array(10);
  const int key = job.key(1, 10, top_k(0.1)), plain = job.key(2, 10);
  EXPECT_THROW(job.key(3, 10, top_k(0.1), DType::kFloat16), Error);
  EXPECT_THROW(job.worker.set_momentum(plain, 0.9, 0), Error);
  EXPECT_THROW(job.worker.set_momentum(key, -0.9, 0), Error);
  EXPECT_THROW(job.worker.set_momentum(key, 0.9, -1), Error);
  EXPECT_THROW(job.worker.residual_floats(plain), Error);
  job.worker.set_momentum(key, 0.9, 0);
  job.worker.push(key, gradient.data(), landing.data(), 0, scalars(1), job.results.expect(0));
  job.answer_step(job.server.must_receive(), {}, 10);
  ASSERT_TRUE(job.results.wait_for(1));
  EXPECT_THROW(job.worker.set_momentum(key, 0.9, 0), Error);
}

TEST(WorkerSteps, ThatMakeNoSenseAreRefusedAndChangeNothing) {
  struct Case {
    const char* what;
    bool is_push, takes_steps;
    std::vector<std::pair<size_t, float>> chosen;
    void (*change)(Header&);
  };
  const auto nothing = [](Header&) {};
  const Case cases[] = {
      {"do not ascend within its slice", true, true, {{5, 1}, {4, 1}}, nothing},
      {"do not ascend within its slice", true, true, {{20, 1}}, nothing},
      {"than its number of elements says", true, true, {{4, 1}, {5, 1}}, [](Header& h) { h.payload_bytes -= 6; }},
      {"wrongly sized", true, true, {{5, 1}}, [](Header& h) { --h.payload_bytes; }},
      {"wrongly sized", true, true, {{5, 1}}, [](Header& h) { h.payload_bytes = 4 + 6 * 20; }},
      {"another encoding", true, false, {{5, 1}}, nothing},
      {"another encoding", false, true, {{5, 1}}, nothing},
      {"another encoding",
       true,
       true,
       {},
       [](Header& h) {
         h.encoding = static_cast<uint8_t>(Encoding::kAbsent);
         h.payload_bytes = 0;
       }},
  };
  for (const Case& each : cases) {
    SCOPED_TRACE(&each - cases);
    StepsJob job;
    std::vector<float>&data = job.array(20, 3), &landing = job.array(20, 3);
    const int key = job.key(3, 20, each.takes_steps ? top_k(0.1) : Compression{});
    if (each.is_push)
      job.worker.push(key, data.data(), landing.data(), 0, scalars(1), job.results.expect(0));
    else
      job.worker.init(key, data.data(), landing.data(), 0, job.results.expect(0));
    std::vector<char> payload(top_k_bytes(each.chosen.size(), 20));
    TopKWriter writer(payload.data(), each.chosen.size(), 20);
    for (const auto& [offset, value] : each.chosen) writer.add(offset, value);
    Header answer = job.server.must_receive();
    answer.kind = FrameKind::kValue;
    answer.encoding = static_cast<uint8_t>(Encoding::kTopK);
    answer.payload_bytes = static_cast<uint32_t>(payload.size());
    each.change(answer);
    payload.resize(answer.payload_bytes);
    job.server.send(answer, payload.data());
    ASSERT_TRUE(job.results.wait_for(1));
    EXPECT_NE(job.results.text(0).find(each.what), std::string::npos) << job.results.text(0);
    EXPECT_EQ(landing, std::vector<float>(20, 3));
  }
}

}  // namespace
}  // namespace p3
