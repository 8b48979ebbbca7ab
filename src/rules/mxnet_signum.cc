// MXNet's Signum, and without momentum SignSGD.

#include "rules/mxnet.h"

namespace p3::rules {
namespace {

struct SignumNumbers final : Hyperparameters {
  double momentum;
  double wd_lh;  // decay apart from the gradient
  double clip_gradient;

  explicit SignumNumbers(Fields& fields)
      : momentum(fields.at_least_0("momentum", 0.9)),
        wd_lh(fields.at_least_0("wd_lh", 0)),
        clip_gradient(fields.clipping("clip_gradient")) {}
};

// Only the gradient's sign counts, so that neither rescaling nor clipping does.
template <typename T>
struct SignSgd : Fused<T> {
  using Fused<T>::lr, Fused<T>::wd, Fused<T>::Fused;

  void operator()(T& weight, T gradient) const { weight = (T(1) - lr * wd) * weight - lr * sign(gradient); }
};

template <typename T>
struct Signum : Fused<T> {
  using Fused<T>::lr, Fused<T>::wd, Fused<T>::bound;
  T momentum, wd_lh, outer, inner;  // outer, inner: as in SgdBase

  Signum(const SignumNumbers& numbers, const RoundScalars& round)
      : Fused<T>(numbers, round),
        momentum(as_operator_does<T>(numbers.momentum)),
        wd_lh(as_operator_does<T>(numbers.wd_lh)),
        outer((T(1) - momentum) * (numbers.clip_gradient < 0 ? this->rescale : T(1))),
        inner(numbers.clip_gradient < 0 ? T(1) : this->rescale) {}

  void operator()(T& weight, T gradient, T& mean) const {
    mean = momentum * mean - (T(1) - momentum) * wd * weight - outer * clip(inner * gradient, bound);
    weight = (T(1) - lr * wd_lh) * weight + lr * sign(mean);
  }
};

}  // namespace

std::unique_ptr<Optimizer> mxnet_signum(Fields& fields) {
  const SignumNumbers numbers(fields);
  if (numbers.momentum > 0) return element_loop<Signum>(numbers, State{"mean"});
  return element_loop<SignSgd>(numbers);
}

}  // namespace p3::rules
