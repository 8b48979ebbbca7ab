// MXNet's AdaDelta.

#include "rules/mxnet.h"

namespace p3::rules {
namespace {

struct AdaDeltaNumbers final : Hyperparameters {
  double rho, epsilon, clip_gradient;

  explicit AdaDeltaNumbers(Fields& fields)
      : rho(fields.fraction("rho", 0.9)),
        epsilon(fields.at_least_0("epsilon", 1e-5)),
        clip_gradient(fields.clipping("clip_gradient")) {}
};

// Has no learning rate.
template <typename T>
struct AdaDelta : Composed<T> {
  using Composed<T>::wd, Composed<T>::rescale, Composed<T>::bound;
  T rho, rest, epsilon;

  AdaDelta(const AdaDeltaNumbers& numbers, const RoundScalars& round)
      : Composed<T>(numbers, round),
        rho(static_cast<T>(numbers.rho)),
        rest(static_cast<T>(1 - numbers.rho)),
        epsilon(static_cast<T>(numbers.epsilon)) {}

  void operator()(T& weight, T gradient, T& square, T& square_of_deltas) const {
    const T g = clip(gradient * rescale, bound);
    square = square * rho + rest * g * g;
    const T delta = std::sqrt(square_of_deltas + epsilon) / std::sqrt(square + epsilon) * g;
    square_of_deltas = square_of_deltas * rho + rest * delta * delta;
    weight -= delta + wd * weight;
  }
};

}  // namespace

std::unique_ptr<Optimizer> mxnet_adadelta(Fields& fields) {
  return element_loop<AdaDelta>(AdaDeltaNumbers(fields), State{"square"}, State{"square_of_deltas"});
}

}  // namespace p3::rules
