// A codec by blocks: a whole number for each element, in few bits, times a scale of its block; error feedback.
//
//   payload = block ...        block = scale codes        scale: bfloat16; codes: from -most to most, as Packing has them
//
// The scale is the largest magnitude of the block / most, in float32, at least 2^-126, rounded to nearest; a code is
// element x (1 / scale), rounded to nearest even, and stands for code x scale. The last block has the remainder. Of an
// overflow all scales are NaN and all codes 0.
//   The scale has 8 digits and a code at most 7, so their product is exact, and so is the difference that is kept: what
// was sent and what is kept are what came, to the bit. As the scale is off by at most a 256th, no code exceeds `most`: the
// largest element is at most 127.5 scales.
// Source: Dettmers, ICLR 2016; Dettmers et al., ICLR 2022 (blocks).
//
// Packing has
//   kBits, kBlock   of a code; elements of a block, a divisor of 4096
//   pack(codes, n, bytes)         int32_t codes of n elements into (n * kBits + 7) / 8 bytes
//   unpack(bytes, n, visit)       visit(element, code) for each
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "base/half.h"
#include "base/simd.h"
#include "codec/overflow.h"
#include "p3/codec.h"

namespace p3 {

template <typename Packing>
class BlockCodec final : public Codec {
 public:
  using Codec::Codec;

  size_t residuals() const override { return 1; }
  size_t run() const override { return 32 / Packing::kBits; }
  size_t bytes(const Options&, size_t n) const override { return bytes_of(n); }
  void encode(const Options&, const float* gradient, float* residual, void* payload, size_t n) const override {
    auto* const to = static_cast<uint8_t*>(payload);
    if (!adds_up(gradient, residual, n)) return encode_nan(to, n);
    each_block(n, [=](size_t begin, size_t count, size_t place)
                      P3_INLINE { encode_block(gradient + begin, residual + begin, to + place, count); });
  }
  void start_sum(const Options&, float* accumulator, const void* payload, size_t n) const override {
    decode(payload, n, [=](size_t i, float value) P3_INLINE { accumulator[i] = value; });
  }
  void add_to_sum(const Options&, float* accumulator, const void* payload, size_t n) const override {
    decode(payload, n, [=](size_t i, float value) P3_INLINE { accumulator[i] += value; });
  }

 private:
  static constexpr size_t kBlock = Packing::kBlock;
  static constexpr float kMost = (1 << (Packing::kBits - 1)) - 1;
  static constexpr float kLeastScale = 0x1p-126f;  // of which the reciprocal is finite
  static constexpr float kRounder = 0x1.8p23f;  // added and subtracted, leaves a small number rounded to nearest even

  static constexpr size_t kBlockBytes = sizeof(bfloat16) + kBlock * Packing::kBits / 8;
  static size_t bytes_of(size_t n) {
    return (n + kBlock - 1) / kBlock * sizeof(bfloat16) + (n * Packing::kBits + 7) / 8;
  }

  // visit(first element, elements, where they are in the payload) for each.
  template <typename Visit>
  static void each_block(size_t n, Visit visit) {
    loop(n / kBlock, [=](size_t block) P3_INLINE { visit(block * kBlock, kBlock, block * kBlockBytes); });
    const size_t begin = n / kBlock * kBlock;
    if (begin < n) loop(1, [=](size_t) P3_INLINE { visit(begin, n - begin, n / kBlock * kBlockBytes); });
  }

  P3_INLINE static void encode_block(const float* gradient, float* residual, uint8_t* payload, size_t n) {
    int32_t largest_bits = 0;  // finite magnitudes are in the order of their bits
    P3_INDEPENDENT
    for (size_t i = 0; i < n; ++i) residual[i] += gradient[i];
    for (size_t i = 0; i < n; ++i) {
      int32_t bits;
      std::memcpy(&bits, residual + i, sizeof bits);
      largest_bits = std::max(largest_bits, bits & 0x7fffffff);
    }
    float largest;
    std::memcpy(&largest, &largest_bits, sizeof largest);
    const bfloat16 scale = float_to_bfloat16(std::max(largest / kMost, kLeastScale));
    std::memcpy(payload, &scale, sizeof scale);
    const float unit = bfloat16_to_float(scale), per_unit = 1 / unit;
    int32_t codes[kBlock];  // as wide as the elements, for the loop to be vectorised
    P3_INDEPENDENT
    for (size_t i = 0; i < n; ++i) {
      const float code = (residual[i] * per_unit + kRounder) - kRounder;
      residual[i] -= code * unit;
      codes[i] = static_cast<int32_t>(code);
    }
    Packing::pack(codes, n, payload + sizeof scale);
  }

  static void encode_nan(uint8_t* payload, size_t n) {
    const bfloat16 scale = float_to_bfloat16(kNaN);
    std::fill_n(payload, bytes_of(n), static_cast<uint8_t>(0));
    for (size_t place = 0; place < bytes_of(n); place += kBlockBytes)
      std::memcpy(payload + place, &scale, sizeof scale);
  }

  template <typename Put>
  static void decode(const void* payload, size_t n, Put put) {
    const auto* const from = static_cast<const uint8_t*>(payload);
    each_block(n, [=](size_t begin, size_t count, size_t place) P3_INLINE {
      bfloat16 scale;
      std::memcpy(&scale, from + place, sizeof scale);
      const float unit = bfloat16_to_float(scale);
      Packing::unpack(from + place + sizeof scale, count,
                      [=](size_t i, int32_t code) P3_INLINE { put(begin + i, static_cast<float>(code) * unit); });
    });
  }
};

}  // namespace p3
