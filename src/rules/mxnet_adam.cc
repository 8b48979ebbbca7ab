// MXNet's Adam. The workers make the bias correction, a part of the learning rate.

#include "rules/mxnet.h"

namespace p3::rules {
namespace {

struct AdamNumbers final : Hyperparameters {
  double beta1, beta2, epsilon, clip_gradient;

  explicit AdamNumbers(Fields& fields)
      : beta1(fields.fraction("beta1", 0.9)),
        beta2(fields.fraction("beta2", 0.999)),
        epsilon(fields.at_least_0("epsilon", 1e-8)),
        clip_gradient(fields.clipping("clip_gradient")) {}

  RoundScalars counted(RoundScalars pushed, double&) const override {
    pushed.lr *= std::sqrt(1.0 - std::pow(beta2, pushed.updates)) / (1.0 - std::pow(beta1, pushed.updates));
    return pushed;
  }
};

template <typename T>
struct Adam : Fused<T> {
  using Fused<T>::lr, Fused<T>::wd, Fused<T>::rescale, Fused<T>::bound;
  T beta1, beta2, epsilon;

  Adam(const AdamNumbers& numbers, const RoundScalars& round)
      : Fused<T>(numbers, round),
        beta1(as_operator_does<T>(numbers.beta1)),
        beta2(as_operator_does<T>(numbers.beta2)),
        epsilon(as_operator_does<T>(numbers.epsilon)) {}

  void operator()(T& weight, T gradient, T& mean, T& variance) const {
    const T g = clip(gradient * rescale + weight * wd, bound);
    mean = beta1 * mean + (T(1) - beta1) * g;
    variance = beta2 * variance + (T(1) - beta2) * g * g;
    weight = weight - lr * mean / (std::sqrt(variance) + epsilon);
  }
};

}  // namespace

std::unique_ptr<Optimizer> mxnet_adam(Fields& fields) {
  return element_loop<Adam>(AdamNumbers(fields), State{"mean"}, State{"variance"});
}

}  // namespace p3::rules
