// The arithmetic of each algorithm: one struct for one update of one element, in MXNet 1.9.1's order of operations.
//
// A rule is made anew for each update of a slice, with its numbers in the type of the arithmetic. kStates counts its
// states; operator() takes the element's weight, its gradient, and references to its states in MXNet's order.
// Only optimizer.cc includes this file.
#pragma once

#include <cmath>
#include <limits>

#include "p3/optimizer.h"

namespace p3 {
namespace rules {

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

// -1, 0 or 1; 0 for NaN, as in MXNet.
template <typename T>
T sign(T value) {
  return static_cast<T>(value > 0) - static_cast<T>(value < 0);
}

// Where a is NaN, the result is; a NaN in b loses to no number, as in MXNet.
template <typename T>
T maximum(T a, T b) {
  return ((a > b) | (a != a)) ? a : b;
}

// What nearly every rule needs, rounded as MXNet's fused operators round it.
template <typename T>
struct Fused {
  T lr, wd, rescale, bound;

  Fused(const OptimizerSpec& spec, const RoundScalars& round)
      : lr(as_operator_does<T>(round.lr)),
        wd(as_operator_does<T>(round.wd)),
        rescale(as_operator_does<T>(round.rescale)),
        bound(bound_of<T>(spec.clip_gradient)) {}
};

// The same for the optimizers that MXNet writes in Python: numbers stay in double until they meet the tensor, and each
// operation on tensors rounds once.
template <typename T>
struct Composed {
  T lr, wd, rescale, bound;

  Composed(const OptimizerSpec& spec, const RoundScalars& round)
      : lr(static_cast<T>(round.lr)),
        wd(static_cast<T>(round.wd)),
        rescale(static_cast<T>(round.rescale)),
        bound(bound_of<T>(spec.clip_gradient)) {}
};

// Fused operators.

// MXNet uses its "multi" operators for every dense SGD, with and without momentum. They round lr * rescale first
// when nothing is clipped, and clip rescale * gradient otherwise; `outer` and `inner` cover both without a branch.
template <typename T, bool kMomentum>
struct SgdBase {
  static constexpr int kStates = kMomentum ? 1 : 0;
  T momentum, decay, outer, inner, bound;

  SgdBase(const OptimizerSpec& spec, const RoundScalars& round)
      : momentum(as_operator_does<T>(spec.momentum)),
        decay(as_operator_does<T>(round.lr) * as_operator_does<T>(round.wd)),
        outer(as_operator_does<T>(round.lr) * (spec.clip_gradient < 0 ? as_operator_does<T>(round.rescale) : T(1))),
        inner(spec.clip_gradient < 0 ? T(1) : as_operator_does<T>(round.rescale)),
        bound(bound_of<T>(spec.clip_gradient)) {}

  T velocity(T carried, T weight, T gradient) const {
    return carried - decay * weight - outer * clip(inner * gradient, bound);
  }
};

template <typename T>
struct Sgd : SgdBase<T, false> {
  using SgdBase<T, false>::SgdBase;
  void operator()(T& weight, T gradient) const { weight += this->velocity(T(0), weight, gradient); }
};

template <typename T>
struct SgdMomentum : SgdBase<T, true> {
  using SgdBase<T, true>::SgdBase;
  void operator()(T& weight, T gradient, T& velocity) const {
    velocity = this->velocity(this->momentum * velocity, weight, gradient);
    weight += velocity;
  }
};

// NAG without momentum is the plain SGD operator, which shrinks the weight before it subtracts.
template <typename T>
struct NagPlain : SgdBase<T, false> {
  using SgdBase<T, false>::SgdBase;
  void operator()(T& weight, T gradient) const {
    weight = (T(1) - this->decay) * weight - this->outer * clip(this->inner * gradient, this->bound);
  }
};

template <typename T>
struct NagMomentum : Fused<T> {
  static constexpr int kStates = 1;
  using Fused<T>::lr, Fused<T>::wd, Fused<T>::rescale, Fused<T>::bound;
  T momentum;

  NagMomentum(const OptimizerSpec& spec, const RoundScalars& round)
      : Fused<T>(spec, round), momentum(as_operator_does<T>(spec.momentum)) {}

  // The velocity decays with the weight as it is after the update: MXNet writes the weight first.
  void operator()(T& weight, T gradient, T& velocity) const {
    const T carried = momentum * velocity;
    const T clipped = clip(rescale * gradient, bound);
    weight = weight - carried + (momentum + T(1)) * (carried - lr * (clipped + wd * weight));
    velocity = carried - lr * (clipped + wd * weight);
  }
};

// Only the gradient's sign counts, so that neither rescaling nor clipping does.
template <typename T>
struct SignSgd : Fused<T> {
  static constexpr int kStates = 0;
  using Fused<T>::lr, Fused<T>::wd, Fused<T>::Fused;

  void operator()(T& weight, T gradient) const { weight = (T(1) - lr * wd) * weight - lr * sign(gradient); }
};

template <typename T>
struct Signum : Fused<T> {
  static constexpr int kStates = 1;
  using Fused<T>::lr, Fused<T>::wd, Fused<T>::bound;
  T momentum, wd_lh, outer, inner;  // outer, inner: as in SgdBase

  Signum(const OptimizerSpec& spec, const RoundScalars& round)
      : Fused<T>(spec, round),
        momentum(as_operator_does<T>(spec.momentum)),
        wd_lh(as_operator_does<T>(spec.wd_lh)),
        outer((T(1) - momentum) * (spec.clip_gradient < 0 ? this->rescale : T(1))),
        inner(spec.clip_gradient < 0 ? T(1) : this->rescale) {}

  void operator()(T& weight, T gradient, T& mean) const {
    mean = momentum * mean - (T(1) - momentum) * wd * weight - outer * clip(inner * gradient, bound);
    weight = (T(1) - lr * wd_lh) * weight + lr * sign(mean);
  }
};

template <typename T>
struct Adam : Fused<T> {
  static constexpr int kStates = 2;
  using Fused<T>::lr, Fused<T>::wd, Fused<T>::rescale, Fused<T>::bound;
  T beta1, beta2, epsilon;

  Adam(const OptimizerSpec& spec, const RoundScalars& round)
      : Fused<T>(spec, round),
        beta1(as_operator_does<T>(spec.beta1)),
        beta2(as_operator_does<T>(spec.beta2)),
        epsilon(as_operator_does<T>(spec.epsilon)) {}

  void operator()(T& weight, T gradient, T& mean, T& variance) const {
    const T g = clip(gradient * rescale + weight * wd, bound);
    mean = beta1 * mean + (T(1) - beta1) * g;
    variance = beta2 * variance + (T(1) - beta2) * g * g;
    weight = weight - lr * mean / (std::sqrt(variance) + epsilon);
  }
};

template <typename T>
struct Ftml : Fused<T> {
  static constexpr int kStates = 3;
  using Fused<T>::wd, Fused<T>::rescale, Fused<T>::bound;
  T beta1, beta2, epsilon, step, correction;

  // Of MXNet's fused operators, this one alone takes a number (epsilon) in double.
  Ftml(const OptimizerSpec& spec, const RoundScalars& round)
      : Fused<T>(spec, round),
        beta1(as_operator_does<T>(spec.beta1)),
        beta2(as_operator_does<T>(spec.beta2)),
        epsilon(static_cast<T>(spec.epsilon)),
        step((T(1) - std::pow(beta1, static_cast<T>(round.updates))) / this->lr),
        correction(T(1) - std::pow(beta2, static_cast<T>(round.updates))) {}

  void operator()(T& weight, T gradient, T& distance, T& variance, T& lead) const {
    const T g = clip(rescale * gradient + wd * weight, bound);
    variance = beta2 * variance + (T(1) - beta2) * (g * g);
    const T farther = step * (std::sqrt(variance / correction) + epsilon);
    lead = beta1 * lead + (T(1) - beta1) * g - (farther - beta1 * distance) * weight;
    distance = farther;
    weight = -lead / distance;
  }
};

template <typename T>
struct Ftrl : Fused<T> {
  static constexpr int kStates = 2;
  using Fused<T>::lr, Fused<T>::wd, Fused<T>::rescale, Fused<T>::bound;
  T lamda1, beta;

  Ftrl(const OptimizerSpec& spec, const RoundScalars& round)
      : Fused<T>(spec, round), lamda1(as_operator_does<T>(spec.lamda1)), beta(as_operator_does<T>(spec.beta)) {}

  void operator()(T& weight, T gradient, T& lead, T& square) const {
    const T g = clip(rescale * gradient, bound);
    const T total = square + g * g;
    lead += g - (std::sqrt(total) - std::sqrt(square)) * weight / lr;
    square = total;
    const T outside = sign(maximum(std::abs(lead) - lamda1, T(0)));  // or GCC makes a branch of the comparison
    weight = (sign(lead) * lamda1 - lead) / ((beta + std::sqrt(square)) / lr + wd) * outside;
  }
};

template <typename T>
struct RmsPropBase : Fused<T> {
  T gamma1, gamma2, epsilon, weight_bound;

  RmsPropBase(const OptimizerSpec& spec, const RoundScalars& round)
      : Fused<T>(spec, round),
        gamma1(as_operator_does<T>(spec.gamma1)),
        gamma2(as_operator_does<T>(spec.gamma2)),
        epsilon(as_operator_does<T>(spec.epsilon)),
        weight_bound(bound_of<T>(spec.clip_weights)) {}

  T decayed(T gradient, T weight) const { return clip(this->rescale * gradient + this->wd * weight, this->bound); }
};

template <typename T>
struct RmsProp : RmsPropBase<T> {
  static constexpr int kStates = 1;
  using RmsPropBase<T>::RmsPropBase;

  void operator()(T& weight, T gradient, T& square) const {
    const T g = this->decayed(gradient, weight);
    square = (T(1) - this->gamma1) * (g * g) + this->gamma1 * square;
    weight = clip(weight - this->lr * (g / std::sqrt(square + this->epsilon)), this->weight_bound);
  }
};

template <typename T>
struct RmsPropCentered : RmsPropBase<T> {
  static constexpr int kStates = 3;
  using RmsPropBase<T>::RmsPropBase;

  void operator()(T& weight, T gradient, T& square, T& mean, T& delta) const {
    const T g = this->decayed(gradient, weight);
    square = (T(1) - this->gamma1) * g * g + this->gamma1 * square;
    mean = (T(1) - this->gamma1) * g + this->gamma1 * mean;
    delta = this->gamma2 * delta - this->lr * g / std::sqrt(square - mean * mean + this->epsilon);
    weight = clip(weight + delta, this->weight_bound);
  }
};

// Written in Python in MXNet.

template <typename T>
struct AdaGrad : Composed<T> {
  static constexpr int kStates = 1;
  using Composed<T>::lr, Composed<T>::wd, Composed<T>::rescale, Composed<T>::bound;
  T epsilon;

  AdaGrad(const OptimizerSpec& spec, const RoundScalars& round)
      : Composed<T>(spec, round), epsilon(static_cast<T>(spec.epsilon)) {}

  void operator()(T& weight, T gradient, T& history) const {
    const T g = clip(gradient * rescale, bound);
    history += g * g;
    weight += (g / std::sqrt(history + epsilon) + weight * wd) * -lr;
  }
};

// Has no learning rate.
template <typename T>
struct AdaDelta : Composed<T> {
  static constexpr int kStates = 2;
  using Composed<T>::wd, Composed<T>::rescale, Composed<T>::bound;
  T rho, rest, epsilon;

  AdaDelta(const OptimizerSpec& spec, const RoundScalars& round)
      : Composed<T>(spec, round),
        rho(static_cast<T>(spec.rho)),
        rest(static_cast<T>(1 - spec.rho)),
        epsilon(static_cast<T>(spec.epsilon)) {}

  void operator()(T& weight, T gradient, T& square, T& square_of_deltas) const {
    const T g = clip(gradient * rescale, bound);
    square = square * rho + rest * g * g;
    const T delta = std::sqrt(square_of_deltas + epsilon) / std::sqrt(square + epsilon) * g;
    square_of_deltas = square_of_deltas * rho + rest * delta * delta;
    weight -= delta + wd * weight;
  }
};

template <typename T>
struct Adamax : Composed<T> {
  static constexpr int kStates = 2;
  using Composed<T>::lr, Composed<T>::wd, Composed<T>::rescale, Composed<T>::bound;
  T beta1, rest, beta2;

  Adamax(const OptimizerSpec& spec, const RoundScalars& round)
      : Composed<T>(spec, round),
        beta1(static_cast<T>(spec.beta1)),
        rest(static_cast<T>(1 - spec.beta1)),
        beta2(static_cast<T>(spec.beta2)) {}

  void operator()(T& weight, T gradient, T& mean, T& largest) const {
    const T g = clip(gradient * rescale + wd * weight, bound);
    mean = mean * beta1 + rest * g;
    largest = maximum(beta2 * largest, std::abs(g));
    weight -= lr * mean / largest;
  }
};

template <typename T>
struct Nadam : Composed<T> {
  static constexpr int kStates = 2;
  using Composed<T>::lr, Composed<T>::wd, Composed<T>::rescale, Composed<T>::bound;
  T beta1, beta1_rest, beta2, beta2_rest, epsilon, now_rest, next, schedule_rest, next_schedule_rest, correction;

  Nadam(const OptimizerSpec& spec, const RoundScalars& round)
      : Composed<T>(spec, round),
        beta1(static_cast<T>(spec.beta1)),
        beta1_rest(static_cast<T>(1 - spec.beta1)),
        beta2(static_cast<T>(spec.beta2)),
        beta2_rest(static_cast<T>(1 - spec.beta2)),
        epsilon(static_cast<T>(spec.epsilon)),
        now_rest(static_cast<T>(1 - momentum_at(round.updates, spec))),
        next(static_cast<T>(momentum_at(round.updates + 1, spec))),
        schedule_rest(static_cast<T>(1 - round.schedule)),
        next_schedule_rest(static_cast<T>(1 - round.schedule * momentum_at(round.updates + 1, spec))),
        correction(static_cast<T>(1 - std::pow(spec.beta2, round.updates))) {}

  // p3/server/optimizers.py multiplies these into RoundScalars::schedule.
  static double momentum_at(double updates, const OptimizerSpec& spec) {
    return spec.beta1 * (1 - 0.5 * std::pow(0.96, updates * spec.schedule_decay));
  }

  void operator()(T& weight, T gradient, T& mean, T& variance) const {
    const T g = clip(gradient * rescale + wd * weight, bound);
    mean = mean * beta1 + beta1_rest * g;
    variance = variance * beta2 + beta2_rest * g * g;
    const T ahead = now_rest * (g / schedule_rest) + next * (mean / next_schedule_rest);
    weight -= lr * ahead / (std::sqrt(variance / correction) + epsilon);
  }
};

// The last state is the previous weight, which starts as the weight itself (Optimizer::start_state).
template <typename T>
struct DcAsgdBase : Composed<T> {
  T momentum, lamda;

  DcAsgdBase(const OptimizerSpec& spec, const RoundScalars& round)
      : Composed<T>(spec, round), momentum(static_cast<T>(spec.momentum)), lamda(static_cast<T>(spec.lamda)) {}

  T descent(T weight, T gradient, T previous) const {
    const T g = clip(gradient * this->rescale, this->bound);
    return -this->lr * (g + this->wd * weight + lamda * g * g * (weight - previous));
  }
};

template <typename T>
struct DcAsgd : DcAsgdBase<T> {
  static constexpr int kStates = 1;
  using DcAsgdBase<T>::DcAsgdBase;

  void operator()(T& weight, T gradient, T& previous) const {
    const T change = this->descent(weight, gradient, previous);
    previous = weight;
    weight += change;
  }
};

template <typename T>
struct DcAsgdMomentum : DcAsgdBase<T> {
  static constexpr int kStates = 2;
  using DcAsgdBase<T>::DcAsgdBase;

  void operator()(T& weight, T gradient, T& velocity, T& previous) const {
    velocity = velocity * this->momentum + this->descent(weight, gradient, previous);
    previous = weight;
    weight += velocity;
  }
};

// MXNet's own tests train with it: the gradient is added, and the state is the weight.
template <typename T>
struct Test : Composed<T> {
  static constexpr int kStates = 1;
  using Composed<T>::rescale, Composed<T>::Composed;

  void operator()(T& weight, T gradient, T& copy) const {
    weight += gradient * rescale;
    copy = weight;
  }
};

}  // namespace rules
}  // namespace p3
