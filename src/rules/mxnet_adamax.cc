// MXNet's Adamax. The workers make the bias correction, a part of the learning rate.

#include "rules/mxnet.h"

namespace p3::rules {
namespace {

struct AdamaxNumbers final : Hyperparameters {
  double beta1, beta2, clip_gradient;

  explicit AdamaxNumbers(Fields& fields)
      : beta1(fields.fraction("beta1", 0.9)),
        beta2(fields.fraction("beta2", 0.999)),
        clip_gradient(fields.clipping("clip_gradient")) {}

  RoundScalars counted(RoundScalars pushed, double&) const override {
    pushed.lr /= 1.0 - std::pow(beta1, pushed.updates);
    return pushed;
  }
};

template <typename T>
struct Adamax : Composed<T> {
  using Composed<T>::lr, Composed<T>::wd, Composed<T>::rescale, Composed<T>::bound;
  T beta1, rest, beta2;

  Adamax(const AdamaxNumbers& numbers, const RoundScalars& round)
      : Composed<T>(numbers, round),
        beta1(static_cast<T>(numbers.beta1)),
        rest(static_cast<T>(1 - numbers.beta1)),
        beta2(static_cast<T>(numbers.beta2)) {}

  void operator()(T& weight, T gradient, T& mean, T& largest) const {
    const T g = clip(gradient * rescale + wd * weight, bound);
    mean = mean * beta1 + rest * g;
    largest = maximum(beta2 * largest, std::abs(g));
    weight -= lr * mean / largest;
  }
};

}  // namespace

std::unique_ptr<Optimizer> mxnet_adamax(Fields& fields) {
  return element_loop<Adamax>(AdamaxNumbers(fields), State{"mean"}, State{"largest"});
}

}  // namespace p3::rules
