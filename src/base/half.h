// Half precision, held as its bits, to and from float: IEEE 754's binary16, and bfloat16, which is the upper half of a
// float. Portable, and for binary16 bit for bit what the CPU's own conversion (F16C) gives. Rounded, a NaN keeps its sign
// and the leading bits of its payload, and becomes quiet. Assumes the default rounding mode.
#pragma once

#include <cstdint>
#include <cstring>

namespace p3 {

using half = uint16_t;
enum class bfloat16 : uint16_t {};

namespace detail {

inline uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

inline float float_of(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

}  // namespace detail

// Exact.
inline float half_to_float(half value) {
  const uint32_t sign = static_cast<uint32_t>(value & 0x8000u) << 16;
  const uint32_t magnitude = value & 0x7fffu;
  uint32_t bits = (magnitude << 13) + (112u << 23);  // the exponent's bias: 127 - 15
  if (magnitude < 0x0400u) bits = detail::bits_of(static_cast<float>(magnitude) * 0x1p-24f);  // subnormal
  if (magnitude >= 0x7c00u) bits = 0x7f800000u | (magnitude << 13);
  if (magnitude > 0x7c00u) bits |= 0x00400000u;
  return detail::float_of(sign | bits);
}

// Rounded to nearest, ties to even; from 65520 on it is infinity.
inline half float_to_half(float value) {
  const uint32_t sign = detail::bits_of(value) & 0x80000000u;
  const uint32_t magnitude = detail::bits_of(value) ^ sign;
  uint32_t bits = (magnitude - (112u << 23) + 0x0fffu + ((magnitude >> 13) & 1u)) >> 13;
  // Below 2^-14 halves are 2^-24 apart, and so are floats in [0.5, 1): adding 0.5 rounds to the right place.
  if (magnitude < 0x38800000u) bits = detail::bits_of(detail::float_of(magnitude) + 0.5f) - detail::bits_of(0.5f);
  if (magnitude >= 0x477ff000u) bits = 0x7c00u;
  if (magnitude > 0x7f800000u) bits = 0x7e00u | ((magnitude >> 13) & 0x03ffu);
  return static_cast<half>((sign >> 16) | bits);
}

// Exact.
inline float bfloat16_to_float(bfloat16 value) { return detail::float_of(static_cast<uint32_t>(value) << 16); }

// Rounded to nearest, ties to even; what rounds to 2^128 is infinity.
inline bfloat16 float_to_bfloat16(float value) {
  const uint32_t bits = detail::bits_of(value);
  const uint32_t rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
  return static_cast<bfloat16>(((bits & 0x7fffffffu) > 0x7f800000u ? bits | 0x00400000u : rounded) >> 16);
}

}  // namespace p3
