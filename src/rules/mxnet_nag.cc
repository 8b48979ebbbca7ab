// MXNet's NAG: Nesterov's accelerated gradient.

#include "rules/mxnet.h"

namespace p3::rules {
namespace {

struct NagNumbers final : Hyperparameters {
  double momentum, clip_gradient;

  explicit NagNumbers(Fields& fields)
      : momentum(fields.at_least_0("momentum", 0)), clip_gradient(fields.clipping("clip_gradient")) {}
};

// NAG without momentum is the plain SGD operator, which shrinks the weight before it subtracts.
template <typename T>
struct NagPlain : SgdBase<T> {
  using SgdBase<T>::SgdBase;
  void operator()(T& weight, T gradient) const {
    weight = (T(1) - this->decay) * weight - this->outer * clip(this->inner * gradient, this->bound);
  }
};

template <typename T>
struct NagMomentum : Fused<T> {
  using Fused<T>::lr, Fused<T>::wd, Fused<T>::rescale, Fused<T>::bound;
  T momentum;

  NagMomentum(const NagNumbers& numbers, const RoundScalars& round)
      : Fused<T>(numbers, round), momentum(as_operator_does<T>(numbers.momentum)) {}

  // The velocity decays with the weight as it is after the update: MXNet writes the weight first.
  void operator()(T& weight, T gradient, T& velocity) const {
    const T carried = momentum * velocity;
    const T clipped = clip(rescale * gradient, bound);
    weight = weight - carried + (momentum + T(1)) * (carried - lr * (clipped + wd * weight));
    velocity = carried - lr * (clipped + wd * weight);
  }
};

}  // namespace

std::unique_ptr<Optimizer> mxnet_nag(Fields& fields) {
  const NagNumbers numbers(fields);
  if (numbers.momentum > 0) return element_loop<NagMomentum>(numbers, State{"velocity"});
  return element_loop<NagPlain>(numbers);
}

}  // namespace p3::rules
