// Keys of norms: what a server tells of what it has summed, and when.
#include "numeric/norm.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "base/half.h"
#include "base/simd.h"
#include "p3/server.h"
#include "server/server_job.h"

namespace p3 {
namespace {

constexpr uint32_t kNorm = 9;  // the key

struct NormJob : Job {
  using Job::Job;

  // Before all other keys.
  void define_norm() {
    KeyPlan plan;
    plan.wire_key = kNorm;
    plan.dtype = DType::kFloat64;
    plan.elements = plan.slice_elements = kNormElements;
    plan.reduction = Reduction::kNorm;
    server.define(plan, "norm", 0);
  }

  Header norm_header(FrameKind kind, uint64_t round, bool with_value = false) {
    Header made = header(kind, kNorm, 0, round, 0, 1 << 19);
    made.dtype = static_cast<uint8_t>(DType::kFloat64);
    made.payload_bytes = with_value ? kNormElements * sizeof(double) : 0;
    made.encoding = static_cast<uint8_t>(with_value ? Encoding::kPlain : Encoding::kAbsent);
    return made;
  }

  void initialise_norm() {
    const double zeros[kNormElements] = {};
    for (size_t i = 0; i < workers.size(); ++i) {
      workers[i].send(norm_header(FrameKind::kInit, 0, i == 0), zeros);
    }
    for (size_t i = 0; i < workers.size(); ++i) EXPECT_EQ(receive_norm(static_cast<int>(i)).squares, 0);
  }

  void begin_norm(int worker, uint64_t round, bool goes_on = true) {
    Header push = norm_header(FrameKind::kPush, round);
    push.part = goes_on;
    workers[static_cast<size_t>(worker)].send(push);
  }

  NormPart receive_norm(int worker) {
    RawPeer& peer = workers[static_cast<size_t>(worker)];
    const Header header = peer.must_receive();
    EXPECT_EQ(header.kind, FrameKind::kValue);
    EXPECT_EQ(header.key, kNorm);
    EXPECT_EQ(header.priority, header.round == 0 ? 0 : 1 << 19);
    EXPECT_EQ(peer.payload.size(), kNormElements * sizeof(double));
    double told[kNormElements] = {};
    std::memcpy(told, peer.payload.data(), std::min(peer.payload.size(), sizeof told));
    return {told[0], told[1]};
  }
};

class Norms : public testing::TestWithParam<std::tuple<SumOrder, int>> {
 protected:
  static ServerOptions with() { return options(std::get<0>(GetParam()), std::get<1>(GetParam())); }
};

TEST_P(Norms, AreOfTheMeansOfTheRoundWhoeverComesLast) {
  NormJob job(2, with());
  job.define_norm();
  job.axes.reduction = Reduction::kMean;
  for (uint32_t key : {1u, 2u}) job.define(key, 2);
  job.initialise_norm();
  for (uint32_t key : {1u, 2u}) job.initialise(key, {0, 0});
  const unsigned seed = std::random_device()();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937 random(seed);
  for (uint64_t round = 1; round <= 32; ++round) {
    const float scale = static_cast<float>(round);
    std::vector<std::pair<int, uint32_t>> pushes;
    for (int worker : {0, 1})
      for (uint32_t key : {1u, 2u, kNorm}) pushes.push_back({worker, key});
    std::shuffle(pushes.begin(), pushes.end(), random);
    for (const auto& [worker, key] : pushes) {
      if (key == kNorm)
        job.begin_norm(worker, round);
      else if (key == 2 && round % 4 == 0)
        job.skip(worker, key, round);  // nobody has a gradient
      else
        job.push(worker, key, round, {scale * static_cast<float>(key), -scale * static_cast<float>(worker)});
    }
    // Of key 1: scale, -scale / 2. Of key 2: 2 scale, -scale / 2.
    const double first = 1.25 * scale * scale, second = round % 4 == 0 ? 0 : 4.25 * scale * scale;
    for (int worker : {0, 1}) {
      int norms = 0;
      for (int answer = 0; answer < 3; ++answer) {
        RawPeer& peer = job.workers[static_cast<size_t>(worker)];
        const Header header = peer.must_receive();
        EXPECT_EQ(header.round, round);
        if (header.key != kNorm) continue;
        ++norms;
        double told[kNormElements];
        ASSERT_EQ(peer.payload.size(), sizeof told);
        std::memcpy(told, peer.payload.data(), sizeof told);
        EXPECT_EQ(told[0], first + second);
        EXPECT_EQ(told[1], round % 4 == 0 ? scale : 2 * scale);
      }
      EXPECT_EQ(norms, 1);
    }
  }
}

TEST_P(Norms, OfNothingAreZeroAndComeAtOnce) {
  NormJob job(2, with());
  job.define_norm();
  job.initialise_norm();
  for (uint64_t round = 1; round <= 8; ++round) {
    for (int worker : {1, 0}) job.begin_norm(worker, round);
    for (int worker : {0, 1}) {
      const NormPart told = job.receive_norm(worker);
      EXPECT_EQ(told.squares, 0);
      EXPECT_EQ(told.largest, 0);
    }
  }
}

TEST_P(Norms, OfAStepThatNoWorkerTakesAreAbsentWhateverWasPushed) {
  NormJob job(2, with());
  job.define_norm();
  job.define(1, 2);
  job.initialise_norm();
  job.initialise(1, {0, 0});
  const bool takes_step[][2] = {{true, false}, {false, false}, {false, true}, {true, true}, {false, false}};
  for (uint64_t round = 1; round <= 5; ++round) {
    const bool* takes = takes_step[round - 1];
    for (int worker : {0, 1}) {
      job.begin_norm(worker, round, takes[worker]);
      job.skip(worker, 1, round);
    }
    for (int worker : {0, 1})
      for (int answer = 0; answer < 2; ++answer) {
        const Header header = job.workers[static_cast<size_t>(worker)].must_receive();
        const bool is_absent = static_cast<Encoding>(header.encoding) == Encoding::kAbsent;
        EXPECT_EQ(is_absent, header.key != kNorm || !(takes[0] || takes[1])) << round;
      }
  }
}

TEST_P(Norms, TellOfElementsThatAreNoNumbers) {
  NormJob job(1, with());
  job.define_norm();
  job.define(1, 3);
  job.initialise_norm();
  job.initialise(1, {0, 0, 0});
  const float bad[] = {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()};
  for (uint64_t round : {1u, 2u}) {
    job.begin_norm(0, round);
    job.push(0, 1, round, {1, bad[round - 1], 2});
    for (int answer : {0, 1}) {
      const Header header = job.workers[0].must_receive();
      if (header.key != kNorm) continue;
      double told[kNormElements];
      std::memcpy(told, job.workers[0].payload.data(), sizeof told);
      EXPECT_FALSE(std::isfinite(told[0])) << answer;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Orders, Norms,
                         testing::Combine(testing::Values(SumOrder::kRank, SumOrder::kArrival), testing::Values(0, 2)));

TEST(NormKeys, AreTheFirstOfTheirStoreAndNeedSums) {
  NormJob job(1);
  job.define(1, 2);
  EXPECT_THROW(job.define_norm(), Error);
  NormJob updated(1);
  updated.server.set_optimizer(0, {"sgd", {}});
  EXPECT_THROW(updated.define_norm(), Error);
  NormJob told(1);
  told.define_norm();
  EXPECT_THROW(told.server.set_optimizer(0, {"sgd", {}}), Error);
}

TEST(NormPart, IsTheSameInEveryBuildAndCloseToWhatItIs) {
  std::mt19937 random(3);
  std::normal_distribution<float> normal(0, 3);
  for (size_t count : {0u, 1u, 15u, 16u, 17u, 1000u}) {
    std::vector<float> values(count);
    long double exact = 0;
    double largest = 0;
    for (float& value : values) {
      value = normal(random);
      exact += static_cast<long double>(value) * value;
      largest = std::max(largest, std::fabs(double{value}));
    }
    const NormPart fast = norm_part(DType::kFloat32, values.data(), count);
    const bool before = use_avx2.exchange(false);
    const NormPart slow = norm_part(DType::kFloat32, values.data(), count);
    use_avx2 = before;
    EXPECT_EQ(fast.squares, slow.squares);
    EXPECT_EQ(fast.largest, slow.largest);
    EXPECT_EQ(fast.largest, largest);
    EXPECT_NEAR(fast.squares, static_cast<double>(exact), 1e-12 * static_cast<double>(exact));
    std::vector<double> wide(values.begin(), values.end());
    EXPECT_EQ(norm_part(DType::kFloat64, wide.data(), count).squares, fast.squares);
  }
  EXPECT_EQ(norm_part(DType::kInt32, "12345678", 2).squares, 0);
  const half halves[] = {float_to_half(3), float_to_half(-4)};
  EXPECT_EQ(norm_part(DType::kFloat16, halves, 2).squares, 25);
  EXPECT_EQ(norm_part(DType::kFloat16, halves, 2).largest, 4);
  const bfloat16 wider[] = {float_to_bfloat16(3), float_to_bfloat16(-4)};
  EXPECT_EQ(norm_part(DType::kBfloat16, wider, 2).squares, 25);
}

}  // namespace
}  // namespace p3
