// PyTorch's optimizers, as optimizer_rules.h has MXNet's: with the arithmetic of PyTorch 2.13's loops over single tensors
// (_single_tensor_* in torch/optim), which are what a CPU runs unless told otherwise.
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
// Only optimizer.cc includes this file.
#pragma once

#include <cmath>
#include <tuple>

#include "numeric/optimizer_rules.h"
#include "p3/optimizer.h"

namespace p3 {
namespace rules {

template <typename T>
struct Torch {
  T rescale, wd, minus_lr;

  Torch(const OptimizerSpec& spec, const RoundScalars& round)
      : rescale(static_cast<T>(spec.maximize ? -round.rescale : round.rescale)),
        wd(static_cast<T>(spec.decoupled ? 0 : round.wd)),
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

template <typename T>
struct TorchSgd : Torch<T> {
  static constexpr int kStates = 0;
  using Torch<T>::Torch;

  void operator()(T& weight, T gradient) const {
    weight = std::fma(this->minus_lr, this->decayed(gradient, weight), weight);
  }
};

template <typename T>
struct TorchSgdMomentum : Torch<T> {
  static constexpr int kStates = 1;
  T momentum, share;
  bool first, nesterov;

  TorchSgdMomentum(const OptimizerSpec& spec, const RoundScalars& round)
      : Torch<T>(spec, round),
        momentum(static_cast<T>(spec.momentum)),
        share(static_cast<T>(1 - spec.dampening)),
        first(round.updates == 1),
        nesterov(spec.nesterov) {}

  // The first velocity is the gradient itself, whatever the dampening.
  void operator()(T& weight, T gradient, T& velocity) const {
    const T g = this->decayed(gradient, weight);
    const T moved = std::fma(share, g, velocity * momentum);
    velocity = first ? g : moved;
    const T ahead = std::fma(momentum, velocity, g);
    weight = std::fma(this->minus_lr, nesterov ? ahead : velocity, weight);
  }
};

// Adam; AdamW where the decay is decoupled. States: exp_avg, exp_avg_sq, and max_exp_avg_sq for AMSGrad.
template <typename T, bool kAmsgrad>
struct TorchAdamBase : Torch<T> {
  static constexpr int kStates = kAmsgrad ? 3 : 2;
  Lerp<T> lerp;
  T beta2, share2, epsilon, shrinking, minus_step, correction;

  TorchAdamBase(const OptimizerSpec& spec, const RoundScalars& round)
      : Torch<T>(spec, round),
        lerp(static_cast<T>(1 - spec.beta1)),
        beta2(static_cast<T>(spec.beta2)),
        share2(static_cast<T>(1 - spec.beta2)),
        epsilon(static_cast<T>(spec.epsilon)),
        shrinking(static_cast<T>(spec.decoupled ? 1 - round.lr * round.wd : 1)),
        minus_step(static_cast<T>(-(round.lr / (1 - std::pow(spec.beta1, round.updates))))),
        correction(static_cast<T>(std::pow(1 - std::pow(spec.beta2, round.updates), 0.5))) {}

  template <typename... Largest>
  void operator()(T& weight, T gradient, T& mean, T& square, Largest&... largest) const {
    const T g = this->decayed(gradient, weight);
    mean = lerp(mean, g);
    square = std::fma(share2 * g, g, square * beta2);
    T counts = square;
    ((counts = largest = maximum(largest, square)), ...);
    weight = weight * shrinking + minus_step * mean / (std::sqrt(counts) / correction + epsilon);
  }
};
template <typename T>
using TorchAdam = TorchAdamBase<T, false>;
template <typename T>
using TorchAmsgrad = TorchAdamBase<T, true>;

// Its state, the sum of squares, starts at initial_accumulator_value (Optimizer::start_state).
template <typename T>
struct TorchAdaGrad : Torch<T> {
  static constexpr int kStates = 1;
  T epsilon;

  TorchAdaGrad(const OptimizerSpec& spec, const RoundScalars& round)
      : Torch<T>(spec, round), epsilon(static_cast<T>(spec.epsilon)) {}

  void operator()(T& weight, T gradient, T& sum) const {
    const T g = this->decayed(gradient, weight);
    sum = std::fma(g, g, sum);
    weight += this->minus_lr * g / (std::sqrt(sum) + epsilon);
  }
};

// States: square_avg, momentum_buffer with momentum, grad_avg where it is centered.
template <typename T, bool kMomentum, bool kCentered>
struct TorchRmsPropBase : Torch<T> {
  static constexpr int kStates = 1 + kMomentum + kCentered;
  T alpha, share, epsilon, momentum;
  Lerp<T> lerp;

  TorchRmsPropBase(const OptimizerSpec& spec, const RoundScalars& round)
      : Torch<T>(spec, round),
        alpha(static_cast<T>(spec.alpha)),
        share(static_cast<T>(1 - spec.alpha)),
        epsilon(static_cast<T>(spec.epsilon)),
        momentum(static_cast<T>(spec.momentum)),
        lerp(share) {}

  template <typename... More>
  void operator()(T& weight, T gradient, T& square, More&... more) const {
    const T g = this->decayed(gradient, weight);
    square = std::fma(share * g, g, square * alpha);
    T variance = square;
    if constexpr (kCentered) {
      T& mean = std::get<kMomentum>(std::tie(more...));
      mean = lerp(mean, g);
      variance = std::fma(-mean, mean, square);
    }
    const T deviation = std::sqrt(variance) + epsilon;
    if constexpr (kMomentum) {
      T& velocity = std::get<0>(std::tie(more...));
      velocity = velocity * momentum + g / deviation;
      weight = std::fma(this->minus_lr, velocity, weight);
    } else {
      weight += this->minus_lr * g / deviation;
    }
  }
};
template <typename T>
using TorchRmsProp = TorchRmsPropBase<T, false, false>;
template <typename T>
using TorchRmsPropMomentum = TorchRmsPropBase<T, true, false>;
template <typename T>
using TorchRmsPropCentered = TorchRmsPropBase<T, false, true>;
template <typename T>
using TorchRmsPropCenteredMomentum = TorchRmsPropBase<T, true, true>;

}  // namespace rules
}  // namespace p3
