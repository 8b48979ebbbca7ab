// MXNet's AdaGrad.

#include "rules/mxnet.h"

namespace p3::rules {
namespace {

struct AdaGradNumbers final : Hyperparameters {
  double epsilon, clip_gradient;

  explicit AdaGradNumbers(Fields& fields)
      : epsilon(fields.at_least_0("epsilon", 1e-7)), clip_gradient(fields.clipping("clip_gradient")) {}
};

template <typename T>
struct AdaGrad : Composed<T> {
  using Composed<T>::lr, Composed<T>::wd, Composed<T>::rescale, Composed<T>::bound;
  T epsilon;

  AdaGrad(const AdaGradNumbers& numbers, const RoundScalars& round)
      : Composed<T>(numbers, round), epsilon(static_cast<T>(numbers.epsilon)) {}

  void operator()(T& weight, T gradient, T& history) const {
    const T g = clip(gradient * rescale, bound);
    history += g * g;
    weight += (g / std::sqrt(history + epsilon) + weight * wd) * -lr;
  }
};

}  // namespace

std::unique_ptr<Optimizer> mxnet_adagrad(Fields& fields) {
  return element_loop<AdaGrad>(AdaGradNumbers(fields), State{"history"});
}

}  // namespace p3::rules
