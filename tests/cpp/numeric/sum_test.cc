// float16 is compared with NumPy's in tests/core/test_sums.py, bfloat16 with PyTorch's in
// tests/torch/test_arithmetic.py; here, what the core must hold without Python.
#include "numeric/sum.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "base/half.h"
#include "base/simd.h"
#include "p3/error.h"

namespace p3 {
namespace {

// Runs `work` with the baseline loops, and puts the switch back.
template <typename Work>
void with_baseline(Work work) {
  const bool before = use_avx2.exchange(false);
  work();
  use_avx2 = before;
}

TEST(Half, KnownValues) {
  const float infinity = std::numeric_limits<float>::infinity();
  const struct {
    half bits;
    float value;
  } exact[] = {{0x0000, 0.0f}, {0x8000, -0.0f}, {0x0001, 0x1p-24f}, {0x03ff, 0x1.ff8p-15f}, {0x0400, 0x1p-14f},
               {0x3c00, 1.0f}, {0xc000, -2.0f}, {0x7bff, 65504.0f}, {0x7c00, infinity},     {0xfc00, -infinity}};
  for (const auto& pair : exact) {
    EXPECT_EQ(half_to_float(pair.bits), pair.value) << pair.bits;
    EXPECT_EQ(float_to_half(pair.value), pair.bits) << pair.value;
  }
}

TEST(Half, TiesGoToEven) {
  EXPECT_EQ(float_to_half(1.0f + 0x1p-11f), 0x3c00);
  EXPECT_EQ(float_to_half(1.0f + 3 * 0x1p-11f), 0x3c02);
  EXPECT_EQ(float_to_half(0x1p-25f), 0x0000);
  EXPECT_EQ(float_to_half(std::nextafter(0x1p-25f, 1.0f)), 0x0001);
  EXPECT_EQ(float_to_half(3 * 0x1p-25f), 0x0002);
  EXPECT_EQ(float_to_half(std::nextafter(65520.0f, 0.0f)), 0x7bff);
  EXPECT_EQ(float_to_half(65520.0f), 0x7c00);
}

TEST(Half, PortableCodeEqualsTheCpuForEveryHalfAndRandomFloats) {
  if (!cpu_has_avx2()) GTEST_SKIP() << "this CPU has no AVX2 and F16C";
  std::vector<half> halves(65536);
  for (size_t i = 0; i < halves.size(); ++i) halves[i] = static_cast<half>(i);
  std::vector<float> wide(halves.size()), portable(halves.size());
  start_sum(DType::kFloat16, wide.data(), halves.data(), halves.size());
  with_baseline([&] { start_sum(DType::kFloat16, portable.data(), halves.data(), halves.size()); });
  EXPECT_EQ(std::memcmp(wide.data(), portable.data(), wide.size() * sizeof(float)), 0);

  std::mt19937 random(7);
  std::vector<float> floats(1 << 20);
  for (float& value : floats) {
    const auto bits = static_cast<uint32_t>(random());
    std::memcpy(&value, &bits, sizeof value);
  }
  std::vector<half> narrow(floats.size()), narrow_portable(floats.size());
  finish_sum(DType::kFloat16, narrow.data(), floats.data(), floats.size());
  with_baseline([&] { finish_sum(DType::kFloat16, narrow_portable.data(), floats.data(), floats.size()); });
  EXPECT_EQ(narrow, narrow_portable);
}

TEST(Bfloat16, KnownValues) {
  const float infinity = std::numeric_limits<float>::infinity();
  const struct {
    uint16_t bits;
    float value;
  } exact[] = {{0x0000, 0.0f}, {0x8000, -0.0f}, {0x0001, 0x1p-133f},    {0x007f, 0x1.fcp-127f}, {0x0080, 0x1p-126f},
               {0x3f80, 1.0f}, {0xc000, -2.0f}, {0x7f7f, 0x1.fep+127f}, {0x7f80, infinity},     {0xff80, -infinity}};
  for (const auto& pair : exact) {
    EXPECT_EQ(bfloat16_to_float(bfloat16{pair.bits}), pair.value) << pair.bits;
    EXPECT_EQ(float_to_bfloat16(pair.value), bfloat16{pair.bits}) << pair.value;
  }
}

TEST(Bfloat16, TiesGoToEvenAndNanStaysNan) {
  const struct {
    float value;
    uint16_t bits;
  } cases[] = {{1.0f + 0x1p-8f, 0x3f80},
               {1.0f + 3 * 0x1p-8f, 0x3f82},
               {-1.0f - 3 * 0x1p-8f, 0xbf82},
               {0x1p-134f, 0x0000},
               {std::nextafter(0x1p-134f, 1.0f), 0x0001},
               {3 * 0x1p-134f, 0x0002},
               {std::nextafter(0x1.ffp+127f, 0.0f), 0x7f7f},
               {0x1.ffp+127f, 0x7f80},
               {std::numeric_limits<float>::max(), 0x7f80}};
  for (const auto& one : cases) EXPECT_EQ(float_to_bfloat16(one.value), bfloat16{one.bits}) << one.value;
  // All ones would be rounded to 0, and one bit at the end to infinity.
  EXPECT_EQ(float_to_bfloat16(detail::float_of(0xffffffffu)), bfloat16{0xffff});
  EXPECT_EQ(float_to_bfloat16(detail::float_of(0x7f800001u)), bfloat16{0x7fc0});
}

TEST(Bfloat16, BothBuildsOfTheLoopGiveThePortableCodesBits) {
  std::mt19937 random(7);
  for (size_t n : {1u, 7u, 33u, 1u << 18}) {
    std::vector<float> floats(n + 1), start(n + 1), sum(n + 1);
    for (auto* values : {&floats, &start})
      for (float& value : *values) value = detail::float_of(static_cast<uint32_t>(random()));
    const auto check = [&] {
      std::vector<bfloat16> narrow(n + 1);
      finish_sum(DType::kBfloat16, narrow.data() + 1, floats.data() + 1, n);  // off alignment by one element
      EXPECT_EQ(narrow[0], bfloat16{0}) << "an element before the first was written";
      sum = start;
      add_to_sum(DType::kBfloat16, sum.data() + 1, narrow.data() + 1, n);
      std::vector<float> wide(n + 1);
      start_sum(DType::kBfloat16, wide.data() + 1, narrow.data() + 1, n);
      for (size_t i = 1; i <= n; ++i) {
        ASSERT_EQ(narrow[i], float_to_bfloat16(floats[i])) << floats[i];
        const float widened = bfloat16_to_float(narrow[i]), expected = start[i] + widened;
        ASSERT_EQ(detail::bits_of(wide[i]), detail::bits_of(widened)) << i;
        ASSERT_TRUE(sum[i] == expected || (std::isnan(sum[i]) && std::isnan(expected))) << i;
      }
    };
    check();
    with_baseline(check);
  }
}

template <typename T>
void expect_same_bits_on_both_paths(DType type) {
  std::mt19937 random(11);
  for (size_t n : {0u, 1u, 7u, 33u, 4099u}) {
    std::vector<T> a(n + 1), b(n + 1);
    for (auto* values : {&a, &b})
      for (T& value : *values) value = static_cast<T>(static_cast<double>(random()) / 3.0 - 7e8);
    std::vector<T> wide = a, baseline = a;
    add_to_sum(type, wide.data() + 1, b.data() + 1, n);  // off alignment by one element
    with_baseline([&] { add_to_sum(type, baseline.data() + 1, b.data() + 1, n); });
    EXPECT_EQ(std::memcmp(wide.data(), baseline.data(), (n + 1) * sizeof(T)), 0) << name_of(type) << ", " << n;
    for (size_t i = 1; i <= n; ++i) ASSERT_EQ(wide[i], static_cast<T>(a[i] + b[i])) << name_of(type) << ", " << i;
    EXPECT_EQ(wide[0], a[0]) << "an element before the sum was written";
  }
}

TEST(Sum, BothBuildsOfTheLoopGiveTheSameBits) {
  expect_same_bits_on_both_paths<float>(DType::kFloat32);
  expect_same_bits_on_both_paths<double>(DType::kFloat64);
}

TEST(Sum, IntegersWrapAround) {
  int32_t sum32 = std::numeric_limits<int32_t>::max();
  const int32_t one32 = 1;
  add_to_sum(DType::kInt32, &sum32, &one32, 1);
  EXPECT_EQ(sum32, std::numeric_limits<int32_t>::min());
  int64_t sum64 = std::numeric_limits<int64_t>::min();
  const int64_t minus_one64 = -1;
  add_to_sum(DType::kInt64, &sum64, &minus_one64, 1);
  EXPECT_EQ(sum64, std::numeric_limits<int64_t>::max());
  int8_t sum8 = 127;
  const int8_t one8 = 1;
  add_to_sum(DType::kInt8, &sum8, &one8, 1);
  EXPECT_EQ(sum8, -128);
  uint8_t unsigned8 = 250;
  const uint8_t ten = 10;
  add_to_sum(DType::kUint8, &unsigned8, &ten, 1);
  EXPECT_EQ(unsigned8, 4);
}

TEST(Sum, HalvesAreSummedInFloatAndRoundedOnce) {
  // 2048 + 1 + 1 in half precision would stay 2048: each 1 is lost.
  const half large = float_to_half(2048), one = float_to_half(1);
  float accumulator = 0;
  start_sum(DType::kFloat16, &accumulator, &large, 1);
  add_to_sum(DType::kFloat16, &accumulator, &one, 1);
  add_to_sum(DType::kFloat16, &accumulator, &one, 1);
  half total = 0;
  finish_sum(DType::kFloat16, &total, &accumulator, 1);
  EXPECT_EQ(half_to_float(total), 2050.0f);
}

TEST(Sum, Bfloat16IsSummedInFloatAndRoundedOnce) {
  const bfloat16 large = float_to_bfloat16(256), one = float_to_bfloat16(1);
  float accumulator = 0;
  start_sum(DType::kBfloat16, &accumulator, &large, 1);
  add_to_sum(DType::kBfloat16, &accumulator, &one, 1);
  add_to_sum(DType::kBfloat16, &accumulator, &one, 1);
  divide_sum(DType::kBfloat16, &accumulator, 2, 1);
  bfloat16 total{};
  finish_sum(DType::kBfloat16, &total, &accumulator, 1);
  EXPECT_EQ(bfloat16_to_float(total), 129.0f);
}

TEST(Sum, AnEmptySliceNeedsNoMemory) {
  for (int code : {0, 1, 2, 3, 4, 5, 6, 12}) {
    const auto type = static_cast<DType>(code);
    start_sum(type, nullptr, nullptr, 0);
    add_to_sum(type, nullptr, nullptr, 0);
    finish_sum(type, nullptr, nullptr, 0);
  }
}

TEST(Sum, UnknownTypeIsRefused) {
  float value = 0;
  for (int code : {7, 11, 13, 200}) {
    const auto unknown = static_cast<DType>(code);
    EXPECT_THROW(start_sum(unknown, &value, &value, 1), Error);
    EXPECT_THROW(add_to_sum(unknown, &value, &value, 1), Error);
    EXPECT_THROW(finish_sum(unknown, &value, &value, 1), Error);
  }
}

}  // namespace
}  // namespace p3
