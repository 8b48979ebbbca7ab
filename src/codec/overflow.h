// How codecs that keep what they leave out treat overflow.
#pragma once

#include <cstddef>
#include <limits>

#include "numeric/finite.h"

namespace p3 {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

// Whether what is left out and the gradient add up to a finite number everywhere.
inline bool adds_up(const float* gradient, const float* residual, size_t n) {
  return are_finite(n, [=](size_t i) { return residual[i] + gradient[i]; });
}

}  // namespace p3
