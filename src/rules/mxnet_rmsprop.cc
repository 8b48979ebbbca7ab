// MXNet's RMSProp, plain (Tieleman and Hinton) and centered (Graves): two rules.

#include "rules/mxnet.h"

namespace p3::rules {
namespace {

struct RmsPropNumbers final : Hyperparameters {
  double gamma1, epsilon, clip_weights;
  double gamma2;  // centered: momentum
  double clip_gradient;

  RmsPropNumbers(Fields& fields, bool centered)
      : gamma1(fields.fraction("gamma1", 0.9)),
        epsilon(fields.at_least_0("epsilon", 1e-8)),
        clip_weights(fields.clipping("clip_weights")),
        gamma2(centered ? fields.at_least_0("gamma2", 0.9) : 0),
        clip_gradient(fields.clipping("clip_gradient")) {}
};

template <typename T>
struct RmsPropBase : Fused<T> {
  T gamma1, gamma2, epsilon, weight_bound;

  RmsPropBase(const RmsPropNumbers& numbers, const RoundScalars& round)
      : Fused<T>(numbers, round),
        gamma1(as_operator_does<T>(numbers.gamma1)),
        gamma2(as_operator_does<T>(numbers.gamma2)),
        epsilon(as_operator_does<T>(numbers.epsilon)),
        weight_bound(bound_of<T>(numbers.clip_weights)) {}

  T decayed(T gradient, T weight) const { return clip(this->rescale * gradient + this->wd * weight, this->bound); }
};

template <typename T>
struct RmsProp : RmsPropBase<T> {
  using RmsPropBase<T>::RmsPropBase;

  void operator()(T& weight, T gradient, T& square) const {
    const T g = this->decayed(gradient, weight);
    square = (T(1) - this->gamma1) * (g * g) + this->gamma1 * square;
    weight = clip(weight - this->lr * (g / std::sqrt(square + this->epsilon)), this->weight_bound);
  }
};

template <typename T>
struct RmsPropCentered : RmsPropBase<T> {
  using RmsPropBase<T>::RmsPropBase;

  void operator()(T& weight, T gradient, T& square, T& mean, T& delta) const {
    const T g = this->decayed(gradient, weight);
    square = (T(1) - this->gamma1) * g * g + this->gamma1 * square;
    mean = (T(1) - this->gamma1) * g + this->gamma1 * mean;
    delta = this->gamma2 * delta - this->lr * g / std::sqrt(square - mean * mean + this->epsilon);
    weight = clip(weight + delta, this->weight_bound);
  }
};

}  // namespace

std::unique_ptr<Optimizer> mxnet_rmsprop(Fields& fields) {
  return element_loop<RmsProp>(RmsPropNumbers(fields, false), State{"square"});
}

std::unique_ptr<Optimizer> mxnet_rmsprop_centered(Fields& fields) {
  return element_loop<RmsPropCentered>(RmsPropNumbers(fields, true), State{"square"}, State{"mean"}, State{"delta"});
}

}  // namespace p3::rules
