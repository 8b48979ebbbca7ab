// Whether floats are finite, at the width of the machine (base/simd.h).
// Threads: pure functions.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "base/simd.h"

namespace p3 {

// Of value(0) .. value(n - 1): pass pointers and numbers by value, [=].
template <typename Value>
bool are_finite(size_t n, Value value) {
  constexpr size_t kAtOnce = 1024;
  constexpr int32_t kExponent = 0x7f800000;  // all of its bits are set in infinity and NaN alone
  int32_t found[kAtOnce];
  for (size_t begin = 0; begin < n; begin += kAtOnce) {
    const size_t count = std::min(kAtOnce, n - begin);
    int32_t* const out = found;
    loop(count, [=](size_t i) {
      const float one = value(begin + i);
      int32_t bits;
      std::memcpy(&bits, &one, sizeof bits);
      out[i] = (bits & kExponent) == kExponent;
    });
    int32_t any = 0;
    for (size_t i = 0; i < count; ++i) any |= found[i];
    if (any != 0) return false;
  }
  return true;
}

}  // namespace p3
