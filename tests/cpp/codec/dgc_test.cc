#include "codec/dgc.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

#include "base/simd.h"
#include "p3/error.h"
#include "wire/top_k.h"

namespace p3 {
namespace {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN(), kInfinity = std::numeric_limits<float>::infinity();

// Both builds of the loops, where the CPU has both.
class Steps : public testing::TestWithParam<bool> {
 protected:
  void SetUp() override {
    if (GetParam() && !cpu_has_avx2()) GTEST_SKIP() << "this CPU has no AVX2";
    use_avx2 = GetParam();
  }
  void TearDown() override { use_avx2 = cpu_has_avx2(); }
};

std::vector<float> decoded(const std::vector<char>& payload, size_t sent, size_t elements) {
  std::vector<float> values(elements);
  if (sent == elements)
    std::copy_n(reinterpret_cast<const float*>(payload.data()), elements, values.begin());
  else
    each_of_top_k(payload.data(), elements, [&](size_t offset, float value) { values[offset] = value; });
  return values;
}

size_t bytes_of(size_t sent, size_t elements) {
  return sent == elements ? elements * sizeof(float) : top_k_bytes(sent, elements);
}

// One element after the other, and a sort.
struct Plain {
  explicit Plain(size_t elements) : u(elements), v(elements) {}

  std::vector<float> step(const DgcStep& step, const std::vector<float>& gradient) {
    std::vector<float> sent(u.size());
    for (size_t i = 0; i < u.size(); ++i) {
      const float carried = step.momentum * u[i], added = step.rate * gradient[i];
      u[i] = carried + added;
      v[i] = v[i] + u[i];
    }
    std::vector<size_t> order(u.size());
    std::iota(order.begin(), order.end(), size_t{0});
    std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return std::fabs(v[a]) > std::fabs(v[b]); });
    for (size_t i = 0; i < step.sent; ++i) {
      sent[order[i]] = v[order[i]];
      v[order[i]] = 0;
      if (step.masks) u[order[i]] = 0;
    }
    return sent;
  }

  std::vector<float> u, v;
};

TEST_P(Steps, SendWhatASortPutsFirst) {
  for (size_t n : {3, 8, 17, 1000, 50000, 70000}) {
    for (bool masks : {true, false}) {
      for (double ratio : {0.001, 0.02, 0.03, 0.3, 1.0}) {  // few of all blocks; just as many as count as few; more
        std::mt19937 random(static_cast<unsigned>(n));
        std::uniform_int_distribution<int> whole(-20, 20);  // so that many are equal
        Plain plain(n);
        std::vector<float> u(n), v(n), gradient(n);
        const DgcStep step{0.9f, 0.25f, masks, elements_to_send({ratio, 0, masks}, 1, n)};
        for (int round = 0; round < 4; ++round) {
          for (float& value : gradient) value = static_cast<float>(whole(random));
          std::vector<char> payload(bytes_of(step.sent, n));
          encode_step(step, gradient.data(), u.data(), v.data(), payload.data(), n);
          const std::vector<float> expected = plain.step(step, gradient);
          ASSERT_EQ(decoded(payload, step.sent, n), expected) << n << " elements, round " << round;
          ASSERT_EQ(u, plain.u) << n << " elements, round " << round;
          ASSERT_EQ(v, plain.v) << n << " elements, round " << round;
        }
      }
    }
  }
}

TEST_P(Steps, OfEqualElementsTheFirstOnesLeave) {
  const std::vector<float> gradient = {-2, 1, 2, 3, -2, 2, 0, 2};
  std::vector<float> u(8), v(8);
  std::vector<char> payload(top_k_bytes(3, 8));
  encode_step({0, 1, true, 3}, gradient.data(), u.data(), v.data(), payload.data(), 8);
  EXPECT_EQ(decoded(payload, 3, 8), (std::vector<float>{-2, 0, 2, 3, 0, 0, 0, 0}));
  EXPECT_EQ(v, (std::vector<float>{0, 1, 0, 0, -2, 2, 0, 2}));
  EXPECT_EQ(u, v);
}

TEST_P(Steps, ChooseAlsoAmongZeros) {
  std::vector<float> gradient(8), u(8), v(8);
  gradient[5] = 1;
  std::vector<char> payload(top_k_bytes(3, 8));
  encode_step({0.5f, 1, true, 3}, gradient.data(), u.data(), v.data(), payload.data(), 8);
  EXPECT_EQ(problem_with_top_k(payload.data(), payload.size(), 8), nullptr);
  EXPECT_EQ(decoded(payload, 3, 8), gradient);
}

// What the next step sends and keeps is what it would be if the gradient that has overflowed had never come.
TEST_P(Steps, AnOverflowIsSentAsNaNAndLeavesNothingBehind) {
  for (size_t n : {2, 8, 1000, 70000}) {
    for (bool masks : {true, false}) {
      std::mt19937 random(static_cast<unsigned>(n));
      std::normal_distribution<float> normal;
      Plain plain(n);
      std::vector<float> u(n), v(n), gradient(n);
      const DgcStep step{0.9f, 0.25f, masks, elements_to_send({0.02, 0, masks}, 1, n)};
      std::vector<char> payload(bytes_of(step.sent, n));
      for (float overflow : {kNaN, kInfinity, -kInfinity, 3e38f}) {
        for (float& value : gradient) value = normal(random);
        encode_step(step, gradient.data(), u.data(), v.data(), payload.data(), n);
        plain.step(step, gradient);
        std::vector<float> bad = gradient;
        bad[random() % n] = overflow;
        const bool overflows_in_sum = overflow == 3e38f;  // finite, but not with what is kept
        if (overflows_in_sum) bad.assign(n, std::numeric_limits<float>::max());
        const DgcStep last{0.9f, overflows_in_sum ? 4.0f : 0.25f, masks, step.sent};
        encode_step(last, bad.data(), u.data(), v.data(), payload.data(), n);
        if (step.sent < n) {
          ASSERT_EQ(problem_with_top_k(payload.data(), payload.size(), n), nullptr);
        }
        const std::vector<float> sent = decoded(payload, step.sent, n);
        for (size_t i = 0; i < n; ++i) ASSERT_EQ(std::isnan(sent[i]), i < step.sent) << i;
        ASSERT_EQ(u, plain.u) << n << " elements, " << overflow;
        ASSERT_EQ(v, plain.v) << n << " elements, " << overflow;
      }
    }
  }
}

// Where few leave, blocks of which none does are not looked at twice.
TEST_P(Steps, ChooseTheSameFewWhereverTheyAre) {
  for (size_t n : {64, 95, 1000}) {
    for (size_t place = 0; place < n; ++place) {
      for (float largest : {3e38f, -5.0f}) {
        std::vector<float> gradient(n), u(n), v(n);
        gradient[place] = largest;
        gradient[(place + 31) % n] = 0.5f;
        std::vector<char> payload(top_k_bytes(1, n));
        encode_step({0.5f, 1, false, 1}, gradient.data(), u.data(), v.data(), payload.data(), n);
        ASSERT_EQ(problem_with_top_k(payload.data(), payload.size(), n), nullptr);
        each_of_top_k(payload.data(), n, [&](size_t offset, float) { ASSERT_EQ(offset, place) << n; });
      }
    }
    std::vector<float> zeros(n), u(n), v(n);
    std::vector<char> payload(top_k_bytes(1, n));
    encode_step({0.5f, 1, false, 1}, zeros.data(), u.data(), v.data(), payload.data(), n);
    each_of_top_k(payload.data(), n, [&](size_t offset, float) { EXPECT_EQ(offset, 0u) << n; });
  }
}

// Nothing is rounded, so nothing may be lost: all that was sent, and what is kept, are the sum of all u.
TEST_P(Steps, SentAndKeptAreTheSumOfAllU) {
  const size_t n = 1000;
  for (bool masks : {true, false}) {
    std::mt19937 random(3);
    std::uniform_int_distribution<int> whole(-9, 9);
    std::vector<float> u(n), v(n), gradient(n), sum_of_sent(n), sum_of_u(n), before(n);
    const DgcStep step{1, 2, masks, elements_to_send({0.02, 0, masks}, 1, n)};
    for (int round = 0; round < 20; ++round) {
      for (float& value : gradient) value = static_cast<float>(whole(random));
      before = u;
      std::vector<char> payload(top_k_bytes(step.sent, n));
      encode_step(step, gradient.data(), u.data(), v.data(), payload.data(), n);
      const std::vector<float> sent = decoded(payload, step.sent, n);
      for (size_t i = 0; i < n; ++i) {
        sum_of_u[i] += before[i] + 2 * gradient[i];  // before masking
        sum_of_sent[i] += sent[i];
        ASSERT_EQ(sum_of_sent[i] + v[i], sum_of_u[i]) << i;
      }
    }
    EXPECT_GT(std::count(v.begin(), v.end(), 0.0f), 0);
    EXPECT_GT(std::count_if(v.begin(), v.end(), [](float value) { return value != 0; }), 0);
  }
}

// With a ratio of 1 and no masking this is SGD with momentum, to the bit.
TEST_P(Steps, OfAllElementsWithoutMaskingAreThoseOfPlainMomentum) {
  const size_t n = 100;
  const auto sgd = Optimizer::make({"sgd", {{"momentum", 0.9}}});
  std::mt19937 random(5);
  std::normal_distribution<float> normal;
  std::vector<float> weight(n, 1), reference(n, 1), velocity(n), u(n), v(n), gradient(n);
  for (int round = 1; round <= 5; ++round) {
    for (float& value : gradient) value = normal(random);
    RoundScalars scalars;
    scalars.lr = 0.1 * round;
    scalars.rescale = 0.3;
    void* state[] = {velocity.data()};
    sgd->update(DType::kFloat32, reference.data(), nullptr, state, gradient.data(), n, scalars);
    std::vector<float> sent(n);
    encode_step({0.9f, rate_of(scalars), false, n}, gradient.data(), u.data(), v.data(), sent.data(), n);
    decay_weight(decay_of(scalars), weight.data(), n);
    subtract_nonzero(weight.data(), sent.data(), n);
    ASSERT_EQ(weight, reference) << "round " << round;
  }
}

TEST_P(Steps, AreTakenInTheSameWayFromBothForms) {
  const size_t n = 1000;
  std::mt19937 random(5);
  std::normal_distribution<float> normal;
  std::vector<float> weight(n), sum(n);
  for (float& value : weight) value = normal(random);
  weight[3] = -0.0f;
  for (size_t i = 0; i < n; i += 7) sum[i] = normal(random);
  std::vector<float> other = weight, expected = weight;
  const size_t count = count_nonzero(sum.data(), n);
  EXPECT_EQ(count, 143u);
  std::vector<char> payload(top_k_bytes(count, n));
  encode_nonzero(sum.data(), count, payload.data(), n);
  EXPECT_EQ(decoded(payload, count, n), sum);
  decay_weight(0.125f, weight.data(), n);
  subtract_top_k(weight.data(), payload.data(), n);
  decay_weight(0.125f, other.data(), n);
  subtract_nonzero(other.data(), sum.data(), n);
  EXPECT_EQ(weight, other);
  for (size_t i = 0; i < n; ++i) expected[i] = expected[i] - 0.125f * expected[i] - sum[i];
  EXPECT_EQ(weight, expected);
}

INSTANTIATE_TEST_SUITE_P(Loops, Steps, testing::Bool(),
                         [](const auto& with) { return with.param ? "Avx2" : "Baseline"; });

TEST(DgcRatio, FallsByAQuarterInEachQuarterOfTheWarmUp) {
  const Dgc options{0.001, 10, true};
  const std::vector<double> expected = {0.25,     0.25,     0.25,       0.0625,     0.0625, 0.015625,
                                        0.015625, 0.015625, 0.00390625, 0.00390625, 0.001,  0.001};
  for (size_t i = 0; i < expected.size(); ++i) EXPECT_EQ(ratio_at(options, i + 1), expected[i]) << i + 1;
  EXPECT_EQ(ratio_at({0.1, 4, true}, 4), 0.1);  // never below it
  EXPECT_EQ(ratio_at({0.1, 0, true}, 1), 0.1);
}

TEST(DgcRatio, SendsAtLeastOneElementAndAllWhereThatTakesNoMoreBytes) {
  const Dgc options{0.001, 0, true};
  EXPECT_EQ(elements_to_send(options, 1, 0), 0u);
  EXPECT_EQ(elements_to_send(options, 1, 1), 1u);
  EXPECT_EQ(elements_to_send(options, 1, 2), 2u);  // 10 bytes and 8
  EXPECT_EQ(elements_to_send(options, 1, 3), 1u);
  EXPECT_EQ(elements_to_send(options, 1, 1000), 1u);
  EXPECT_EQ(elements_to_send(options, 1, 1001), 2u);
  EXPECT_EQ(elements_to_send(options, 1, 50000), 50u);
  EXPECT_EQ(elements_to_send({0.65, 0, true}, 1, 100), 65u);
  EXPECT_EQ(elements_to_send({0.66, 0, true}, 1, 100), 100u);
  EXPECT_EQ(elements_to_send({1, 0, true}, 1, 70000), 70000u);
}

TEST(DgcClipping, BoundsTheNormOfTheRescaledGradient) {
  const std::vector<float> gradient = {3, 0, 0, 0, 0, 0, 0, 0, 0, -4};
  EXPECT_EQ(clipping_of(gradient.data(), 10, 1, 5), 1);
  EXPECT_EQ(clipping_of(gradient.data(), 10, 1, 2.5), 0.5f);
  EXPECT_EQ(clipping_of(gradient.data(), 10, -0.5, 2.5), 1);
  EXPECT_EQ(clipping_of(gradient.data(), 10, 2, 2.5), 0.25f);
  EXPECT_EQ(clipping_of(gradient.data(), 0, 1, 2.5), 1);
  const float odd[] = {kNaN, 1};
  EXPECT_EQ(clipping_of(odd, 2, 1, 0.5), 1);  // and the gradient stays what it is
}

TEST(DgcRounds, AreKeptExactly) {
  for (uint64_t round :
       {uint64_t{0}, uint64_t{1}, uint64_t{(1 << 24) - 1}, uint64_t{1} << 24, (uint64_t{1} << 40) + 3}) {
    float two[kRoundFloats];
    write_round(round, two);
    EXPECT_EQ(read_round(two), round);
  }
  for (float wrong : {-1.0f, kNaN, kInfinity, 3e9f}) {
    const float two[kRoundFloats] = {0, wrong};
    EXPECT_THROW(read_round(two), Error);
  }
}

}  // namespace
}  // namespace p3
