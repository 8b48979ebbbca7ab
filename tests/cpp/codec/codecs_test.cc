// What every codec of gradients must keep, whichever there are.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <ostream>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "base/simd.h"
#include "codec/standard.h"
#include "p3/codec.h"
#include "p3/error.h"

namespace p3 {

void PrintTo(const Compression& compression, std::ostream* out) { *out << compression.codec()->name; }

namespace {

const std::vector<size_t> kSizes = {0, 1, 3, 15, 16, 17, 255, 256, 257, 1023, 1024, 1025, 50000};

std::vector<float> gradient(size_t elements, std::mt19937& random) {
  std::normal_distribution<float> normal(0, 0.6f);
  std::vector<float> values(elements);
  for (float& value : values) value = random() % 16 == 0 ? 0.0f : normal(random);
  return values;
}

std::vector<uint32_t> bits(const std::vector<float>& values) {
  std::vector<uint32_t> made(values.size());
  if (!values.empty()) std::memcpy(made.data(), values.data(), values.size() * sizeof(float));
  return made;
}

class EveryCodec : public testing::TestWithParam<Compression> {
 protected:
  void TearDown() override { use_avx2 = cpu_has_avx2(); }

  const Compression compression = GetParam();
  const Codec& codec = *compression.codec();

  std::vector<float> residual(size_t n) const { return std::vector<float>(n * codec.residuals()); }
  std::vector<char> encoded(const std::vector<float>& values, std::vector<float>& kept) const {
    std::vector<char> payload(codec.bytes(compression.options, values.size()) + 2,
                              'x');  // at an odd address, as it may lie
    encode(compression, values.data(), kept.data(), payload.data() + 1, values.size());
    EXPECT_EQ(payload.front(), 'x');
    EXPECT_EQ(payload.back(), 'x');
    return {payload.begin() + 1, payload.end() - 1};
  }
};

TEST_P(EveryCodec, LosesNothingButRoundingThatItDoesNotKeep) {
  for (size_t n : kSizes) {
    std::mt19937 random(static_cast<unsigned>(n));
    std::vector<float> kept = residual(n);
    for (int round = 0; round < 5; ++round) {
      const std::vector<float> values = gradient(n, random), before = kept;
      const std::vector<char> payload = encoded(values, kept);
      EXPECT_LE(payload.size(), n * sizeof(float) + 2 * sizeof(float)) << "more than plain";
      EXPECT_TRUE(can_have_bytes(compression, DType::kFloat32, n, payload.size()));
      EXPECT_FALSE(can_have_bytes(compression, DType::kFloat32, n, payload.size() + 1));
      EXPECT_EQ(problem_with_encoded(compression, payload.data(), payload.size(), n), nullptr);
      std::vector<float> sum(n, 9);
      start_encoded_sum(compression, sum.data(), payload.data(), n);
      for (size_t i = 0; i < n; ++i) {
        const float given = values[i] + (before.empty() ? 0 : before[i]), got = sum[i] + (kept.empty() ? 0 : kept[i]);
        ASSERT_NEAR(got, given, kept.empty() ? 0.005f * std::fabs(given) : 1e-5f * (1 + std::fabs(sum[i]))) << i;
      }
      std::vector<float> twice = sum;
      add_encoded_to_sum(compression, twice.data(), payload.data(), n);
      for (size_t i = 0; i < n; ++i) ASSERT_EQ(twice[i], sum[i] + sum[i]) << i;
    }
  }
}

TEST_P(EveryCodec, HasTheSameBitsWithAndWithoutAvx2) {
  if (!cpu_has_avx2()) GTEST_SKIP() << "this CPU has no AVX2";
  for (size_t n : kSizes) {
    std::vector<float> kept[2] = {residual(n), residual(n)}, sum[2] = {std::vector<float>(n), std::vector<float>(n)};
    for (int round = 0; round < 3; ++round) {
      std::vector<char> payload[2];
      for (size_t build : {0, 1}) {
        use_avx2 = build == 1;
        std::mt19937 random(static_cast<unsigned>(n) + static_cast<unsigned>(round));
        payload[build] = encoded(gradient(n, random), kept[build]);
        add_encoded_to_sum(compression, sum[build].data(), payload[build].data(), n);
      }
      ASSERT_EQ(payload[0], payload[1]) << n;
      ASSERT_EQ(bits(kept[0]), bits(kept[1])) << n;
      ASSERT_EQ(bits(sum[0]), bits(sum[1])) << n;
    }
  }
}

TEST_P(EveryCodec, ShowsAnOverflowAndForgetsIt) {
  for (size_t n : kSizes) {
    if (n == 0) continue;
    for (float overflow : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
      std::mt19937 random(static_cast<unsigned>(n));
      std::vector<float> kept = residual(n), sum(n, 1);
      encoded(gradient(n, random), kept);
      const std::vector<float> before = kept;
      std::vector<float> bad = gradient(n, random);
      const size_t place = random() % n;
      bad[place] = overflow;
      const std::vector<char> payload = encoded(bad, kept);
      EXPECT_EQ(bits(kept), bits(before)) << n;
      add_encoded_to_sum(compression, sum.data(), payload.data(), n);
      ASSERT_FALSE(std::isfinite(sum[place])) << n;
      if (codec.residuals() == 0) continue;
      for (float value : sum) ASSERT_TRUE(std::isnan(value)) << n;
    }
  }
}

TEST_P(EveryCodec, ComesBackWhereItIsShorter) {
  EXPECT_TRUE(codec.encodes_values());
  for (size_t n : kSizes) {
    std::mt19937 random(static_cast<unsigned>(n));
    std::vector<float> kept = residual(n);
    const std::vector<char> payload = encoded(gradient(n, random), kept);
    const bool is_shorter = payload.size() < n * sizeof(float);
    EXPECT_TRUE(is_shorter || n < 4) << n;
    EXPECT_EQ(compression.bytes(n), payload.size());
    EXPECT_EQ(compression.if_shorter(n), is_shorter ? compression : Compression()) << n;
  }
}

INSTANTIATE_TEST_SUITE_P(All, EveryCodec, testing::ValuesIn(codecs_of_gradients()),
                         [](const auto& with) { return std::string("of_") + with.param.codec()->name; });

TEST(Codecs, HaveNumbersAndNamesOfTheirOwn) {
  std::set<Encoding> numbers{Encoding::kPlain, Encoding::kAbsent};
  std::set<std::string> names;
  for (const Codec* codec : codecs()) {
    EXPECT_TRUE(numbers.insert(codec->encoding).second) << codec->name;
    EXPECT_TRUE(names.insert(codec->name).second) << codec->name;
    EXPECT_EQ(codec_of(codec->encoding), codec);
    EXPECT_EQ(&codec_named(codec->name), codec);
    EXPECT_LE(codec->options.size(), Codec::kMostOptions);
    EXPECT_STRNE(codec->effect, "") << codec->name;
    EXPECT_TRUE(codec->encodes_values() || !codec->carries_sums()) << codec->name;
    const Codec::Options with = standard(*codec).options;
    for (size_t n : kSizes) {
      const size_t sent = codec->sent(with, 1, n);
      EXPECT_LE(sent, n) << codec->name;
      EXPECT_LE(codec->bytes_with(with, sent, n), n * sizeof(float) + 2 * sizeof(float)) << codec->name;
      EXPECT_TRUE(codec->makes_steps() || codec->bytes_with(with, sent, n) == codec->bytes(with, n)) << codec->name;
    }
    EXPECT_NO_THROW(check(standard(*codec))) << codec->name;
    EXPECT_TRUE(codec->is_for(DType::kFloat32, false)) << codec->name;
    EXPECT_FALSE(codec->is_for(DType::kFloat64, false)) << codec->name;
  }
  EXPECT_EQ(codec_of(Encoding::kPlain), nullptr);
  EXPECT_EQ(codec_of(Encoding::kAbsent), nullptr);
  EXPECT_EQ(codec_of(static_cast<Encoding>(255)), nullptr);
  EXPECT_THROW(codec_named("none"), Error);
}

}  // namespace
}  // namespace p3
