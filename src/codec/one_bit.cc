// The sign, as the mean of all elements of the slice at or above zero, or of those below; error feedback as with two bits.
// Little more than a thirty-second of the bytes: two float32, the mean of those at or above zero first, then 8 elements in
// each byte, the first in the highest bit; 1 is at or above zero. Of an overflow both means are NaN.
//   A mean is the sum in float64, divided by the count, and rounded; or 0 if there are none. The sum is made in eight
// parts, of the elements i with the same i mod 8 in ascending order, and they in that of i mod 8.
// Source: Seide et al., Interspeech 2014; Zhang's thesis, 3.5.4.
#include <algorithm>
#include <cstdint>
#include <cstring>

#include "base/simd.h"
#include "codec/overflow.h"
#include "p3/codec.h"

namespace p3 {
namespace {

constexpr size_t kBlock = 1024;  // whole bytes of bits; stays in the first-level cache
constexpr size_t kBitsPerByte = 8;
constexpr size_t kParts = 8;  // of a sum

struct Means {
  float plus = 0, minus = 0;  // of the elements at or above zero, and of the others; as they are sent
};

Means means_of(const float* values, size_t n) {
  double plus[kParts] = {}, minus[kParts] = {};
  size_t count = 0;
  for (size_t begin = 0; begin < n; begin += kParts) {
    const size_t parts = std::min(kParts, n - begin);
    for (size_t i = 0; i < parts; ++i) {
      const double value = values[begin + i];
      const bool is_plus = value >= 0;
      plus[i] += is_plus ? value : 0.0;
      minus[i] += is_plus ? 0.0 : value;
      count += is_plus;
    }
  }
  for (size_t i = 1; i < kParts; ++i) {
    plus[0] += plus[i];
    minus[0] += minus[i];
  }
  Means means;
  if (count > 0) means.plus = static_cast<float>(plus[0] / static_cast<double>(count));
  if (count < n) means.minus = static_cast<float>(minus[0] / static_cast<double>(n - count));
  return means;
}

void encode_one_bit(const float* gradient, float* residual, uint8_t* payload, size_t n) {
  if (n == 0) return;
  if (!adds_up(gradient, residual, n)) {
    const Means none{kNaN, kNaN};
    std::memcpy(payload, &none, sizeof none);
    std::fill_n(payload + sizeof none, (n + kBitsPerByte - 1) / kBitsPerByte, static_cast<uint8_t>(0));
    return;
  }
  loop(n, [=](size_t i) { residual[i] += gradient[i]; });
  const Means means = means_of(residual, n);
  std::memcpy(payload, &means, sizeof means);
  int32_t bits[kBlock];
  for (size_t begin = 0; begin < n; begin += kBlock) {
    const size_t count = std::min(kBlock, n - begin);
    const size_t bytes = (count + kBitsPerByte - 1) / kBitsPerByte;
    std::fill(bits + count, bits + bytes * kBitsPerByte, 0);
    float* left = residual + begin;
    int32_t* out = bits;
    loop(count, [=](size_t i) {
      const bool is_plus = left[i] >= 0;
      left[i] -= is_plus ? means.plus : means.minus;
      out[i] = is_plus;
    });
    uint8_t* packed = payload + sizeof means + begin / kBitsPerByte;
    for (size_t i = 0; i < bytes; ++i) {
      int32_t byte = 0;
      for (size_t j = 0; j < kBitsPerByte; ++j) byte = byte << 1 | bits[i * kBitsPerByte + j];
      packed[i] = static_cast<uint8_t>(byte);
    }
  }
}

template <typename Put>
void decode_one_bit(const uint8_t* payload, size_t n, Put put) {
  if (n == 0) return;
  Means means;
  std::memcpy(&means, payload, sizeof means);
  const uint8_t* const bits = payload + sizeof means;
  for (size_t i = 0; i < n; ++i)
    put(i, bits[i / kBitsPerByte] >> (kBitsPerByte - 1 - i % kBitsPerByte) & 1 ? means.plus : means.minus);
}

class OneBit final : public Codec {
 public:
  OneBit()
      : Codec(Encoding::kOneBit, "1bit",
              "the mean of those at or above zero in its slice, or of those below; the difference is added to the next "
              "gradient") {}

  size_t residuals() const override { return 1; }
  size_t run() const override { return 32; }
  size_t bytes(const Options&, size_t n) const override {
    return n == 0 ? 0 : sizeof(Means) + (n + kBitsPerByte - 1) / kBitsPerByte;
  }
  void encode(const Options&, const float* gradient, float* residual, void* payload, size_t n) const override {
    encode_one_bit(gradient, residual, static_cast<uint8_t*>(payload), n);
  }
  void start_sum(const Options&, float* accumulator, const void* payload, size_t n) const override {
    decode_one_bit(static_cast<const uint8_t*>(payload), n, [=](size_t i, float value) { accumulator[i] = value; });
  }
  void add_to_sum(const Options&, float* accumulator, const void* payload, size_t n) const override {
    decode_one_bit(static_cast<const uint8_t*>(payload), n, [=](size_t i, float value) { accumulator[i] += value; });
  }
};

}  // namespace

const Codec& one_bit() {
  static const OneBit codec;
  return codec;
}

}  // namespace p3
