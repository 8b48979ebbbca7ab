// MXNet's SGD and ccSGD, with and without momentum.

#include "rules/mxnet.h"

namespace p3::rules {
namespace {

struct SgdNumbers final : Hyperparameters {
  double momentum, clip_gradient;

  explicit SgdNumbers(Fields& fields)
      : momentum(fields.at_least_0("momentum", 0)), clip_gradient(fields.clipping("clip_gradient")) {}

  bool is_plain_sgd() const override { return clip_gradient < 0; }
};

template <typename T>
struct Sgd : SgdBase<T> {
  using SgdBase<T>::SgdBase;
  void operator()(T& weight, T gradient) const { weight += this->velocity(T(0), weight, gradient); }
};

template <typename T>
struct SgdMomentum : SgdBase<T> {
  using SgdBase<T>::SgdBase;
  void operator()(T& weight, T gradient, T& velocity) const {
    velocity = this->velocity(this->momentum * velocity, weight, gradient);
    weight += velocity;
  }
};

}  // namespace

std::unique_ptr<Optimizer> mxnet_sgd(Fields& fields) {
  const SgdNumbers numbers(fields);
  if (numbers.momentum > 0) return element_loop<SgdMomentum>(numbers, State{"velocity"});
  return element_loop<Sgd>(numbers);
}

}  // namespace p3::rules
