#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "base/half.h"
#include "base/simd.h"
#include "p3/codec.h"
#include "p3/error.h"

namespace p3 {
namespace {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN(), kInfinity = std::numeric_limits<float>::infinity();
const std::vector<size_t> kSizes = {0, 1, 3, 15, 16, 17, 1023, 1024, 1025, 50000};

// Both builds of the loops, where the CPU has both.
class Compressed : public testing::TestWithParam<bool> {
 protected:
  void SetUp() override {
    if (GetParam() && !cpu_has_avx2()) GTEST_SKIP() << "this CPU has no AVX2";
    use_avx2 = GetParam();
  }
  void TearDown() override { use_avx2 = cpu_has_avx2(); }
};

Compression two_bit(float threshold) { return {Encoding::kTwoBit, double{threshold}}; }
constexpr Compression kHalves{Encoding::kFloat16, 0.5f}, kOneBit{Encoding::kOneBit, 0.5f};

std::vector<float> gradient(size_t elements, std::mt19937& random) {
  std::normal_distribution<float> normal(0, 0.6f);
  const float special[] = {-0.0f, 0.0f, 0.5f, -0.5f, 0.25f, -0.25f, 1e-40f, 1e37f, -1e37f};
  std::vector<float> values(elements);
  for (float& value : values) {
    const auto pick = random() % 64;
    value = pick < std::size(special) ? special[pick] : normal(random);
  }
  return values;
}

// One element after the other, as MXNet's documentation tells it.
std::vector<uint8_t> plain_two_bit(float threshold, const std::vector<float>& values, std::vector<float>& residual) {
  std::vector<uint8_t> payload((values.size() + 15) / 16 * 4, 0);
  for (size_t i = 0; i < values.size(); ++i) {
    residual[i] += values[i];
    int code = 0;
    if (residual[i] >= threshold) {
      code = 3;
      residual[i] -= threshold;
    } else if (residual[i] <= -threshold) {
      code = 2;
      residual[i] += threshold;
    }
    payload[i / 4] = static_cast<uint8_t>(payload[i / 4] | code << (6 - 2 * (i % 4)));
  }
  return payload;
}

// One element after the other, as one_bit.cc tells it.
std::vector<uint8_t> plain_one_bit(const std::vector<float>& values, std::vector<float>& residual) {
  const size_t n = values.size();
  if (n == 0) return {};
  double parts[2][8] = {};
  size_t counts[2] = {};
  for (size_t i = 0; i < n; ++i) {
    residual[i] += values[i];
    const bool is_plus = residual[i] >= 0;
    parts[is_plus][i % 8] += residual[i];
    ++counts[is_plus];
  }
  float means[2] = {};
  for (size_t side : {0, 1}) {
    double sum = 0;
    for (double part : parts[side]) sum += part;
    if (counts[side] > 0) means[side] = static_cast<float>(sum / static_cast<double>(counts[side]));
  }
  std::vector<uint8_t> payload(8 + (n + 7) / 8, 0);
  std::memcpy(payload.data(), &means[1], sizeof(float));
  std::memcpy(payload.data() + 4, &means[0], sizeof(float));
  for (size_t i = 0; i < n; ++i) {
    const bool is_plus = residual[i] >= 0;
    payload[8 + i / 8] = static_cast<uint8_t>(payload[8 + i / 8] | is_plus << (7 - i % 8));
    residual[i] -= means[is_plus];
  }
  return payload;
}

std::vector<float> ordinary_gradient(size_t elements, std::mt19937& random) {
  std::normal_distribution<float> normal(0.1f, 0.6f);
  std::vector<float> values(elements);
  for (float& value : values) value = normal(random);
  return values;
}

std::vector<uint32_t> bits(const std::vector<float>& values) {
  std::vector<uint32_t> made(values.size());
  for (size_t i = 0; i < values.size(); ++i) made[i] = std::isnan(values[i]) ? 1 : detail::bits_of(values[i]);
  return made;
}

TEST_P(Compressed, TwoBitsAreMXNetsAndWhatIsLeftOutComesLater) {
  for (float threshold : {0.5f, 0.3f}) {
    for (size_t n : kSizes) {
      std::mt19937 random(static_cast<unsigned>(n));
      std::vector<float> residual(n), expected_residual(n);
      for (int round = 0; round < 6; ++round) {
        const std::vector<float> values = gradient(n, random);
        const std::vector<uint8_t> expected = plain_two_bit(threshold, values, expected_residual);
        std::vector<uint8_t> payload(encoded_bytes(Encoding::kTwoBit, DType::kFloat32, n), 0xff);
        encode(two_bit(threshold), values.data(), residual.data(), payload.data(), n);
        ASSERT_EQ(payload, expected) << n << " elements, round " << round;
        ASSERT_EQ(bits(residual), bits(expected_residual)) << n << " elements, round " << round;
      }
    }
  }
}

TEST_P(Compressed, TwoBitsMeanTheThresholdInTheSum) {
  const uint8_t payload[4] = {0b11100001, 0b11000000, 0, 0};
  std::vector<float> sum(5, 9);
  start_encoded_sum(two_bit(0.3f), sum.data(), payload, 5);
  EXPECT_EQ(bits(sum), bits({0.3f, -0.3f, 0, kNaN, 0.3f}));
  add_encoded_to_sum(two_bit(0.3f), sum.data(), payload, 5);
  EXPECT_EQ(bits(sum), bits({0.6f, -0.6f, 0, kNaN, 0.6f}));
}

// What the next gradients send and leave out is what they would if the one that has overflowed had never come.
TEST_P(Compressed, AnOverflowIsSentAsNaNAndLeavesNothingBehind) {
  for (const Compression& compression : {two_bit(0.5f), kOneBit}) {
    const bool is_two_bit = compression.encoding == Encoding::kTwoBit;
    for (size_t n : kSizes) {
      if (n == 0) continue;
      std::mt19937 random(static_cast<unsigned>(n));
      std::vector<float> residual(n), undisturbed(n), sum(n);
      std::vector<uint8_t> payload(encoded_bytes(compression, DType::kFloat32, n)), expected = payload;
      for (float overflow : {kNaN, kInfinity, -kInfinity, std::numeric_limits<float>::max()}) {
        const std::vector<float> values = ordinary_gradient(n, random);
        encode(compression, values.data(), residual.data(), payload.data(), n);
        encode(compression, values.data(), undisturbed.data(), expected.data(), n);
        ASSERT_EQ(payload, expected) << n;
        std::vector<float> bad = values;
        const size_t place = random() % n;
        bad[place] = overflow;
        const bool is_finite = std::isfinite(overflow);  // but not with what was left out
        const float kept = residual[place];
        if (is_finite) residual[place] = overflow;
        std::fill(payload.begin(), payload.end(), uint8_t{0xff});
        encode(compression, bad.data(), residual.data(), payload.data(), n);
        if (is_finite) residual[place] = kept;
        ASSERT_EQ(bits(residual), bits(undisturbed)) << n << " elements, " << overflow;
        start_encoded_sum(compression, sum.data(), payload.data(), n);
        for (float value : sum) ASSERT_TRUE(std::isnan(value)) << n << " elements, " << overflow;
        // The bytes that the protocol names.
        std::vector<uint8_t> pinned(payload.size(), 0);
        if (is_two_bit) {
          for (size_t i = 0; i < n; ++i) pinned[i / 4] = static_cast<uint8_t>(pinned[i / 4] | 1 << (6 - 2 * (i % 4)));
        } else {
          std::memcpy(pinned.data(), &kNaN, sizeof kNaN);
          std::memcpy(pinned.data() + sizeof kNaN, &kNaN, sizeof kNaN);
        }
        ASSERT_EQ(payload, pinned) << n;
        // Others' finite gradients do not hide it.
        std::fill(sum.begin(), sum.end(), 1.0f);
        add_encoded_to_sum(compression, sum.data(), payload.data(), n);
        for (float value : sum) ASSERT_TRUE(std::isnan(value)) << n;
      }
    }
  }
}

TEST_P(Compressed, TwoBitsComeBackAtAnySizeAndAlignment) {
  for (size_t n : kSizes) {
    std::mt19937 random(static_cast<unsigned>(n));
    std::vector<float> residual(n), sum(n + 1, 7), expected(n);
    const std::vector<float> values = gradient(n, random);
    const size_t bytes = encoded_bytes(Encoding::kTwoBit, DType::kFloat32, n);
    EXPECT_EQ(bytes, (n + 15) / 16 * 4);
    std::vector<char> buffer(bytes + 2, 'x');
    encode(two_bit(0.5f), values.data(), residual.data(), buffer.data() + 1, n);  // as a payload may lie
    EXPECT_EQ(buffer.front(), 'x');
    EXPECT_EQ(buffer.back(), 'x');
    for (size_t i = 0; i < n; ++i) expected[i] = values[i] >= 0.5f ? 0.5f : values[i] <= -0.5f ? -0.5f : 0.0f;
    start_encoded_sum(two_bit(0.5f), sum.data(), buffer.data() + 1, n);
    EXPECT_EQ(bits({sum.begin(), sum.end() - 1}), bits(expected)) << n;
    add_encoded_to_sum(two_bit(0.5f), sum.data(), buffer.data() + 1, n);
    for (float& value : expected) value *= 2;
    EXPECT_EQ(bits({sum.begin(), sum.end() - 1}), bits(expected)) << n;
    EXPECT_EQ(sum.back(), 7);
  }
}

TEST_P(Compressed, OneBitMeansOneOfTwoMeansAndWhatIsLeftOutComesLater) {
  for (size_t n : kSizes) {
    std::mt19937 random(static_cast<unsigned>(n));
    std::vector<float> residual(n), expected_residual(n);
    for (int round = 0; round < 6; ++round) {
      const std::vector<float> values = ordinary_gradient(n, random);
      const std::vector<uint8_t> expected = plain_one_bit(values, expected_residual);
      std::vector<uint8_t> payload(encoded_bytes(Encoding::kOneBit, DType::kFloat32, n), 0xff);
      encode(kOneBit, values.data(), residual.data(), payload.data(), n);
      ASSERT_EQ(payload, expected) << n << " elements, round " << round;
      ASSERT_EQ(bits(residual), bits(expected_residual)) << n << " elements, round " << round;
    }
  }
}

TEST_P(Compressed, OneBitOfOneSideHasNoOtherMean) {
  for (float side : {1.0f, -1.0f}) {
    const float values[] = {side * 1, side * 2, side * 3};
    float residual[3] = {}, sum[3], means[2];
    uint8_t payload[9];
    encode(kOneBit, values, residual, payload, 3);
    std::memcpy(means, payload, sizeof means);
    EXPECT_EQ(means[0], side > 0 ? 2 : 0);
    EXPECT_EQ(means[1], side > 0 ? 0 : -2);
    EXPECT_EQ(payload[8], side > 0 ? 0b11100000 : 0);
    start_encoded_sum(kOneBit, sum, payload, 3);
    add_encoded_to_sum(kOneBit, sum, payload, 3);
    for (size_t i = 0; i < 3; ++i) EXPECT_EQ(sum[i], 4 * side);
    EXPECT_EQ(residual[0], -side);
    EXPECT_EQ(residual[2], side);
  }
}

// But for rounding.
TEST_P(Compressed, OneBitSentAndKeptAreWhatCame) {
  const size_t n = 1024;
  std::mt19937 random(7);
  std::vector<float> residual(n), sum(n), came(n);
  for (int round = 0; round < 5; ++round) {
    std::vector<float> values(n);
    for (size_t i = 0; i < n; ++i) values[i] = static_cast<float>(static_cast<int>(random() % 2001) - 1000) * 0x1p-2f;
    for (size_t i = 0; i < n; ++i) came[i] += values[i];
    std::vector<uint8_t> payload(encoded_bytes(Encoding::kOneBit, DType::kFloat32, n));
    encode(kOneBit, values.data(), residual.data(), payload.data(), n);
    (round == 0 ? start_encoded_sum : add_encoded_to_sum)(kOneBit, sum.data(), payload.data(), n);
    for (size_t i = 0; i < n; ++i) ASSERT_NEAR(sum[i] + residual[i], came[i], 1e-3) << i;
  }
}

TEST_P(Compressed, OneBitComesBackAtAnySizeAndAlignment) {
  for (size_t n : kSizes) {
    std::mt19937 random(static_cast<unsigned>(n));
    std::vector<float> residual(n), sum(n + 1, 7), expected(n);
    const std::vector<float> values = ordinary_gradient(n, random);
    const size_t bytes = encoded_bytes(Encoding::kOneBit, DType::kFloat32, n);
    EXPECT_EQ(bytes, n == 0 ? 0 : 8 + (n + 7) / 8);
    std::vector<char> buffer(bytes + 2, 'x');
    encode(kOneBit, values.data(), residual.data(), buffer.data() + 1, n);  // as a payload may lie
    EXPECT_EQ(buffer.front(), 'x');
    EXPECT_EQ(buffer.back(), 'x');
    float means[2] = {};
    if (n > 0) std::memcpy(means, buffer.data() + 1, sizeof means);
    for (size_t i = 0; i < n; ++i) expected[i] = values[i] >= 0 ? means[0] : means[1];
    start_encoded_sum(kOneBit, sum.data(), buffer.data() + 1, n);
    add_encoded_to_sum(kOneBit, sum.data(), buffer.data() + 1, n);
    for (float& value : expected) value *= 2;
    EXPECT_EQ(std::vector<float>(sum.begin(), sum.end() - 1), expected) << n;
    EXPECT_EQ(sum.back(), 7);
  }
}

TEST_P(Compressed, HalvesAreRoundedOnceAndSummedInFloat32) {
  for (size_t n : kSizes) {
    std::mt19937 random(static_cast<unsigned>(n));
    const std::vector<float> values = gradient(n, random);
    std::vector<uint16_t> payload(n + 1, 0x1234);
    encode(kHalves, values.data(), nullptr, payload.data(), n);
    EXPECT_EQ(encoded_bytes(Encoding::kFloat16, DType::kFloat32, n), 2 * n);
    EXPECT_EQ(payload.back(), 0x1234);
    std::vector<float> sum(n), expected(n);
    start_encoded_sum(kHalves, sum.data(), payload.data(), n);
    for (size_t i = 0; i < n; ++i) expected[i] = half_to_float(float_to_half(values[i]));
    EXPECT_EQ(bits(sum), bits(expected)) << n;
    add_encoded_to_sum(kHalves, sum.data(), payload.data(), n);
    for (float& value : expected) value += value;
    EXPECT_EQ(bits(sum), bits(expected)) << n;
  }
}

TEST_P(Compressed, HalvesOverflowToInfinity) {
  const float values[4] = {65504, 65520, -1e10f, 1e-10f};
  uint16_t payload[4];
  float sum[4];
  encode(kHalves, values, nullptr, payload, 4);
  start_encoded_sum(kHalves, sum, payload, 4);
  EXPECT_EQ(sum[0], 65504);
  EXPECT_EQ(sum[1], kInfinity);
  EXPECT_EQ(sum[2], -kInfinity);
  EXPECT_EQ(sum[3], 0);
}

TEST_P(Compressed, HalvesAreWidenedWhereTheyWereReceived) {
  for (size_t n : {0, 1, 2, 7, 8, 9, 1023, 1024, 1025, 2047, 2048, 2049, 50000}) {
    std::vector<float> values(n + 2, -1), expected(n);
    char* halves = reinterpret_cast<char*>(values.data() + 1) + n * sizeof(half);
    for (size_t i = 0; i < n; ++i) {
      const half value = float_to_half(static_cast<float>(i) * 0.5f - 300);
      std::memcpy(halves + i * sizeof(half), &value, sizeof value);
      expected[i] = half_to_float(value);
    }
    decode_in_place(kHalves, values.data() + 1, n);
    EXPECT_EQ(std::vector<float>(values.begin() + 1, values.end() - 1), expected) << n;
    EXPECT_EQ(values.front(), -1);
    EXPECT_EQ(values.back(), -1);
  }
}

INSTANTIATE_TEST_SUITE_P(Loops, Compressed, testing::Bool(),
                         [](const auto& with) { return with.param ? "Avx2" : "Baseline"; });

TEST(Compression, IsOfFloat32Only) {
  EXPECT_EQ(two_bit(0.5f).for_key(DType::kFloat32).encoding, Encoding::kTwoBit);
  for (DType type :
       {DType::kFloat64, DType::kFloat16, DType::kUint8, DType::kInt32, DType::kInt8, DType::kInt64, DType::kBfloat16})
    EXPECT_EQ(two_bit(0.5f).for_key(type).encoding, Encoding::kPlain) << name_of(type);
  EXPECT_EQ(encoded_bytes(Encoding::kPlain, DType::kFloat64, 3), 24u);
  EXPECT_EQ(encoded_bytes(Encoding::kAbsent, DType::kFloat64, 3), 0u);
}

TEST(Compression, NeedsAThresholdThatIsFiniteAndAboveZero) {
  for (float threshold : {0.0f, -0.5f, kInfinity, kNaN}) {
    EXPECT_THROW(check(two_bit(threshold)), Error) << threshold;
    EXPECT_NO_THROW(check({Encoding::kFloat16, threshold}));
  }
  EXPECT_NO_THROW(check(two_bit(0.5f)));
}

}  // namespace
}  // namespace p3
