// A multiple of a 127th of the largest magnitude in its block of 256 elements; error feedback as with two bits. Little
// more than a quarter of the bytes: of each block float32, the largest magnitude, then a byte for each element, from -127
// to 127. Of an overflow all magnitudes are NaN.
//   The byte is element / largest * 127, rounded to nearest even, and stands for byte / 127 * largest, in float32 and in
// this order; 0 where the largest is 0. So the largest element itself loses nothing.
// Source: Dettmers, ICLR 2016; Dettmers et al., ICLR 2022 (blocks).
#include <algorithm>
#include <cstdint>
#include <cstring>

#include "base/simd.h"
#include "codec/overflow.h"
#include "p3/codec.h"

namespace p3 {
namespace {

constexpr size_t kBlock = 256;
constexpr float kMost = 127;
constexpr float kRounder = 0x1.8p23f;  // added and subtracted, leaves a small number rounded to nearest even

size_t payload_bytes(size_t n) { return n + (n + kBlock - 1) / kBlock * sizeof(float); }

// visit(first element, elements, where they are in the payload) for each block.
template <typename Visit>
void each_block(size_t n, Visit visit) {
  for (size_t begin = 0; begin < n; begin += kBlock)
    visit(begin, std::min(kBlock, n - begin), begin / kBlock * (sizeof(float) + kBlock));
}

// Of finite numbers, whose magnitudes are in the order of their bits.
float largest_of(const float* values, size_t n) {
  int32_t most = 0;
  for (size_t i = 0; i < n; ++i) {
    int32_t bits;
    std::memcpy(&bits, values + i, sizeof bits);
    most = std::max(most, bits & 0x7fffffff);
  }
  float largest;
  std::memcpy(&largest, &most, sizeof largest);
  return largest;
}

void encode_eight_bit(const float* gradient, float* residual, uint8_t* payload, size_t n) {
  const bool is_sound = adds_up(gradient, residual, n);
  if (is_sound) loop(n, [=](size_t i) { residual[i] += gradient[i]; });
  each_block(n, [=](size_t begin, size_t count, size_t place) {
    float* const left = residual + begin;
    const float largest = is_sound ? largest_of(left, count) : kNaN;
    std::memcpy(payload + place, &largest, sizeof largest);
    int32_t codes[kBlock] = {};  // as wide as the elements: so the loop is vectorised
    int32_t* const out = codes;
    const float divisor = largest > 0 ? largest : 1;
    if (is_sound)
      loop(count, [=](size_t i) {
        const float code = (left[i] / divisor * kMost + kRounder) - kRounder;
        left[i] -= code / kMost * largest;
        out[i] = static_cast<int32_t>(code);
      });
    uint8_t* const bytes = payload + place + sizeof largest;
    for (size_t i = 0; i < count; ++i) bytes[i] = static_cast<uint8_t>(codes[i]);
  });
}

// put(element, value) for each.
template <typename Put>
void decode_eight_bit(const uint8_t* payload, size_t n, Put put) {
  each_block(n, [=](size_t begin, size_t count, size_t place) {
    float largest;
    std::memcpy(&largest, payload + place, sizeof largest);
    const uint8_t* const codes = payload + place + sizeof largest;
    loop(count, [=](size_t i) { put(begin + i, static_cast<float>(static_cast<int8_t>(codes[i])) / kMost * largest); });
  });
}

class EightBit final : public Codec {
 public:
  EightBit()
      : Codec(
            Encoding::kEightBit, "int8",
            "a multiple of a 127th of the largest in its block of 256; the difference is added to the next gradient") {}

  size_t residuals() const override { return 1; }
  size_t run() const override { return 4; }
  size_t bytes(const Options&, size_t n) const override { return payload_bytes(n); }
  void encode(const Options&, const float* gradient, float* residual, void* payload, size_t n) const override {
    encode_eight_bit(gradient, residual, static_cast<uint8_t*>(payload), n);
  }
  void start_sum(const Options&, float* accumulator, const void* payload, size_t n) const override {
    decode_eight_bit(static_cast<const uint8_t*>(payload), n, [=](size_t i, float value) { accumulator[i] = value; });
  }
  void add_to_sum(const Options&, float* accumulator, const void* payload, size_t n) const override {
    decode_eight_bit(static_cast<const uint8_t*>(payload), n, [=](size_t i, float value) { accumulator[i] += value; });
  }
};

}  // namespace

const Codec& eight_bit() {
  static const EightBit codec;
  return codec;
}

}  // namespace p3
