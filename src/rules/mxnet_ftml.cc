// MXNet's FTML.

#include "rules/mxnet.h"

namespace p3::rules {
namespace {

struct FtmlNumbers final : Hyperparameters {
  double beta1, beta2, epsilon, clip_gradient;

  explicit FtmlNumbers(Fields& fields)
      : beta1(fields.fraction("beta1", 0.6)),
        beta2(fields.fraction("beta2", 0.999)),
        epsilon(fields.at_least_0("epsilon", 1e-8)),
        clip_gradient(fields.clipping("clip_gradient")) {
    fields.per_round("updates");
  }
};

template <typename T>
struct Ftml : Fused<T> {
  using Fused<T>::wd, Fused<T>::rescale, Fused<T>::bound;
  T beta1, beta2, epsilon, step, correction;

  // Of MXNet's fused operators, this one alone takes a number (epsilon) in double.
  Ftml(const FtmlNumbers& numbers, const RoundScalars& round)
      : Fused<T>(numbers, round),
        beta1(as_operator_does<T>(numbers.beta1)),
        beta2(as_operator_does<T>(numbers.beta2)),
        epsilon(static_cast<T>(numbers.epsilon)),
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

}  // namespace

std::unique_ptr<Optimizer> mxnet_ftml(Fields& fields) {
  return element_loop<Ftml>(FtmlNumbers(fields), State{"distance"}, State{"variance"}, State{"lead"});
}

}  // namespace p3::rules
