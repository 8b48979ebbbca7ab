// What MXNet's rules share: the arithmetic of MXNet 1.9.1's operators, in its order of operations, so that training with
// P3 and on one process agree to rounding. Only rules include this file.
#pragma once

#include <cmath>
#include <limits>

#include "rules/element_loop.h"

namespace p3::rules {

// MXNet's fused operators take their numbers as float32 whatever the tensor's type; P3 rounds the same way,
// or a float64 run would drift from MXNet's by the rounding of 0.9.
template <typename T>
T as_operator_does(double value) {
  // volatile: where it vectorises neighbouring conversions, GCC 12 takes double to float to double for nothing at all.
  const volatile float rounded = static_cast<float>(value);
  return static_cast<T>(rounded);
}

// Two unconditional selections, which vectorise. NaN passes. Without a bound, the bound is infinity: no branch.
template <typename T>
T clip(T value, T bound) {
  const T below = value > bound ? bound : value;
  return below < -bound ? -bound : below;
}

template <typename T>
T bound_of(double clip) {
  return clip < 0 ? std::numeric_limits<T>::infinity() : as_operator_does<T>(clip);
}

// What nearly every rule needs, rounded as MXNet's fused operators round it.
template <typename T>
struct Fused {
  T lr, wd, rescale, bound;

  template <typename Numbers>
  Fused(const Numbers& numbers, const RoundScalars& round)
      : lr(as_operator_does<T>(round.lr)),
        wd(as_operator_does<T>(round.wd)),
        rescale(as_operator_does<T>(round.rescale)),
        bound(bound_of<T>(numbers.clip_gradient)) {}
};

// The same for the optimizers that MXNet writes in Python: numbers stay in double until they meet the tensor, and each
// operation on tensors rounds once.
template <typename T>
struct Composed {
  T lr, wd, rescale, bound;

  template <typename Numbers>
  Composed(const Numbers& numbers, const RoundScalars& round)
      : lr(static_cast<T>(round.lr)),
        wd(static_cast<T>(round.wd)),
        rescale(static_cast<T>(round.rescale)),
        bound(bound_of<T>(numbers.clip_gradient)) {}
};

// MXNet uses its "multi" operators for every dense SGD, with and without momentum. They round lr * rescale first
// when nothing is clipped, and clip rescale * gradient otherwise; `outer` and `inner` cover both without a branch.
template <typename T>
struct SgdBase {
  T momentum, decay, outer, inner, bound;

  template <typename Numbers>
  SgdBase(const Numbers& numbers, const RoundScalars& round)
      : momentum(as_operator_does<T>(numbers.momentum)),
        decay(as_operator_does<T>(round.lr) * as_operator_does<T>(round.wd)),
        outer(as_operator_does<T>(round.lr) * (numbers.clip_gradient < 0 ? as_operator_does<T>(round.rescale) : T(1))),
        inner(numbers.clip_gradient < 0 ? T(1) : as_operator_does<T>(round.rescale)),
        bound(bound_of<T>(numbers.clip_gradient)) {}

  T velocity(T carried, T weight, T gradient) const {
    return carried - decay * weight - outer * clip(inner * gradient, bound);
  }
};

}  // namespace p3::rules
