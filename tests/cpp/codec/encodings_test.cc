#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <initializer_list>
#include <limits>
#include <random>
#include <tuple>
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

Compression top_k(double ratio, double value_bits = 8) { return {Encoding::kLargest, {ratio, value_bits}}; }
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

// One element after the other, as float16.cc tells it.
std::vector<float> scaled_halves(const std::vector<float>& values) {
  float largest = 0;
  for (float value : values)
    if (std::isfinite(value)) largest = std::max(largest, std::fabs(value));
  int exponent = 0;
  std::frexp(largest, &exponent);  // largest = 0.5 to 1 times 2^exponent
  const float scale = std::ldexp(1.0f, std::max(exponent - 15, -126));
  std::vector<float> made(values.size());
  for (size_t i = 0; i < values.size(); ++i) made[i] = half_to_float(float_to_half(values[i] / scale)) * scale;
  return made;
}

std::vector<float> decoded(const Compression& compression, const std::vector<char>& payload, size_t n) {
  std::vector<float> values(n, 7);
  start_encoded_sum(compression, values.data(), payload.data(), n);
  return values;
}

std::vector<char> encoded(const Compression& compression, const std::vector<float>& values,
                          std::vector<float>* residual = nullptr) {
  std::vector<float> none(values.size());
  std::vector<char> payload(encoded_bytes(compression, DType::kFloat32, values.size()), 'x');
  float* const kept = residual != nullptr ? residual->data() : none.data();
  encode(compression, values.data(), kept, payload.data(), values.size());
  return payload;
}

std::vector<char> bytes_of(std::initializer_list<int> bytes) { return {bytes.begin(), bytes.end()}; }

TEST_P(Compressed, HalvesAreScaledAndRoundedOnceAndSummedInFloat32) {
  for (size_t n : kSizes) {
    std::mt19937 random(static_cast<unsigned>(n));
    for (float unit : {1.0f, 1e-9f, 1e-37f, 1e30f}) {
      std::vector<float> values = ordinary_gradient(n, random);
      for (float& value : values) value *= unit;
      const std::vector<char> payload = encoded(kHalves, values);
      EXPECT_EQ(payload.size(), n == 0 ? 0 : 4 + 2 * n);
      std::vector<float> sum = decoded(kHalves, payload, n), expected = scaled_halves(values);
      EXPECT_EQ(bits(sum), bits(expected)) << n;
      for (size_t i = 0; i < n; ++i) ASSERT_NEAR(sum[i], values[i], std::fabs(values[i]) * 0x1p-11f + unit * 0x1p-36f);
      add_encoded_to_sum(kHalves, sum.data(), payload.data(), n);
      for (float& value : expected) value += value;
      EXPECT_EQ(bits(sum), bits(expected)) << n;
    }
  }
}

TEST_P(Compressed, HalvesKeepWhatIsNotFiniteAndOverflowNowhere) {
  const float most = std::numeric_limits<float>::max();
  const std::vector<std::vector<float>> cases = {
      {kNaN, 1.5f, -kInfinity, kInfinity, 0x1p-20f},
      {kInfinity},
      {most, -most, 0x1p100f},
      {0x1p-149f, -0x1p-140f},
      {0, -0.0f, kNaN},
      {0, 0},
      {65536, 65504, 2, 65520},
  };
  for (const std::vector<float>& values : cases) {
    const std::vector<float> got = decoded(kHalves, encoded(kHalves, values), values.size());
    EXPECT_EQ(bits(got), bits(scaled_halves(values)));
    for (size_t i = 0; i < values.size(); ++i) {
      EXPECT_EQ(std::isnan(got[i]), std::isnan(values[i])) << values[i];
      EXPECT_EQ(std::isinf(got[i]), std::isinf(values[i]) || values[i] == most || values[i] == -most) << values[i];
    }
  }
  EXPECT_EQ(encoded(kHalves, {3, -0.5f}), bytes_of({0, 0, 0, 0x39, 0, 0x76, 0, 0xec}));  // 2^-13 x 24576, x -4096
}

// What must hold of extremes, too: largest and smallest numbers, one among zeros, equal ones.
std::vector<std::vector<float>> hard_gradients(std::mt19937& random) {
  const float most = std::numeric_limits<float>::max();
  std::vector<std::vector<float>> made = {
      {},
      {0},
      {-0.0f, 0},
      {most},
      {most, -most, most, 1},
      {most, -most * 0.999f, 0x1p127f, 3e38f},
      {0x1p-149f, -0x1p-148f, 0x1p-126f},
      {0x1p-126f, most, -1},
      {1e-40f, 1e-30f, 1e-20f},
      std::vector<float>(129, 0.1f),
      std::vector<float>(300, -0x1p-149f),
  };
  for (size_t n : {1, 2, 3, 63, 64, 65, 127, 128, 129, 255, 256, 257, 511, 700, 3001}) {
    made.push_back(ordinary_gradient(n, random));
    made.push_back(ordinary_gradient(n, random));
    for (float& value : made.back()) value *= std::ldexp(1.0f, static_cast<int>(random() % 200) - 100);
    made.emplace_back(n, 0.0f);
    made.back()[random() % n] = -3.7f;
  }
  return made;
}

TEST_P(Compressed, WhatWasSentAndWhatIsKeptAreExactlyWhatCame) {
  const Compression all[] = {Encoding::kEightBit, Encoding::kFourBit, top_k(0.01), top_k(0.01, 4),
                             top_k(0.2, 5),       top_k(1, 8),        top_k(1, 4), top_k(1e-9, 6)};
  std::mt19937 random(5);
  for (const Compression& compression : all) {
    for (const std::vector<float>& values : hard_gradients(random)) {
      const size_t n = values.size();
      std::vector<float> residual(n);
      for (float& value : residual) value = 0x1p-130f * static_cast<float>(random() % 9);
      std::vector<float> came = residual;
      for (size_t i = 0; i < n; ++i) came[i] += values[i];
      const std::vector<float> sent = decoded(compression, encoded(compression, values, &residual), n);
      for (size_t i = 0; i < n; ++i) {
        ASSERT_TRUE(std::isfinite(sent[i]) && std::isfinite(residual[i]))
            << compression.codec()->name << " " << came[i];
        ASSERT_EQ(double{sent[i]} + residual[i], came[i]) << compression.codec()->name << " of " << n;
      }
    }
  }
}

TEST_P(Compressed, BlocksAreOffByHalfAStepAtMost) {
  for (const auto& [encoding, block, most] :
       {std::tuple{Encoding::kEightBit, 128, 127.f}, {Encoding::kFourBit, 64, 7.f}}) {
    for (size_t n : {1, 2, 63, 64, 65, 127, 128, 129, 1000}) {
      std::mt19937 random(static_cast<unsigned>(n));
      const std::vector<float> values = ordinary_gradient(n, random);
      const std::vector<char> payload = encoded(encoding, values);
      const size_t blocks = (n + static_cast<size_t>(block) - 1) / static_cast<size_t>(block);
      EXPECT_EQ(payload.size(), 2 * blocks + (most > 7 ? n : (n + 1) / 2));
      const std::vector<float> got = decoded(encoding, payload, n);
      for (size_t i = 0; i < n; ++i) {
        const auto first = values.begin() + static_cast<ptrdiff_t>(i / static_cast<size_t>(block)) * block;
        const auto end = std::min(first + block, values.end());
        float largest = 0;
        for (auto one = first; one != end; ++one) largest = std::max(largest, std::fabs(*one));
        ASSERT_LE(std::fabs(got[i] - values[i]), largest / most * 0.502f) << n;
      }
    }
  }
}

// The bytes that the protocol names.
TEST_P(Compressed, BlocksHaveTheseBytes) {
  EXPECT_EQ(encoded(Encoding::kEightBit, {127, -126.6f, 0, 1.5f, -0.4f}), bytes_of({0x80, 0x3f, 127, -127, 0, 2, 0}));
  EXPECT_EQ(encoded(Encoding::kFourBit, {-7, 1, 2.5f, -1, 3}), bytes_of({0x80, 0x3f, 0xf9, 0x31, 0x02}));
  std::vector<float> two(65, 1);
  two[64] = -14;
  const std::vector<char> payload = encoded(Encoding::kFourBit, two);
  EXPECT_EQ(payload.size(), 2 + 32 + 2 + 1u);
  EXPECT_EQ(std::vector<char>(payload.end() - 3, payload.end()), bytes_of({0x00, 0x40, 0x09}));
  for (const Compression& compression : {Compression(Encoding::kEightBit), Compression(Encoding::kFourBit)}) {
    std::vector<float> bad(129, 1);
    bad[128] = kInfinity;
    std::vector<char> expected(encoded_bytes(compression, DType::kFloat32, 129), 0);
    for (size_t place = 0; place < expected.size(); place += compression.encoding == Encoding::kEightBit ? 130 : 34)
      expected[place] = static_cast<char>(0xc0), expected[place + 1] = 0x7f;
    EXPECT_EQ(encoded(compression, bad), expected);
  }
}

TEST_P(Compressed, TheLargestHaveTheseBytes) {
  std::vector<float> values(600, 0.25f);
  values[3] = 1, values[300] = -2.5f, values[599] = 4;
  const std::vector<char> expected = bytes_of({0xc2, 0x3c, 42, 0, 0, 0xc0, 0x7f, 3, 0x2c, 0x57, 0x15});
  EXPECT_EQ(encoded(top_k(0.005), values), expected);
  const std::vector<float> got = decoded(top_k(0.005), expected, 600);
  for (size_t i = 0; i < 600; ++i)
    ASSERT_EQ(got[i], (i == 3 ? 42 : i == 300 ? -106 : i == 599 ? 169 : 0) * 0.023681640625f) << i;
  values[0] = kNaN;
  EXPECT_EQ(encoded(top_k(0.005), values), bytes_of({0xc0, 0x7f, 0, 0, 0, 0, 0, 0, 1, 2, 0x07}));
}

TEST_P(Compressed, TheLargestInTwoBitsHaveTheseBytes) {
  std::vector<float> values(600, 0.25f), left(600);
  values[3] = 1, values[300] = -2.5f, values[599] = 4;  // a mean of 2.5; of what is no less, 3.25; 2.125 is in between
  const std::vector<char> expected = bytes_of({0x80, 0x3f, 0x50, 0x40, 0b011100, 3, 0x2c, 0x57, 0x15});
  EXPECT_EQ(encoded(top_k(0.005, 2), values, &left), expected);
  EXPECT_EQ(left[3], 0);
  EXPECT_EQ(left[300], 0.75f);
  EXPECT_EQ(left[599], 0.75f);
  const std::vector<float> got = decoded(top_k(0.005, 2), expected, 600);
  for (size_t i = 0; i < 600; ++i) ASSERT_EQ(got[i], i == 3 ? 1 : i == 300 ? -3.25f : i == 599 ? 3.25f : 0) << i;
  values[0] = kInfinity;
  EXPECT_EQ(encoded(top_k(0.005, 2), values), bytes_of({0xc0, 0x7f, 0, 0, 0, 0, 1, 2, 0x07}));
}

TEST_P(Compressed, TheLargestOfEachSizeAreThoseOfASort) {
  for (double ratio : {1e-9, 0.01, 0.3, 1.0}) {
    for (double value_bits : {2, 3, 4, 5, 6, 7, 8}) {
      for (size_t n : {1, 2, 3, 255, 256, 257, 513, 1000, 70000}) {
        std::mt19937 random(static_cast<unsigned>(n));
        const Compression compression = top_k(ratio, value_bits);
        const std::vector<float> values = ordinary_gradient(n, random);
        std::vector<float> left(n);
        const std::vector<char> payload = encoded(compression, values, &left);
        const size_t k = std::max<size_t>(1, static_cast<size_t>(std::ceil(ratio * static_cast<double>(n))));
        const size_t code_bytes = (k * static_cast<size_t>(value_bits) + 7) / 8;
        EXPECT_EQ(payload.size(), 4 + code_bytes + k + (k + (n + 255) / 256 + 7) / 8);
        EXPECT_EQ(problem_with_encoded(compression, payload.data(), payload.size(), n), nullptr);
        std::vector<float> sizes(n);
        for (size_t i = 0; i < n; ++i) sizes[i] = std::fabs(values[i]);
        std::sort(sizes.begin(), sizes.end(), std::greater<>());
        const std::vector<float> got = decoded(compression, payload, n);
        const float step =
            (sizes[0] - sizes[k - 1]) / static_cast<float>((1 << (static_cast<int>(value_bits) - 1)) - 1);
        const float of_scale = sizes[0] * (value_bits == 2 ? 0x1p-8f : 0x1p-15f);  // two bits name two bfloat16
        for (size_t i = 0; i < n; ++i) {
          const bool is_sent = std::fabs(values[i]) >= sizes[k - 1];
          ASSERT_NEAR(got[i], is_sent ? values[i] : 0, is_sent ? 1.01f * step + of_scale : 0) << n;
          ASSERT_EQ(left[i], values[i] - got[i]);
        }
      }
    }
  }
}

TEST_P(Compressed, OffsetsThatDoNotAscendWithinTheirSliceAreRefused) {
  const Compression compression = top_k(0.01);
  const size_t n = 300;
  std::vector<float> values(n);
  values[7] = 3, values[9] = 2, values[290] = -1;
  const std::vector<char> sound = encoded(compression, values);  // scale base 3 codes 3 lows 1
  const auto problem_with = [&](size_t place, int byte) {
    std::vector<char> changed = sound;
    changed[place] = static_cast<char>(byte);
    return problem_with_encoded(compression, changed.data(), changed.size(), n) != nullptr;
  };
  ASSERT_EQ(sound.size(), 11u);
  ASSERT_EQ(static_cast<uint8_t>(sound[10]), 0b01011);  // two, and one
  EXPECT_FALSE(problem_with(7, 8));
  EXPECT_TRUE(problem_with(7, 9)) << "twice";
  EXPECT_TRUE(problem_with(7, 10)) << "descending";
  EXPECT_FALSE(problem_with(9, 299 - 256));
  EXPECT_TRUE(problem_with(9, 300 - 256)) << "behind the slice";
  EXPECT_TRUE(problem_with(10, 0b00011)) << "too few";
  EXPECT_TRUE(problem_with(10, 0b01111)) << "too many";
  EXPECT_TRUE(problem_with(10, 0b11001)) << "of a block that there is not";
  for (size_t place = 0; place < sound.size(); ++place) {
    for (int byte = 0; byte < 256; ++byte) {
      if (place >= 7 && problem_with(place, byte)) continue;
      std::vector<char> changed = sound;
      changed[place] = static_cast<char>(byte);
      decoded(compression, changed, n);  // stays within its arrays: the address sanitizer
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Loops, Compressed, testing::Bool(),
                         [](const auto& with) { return with.param ? "Avx2" : "Baseline"; });

TEST(Compression, IsOfFloat32Only) {
  const Codec& codec = *two_bit(0.5f).codec();
  EXPECT_TRUE(codec.is_for(DType::kFloat32, /*is_vector=*/false));
  for (DType type :
       {DType::kFloat64, DType::kFloat16, DType::kUint8, DType::kInt32, DType::kInt8, DType::kInt64, DType::kBfloat16})
    EXPECT_FALSE(codec.is_for(type, /*is_vector=*/false)) << name_of(type);
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
