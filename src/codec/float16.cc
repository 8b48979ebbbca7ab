// float16, of each element / a scale of its slice; nothing is kept of the difference. So no sum overflows, and small
// gradients keep their digits: all 11 down to 2^-28 of the slice's largest element; below 2^-40 of it they become 0.
//
//   payload = scale elements        scale: float32; elements: float16
//
// The scale is the power of two that brings the largest finite magnitude of the slice to at least 2^14 and below 2^15, but
// at least 2^-126, whose reciprocal is finite. Both multiplications are exact but where the element becomes 0 anyway. What
// is not finite stays so.
#include <algorithm>
#include <cstdint>
#include <cstring>

#include "base/half.h"
#include "base/simd.h"
#include "numeric/sum.h"
#include "p3/codec.h"

namespace p3 {
namespace {

constexpr size_t kBlock = 1024;  // stays in the first-level cache
constexpr int32_t kInfinity = 0x7f800000, kExponent = 1 << 23;
constexpr int32_t kLargestExponent = 14;

// In the order of their bits.
int32_t largest_magnitude(const float* values, size_t n) {
  int32_t largest[kBlock] = {};
  for (size_t begin = 0; begin < n; begin += kBlock) {
    const float* const from = values + begin;
    int32_t* const most = largest;
    loop(std::min(kBlock, n - begin), [=](size_t i) {
      int32_t bits;
      std::memcpy(&bits, from + i, sizeof bits);
      bits &= 0x7fffffff;
      most[i] = std::max(most[i], bits < kInfinity ? bits : 0);
    });
  }
  return *std::max_element(largest, largest + kBlock);
}

float scale_of(const float* values, size_t n) {
  const int32_t exponent = largest_magnitude(values, n) / kExponent - kLargestExponent;
  return detail::float_of(static_cast<uint32_t>(std::max(exponent, 1) * kExponent));
}

// visit(first element, elements, its scaled elements as float32) for each block of a payload.
template <typename Visit>
void each_block(const void* payload, size_t n, Visit visit) {
  if (n == 0) return;
  const char* from = static_cast<const char*>(payload) + sizeof(float);
  half halves[kBlock];
  float values[kBlock];
  for (size_t begin = 0; begin < n; begin += kBlock) {
    const size_t count = std::min(kBlock, n - begin);
    std::memcpy(halves, from + begin * sizeof(half), count * sizeof(half));
    start_sum(DType::kFloat16, values, halves, count);
    visit(begin, count, values);
  }
}

class Float16 final : public Codec {
 public:
  Float16()
      : Codec(Encoding::kFloat16, "fp16",
              "rounded to float16, after the slice's largest is scaled to what that can hold") {}

  bool carries_sums() const override { return true; }
  size_t bytes(const Options&, size_t n) const override { return n == 0 ? 0 : sizeof(float) + n * sizeof(half); }

  void encode(const Options&, const float* gradient, float*, void* payload, size_t n) const override {
    if (n == 0) return;
    const float scale = scale_of(gradient, n), per_scale = 1 / scale;
    std::memcpy(payload, &scale, sizeof scale);
    char* const to = static_cast<char*>(payload) + sizeof scale;
    half halves[kBlock];
    float values[kBlock];
    for (size_t begin = 0; begin < n; begin += kBlock) {
      const size_t count = std::min(kBlock, n - begin);
      const float* const from = gradient + begin;
      float* const scaled = values;
      loop(count, [=](size_t i) { scaled[i] = from[i] * per_scale; });
      finish_sum(DType::kFloat16, halves, values, count);
      std::memcpy(to + begin * sizeof(half), halves, count * sizeof(half));
    }
  }
  void start_sum(const Options&, float* accumulator, const void* payload, size_t n) const override {
    const float scale = scale_in(payload, n);
    each_block(payload, n, [=](size_t begin, size_t count, const float* values) {
      float* const to = accumulator + begin;
      loop(count, [=](size_t i) { to[i] = values[i] * scale; });
    });
  }
  void add_to_sum(const Options&, float* accumulator, const void* payload, size_t n) const override {
    const float scale = scale_in(payload, n);
    each_block(payload, n, [=](size_t begin, size_t count, const float* values) {
      float* const to = accumulator + begin;
      loop(count, [=](size_t i) { to[i] += values[i] * scale; });
    });
  }

 private:
  static float scale_in(const void* payload, size_t n) {
    float scale = 1;
    if (n > 0) std::memcpy(&scale, payload, sizeof scale);
    return scale;
  }
};

}  // namespace

const Codec& float16() {
  static const Float16 codec;
  return codec;
}

}  // namespace p3
