// What PyTorch's rules share: the arithmetic of PyTorch 2.13's loops over single tensors (_single_tensor_* in torch/optim),
// which are what a CPU runs unless told otherwise.
//
// What its kernels for x86-64 round, found by experiment with float32 and float64, AVX2 and AVX-512, in the vectors and
// in the rest of an array alike:
//   a.add(b, alpha=s)          fma(s, b, a)
//   a.addcmul(b, c, value=s)   fma(s * b, c, a)
//   a.lerp(b, s)               fma(s, b - a, a) where |s| < 0.5, else fma(s - 1, b - a, b)
//   a.addcdiv(b, c, value=s)   a + (s * b) / c; a quotient cannot be fused
//   a / s                      a division, no multiplication by 1 / s
//   a.sqrt()                   MKL's, which is no IEEE 754 square root: of float32, a sixth of the results are one unit
//                              in the last place off, of float64 one in eighty
// Each call rounds, and numbers stay in double until they meet the tensor. With std::fma and the exact square root, SGD
// is PyTorch's to the bit, and the others are but for its square root: within 1e-6. So is AdaGrad's sum with a sparse
// gradient, which PyTorch squares first. Where it has no fused multiply-add (ATEN_CPU_CAPABILITY=default), all is within
// 1e-6 but centered RMSProp, whose difference of squares cancels.
// Only rules include this file.
#pragma once

#include <cmath>

#include "rules/element_loop.h"

namespace p3::rules {

template <typename T>
struct Torch {
  T rescale, wd, minus_lr;

  template <typename Numbers>
  Torch(const Numbers& numbers, const RoundScalars& round)
      : rescale(static_cast<T>(numbers.maximize ? -round.rescale : round.rescale)),
        wd(static_cast<T>(round.wd)),
        minus_lr(static_cast<T>(-round.lr)) {}

  // Without decay the weight may be infinite.
  T decayed(T gradient, T weight) const {
    const T g = gradient * rescale;
    const T with_decay = std::fma(wd, weight, g);
    return wd == T(0) ? g : with_decay;
  }
};

template <typename T>
struct Lerp {
  T share, factor;

  explicit Lerp(T share_) : share(share_), factor(std::abs(share) < T(0.5) ? share : share - T(1)) {}
  // Compares again, because GCC vectorises no selection by a bool of before the loop.
  T operator()(T from, T to) const { return std::fma(factor, to - from, std::abs(share) < T(0.5) ? from : to); }
};

}  // namespace p3::rules
