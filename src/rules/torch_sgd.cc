// PyTorch's SGD, with and without momentum.

#include "rules/torch.h"

namespace p3::rules {
namespace {

struct SgdNumbers final : Hyperparameters {
  double momentum, dampening;
  bool nesterov, maximize;

  explicit SgdNumbers(Fields& fields)
      : momentum(fields.at_least_0("momentum", 0)),
        dampening(fields.finite("dampening", 0)),
        nesterov(fields.flag("nesterov")),
        maximize(fields.flag("maximize")) {
    fields.per_round("updates");
  }

  bool is_plain_sgd() const override { return !nesterov && dampening == 0 && !maximize; }
};

template <typename T>
struct TorchSgd : Torch<T> {
  using Torch<T>::Torch;

  void operator()(T& weight, T gradient) const {
    weight = std::fma(this->minus_lr, this->decayed(gradient, weight), weight);
  }
};

template <typename T>
struct TorchSgdMomentum : Torch<T> {
  T momentum, share;
  bool first, nesterov;

  TorchSgdMomentum(const SgdNumbers& numbers, const RoundScalars& round)
      : Torch<T>(numbers, round),
        momentum(static_cast<T>(numbers.momentum)),
        share(static_cast<T>(1 - numbers.dampening)),
        first(round.updates == 1),
        nesterov(numbers.nesterov) {}

  // The first velocity is the gradient itself, whatever the dampening.
  void operator()(T& weight, T gradient, T& velocity) const {
    const T g = this->decayed(gradient, weight);
    const T moved = std::fma(share, g, velocity * momentum);
    velocity = first ? g : moved;
    const T ahead = std::fma(momentum, velocity, g);
    weight = std::fma(this->minus_lr, nesterov ? ahead : velocity, weight);
  }
};

}  // namespace

std::unique_ptr<Optimizer> torch_sgd(Fields& fields) {
  const SgdNumbers numbers(fields);
  if (numbers.momentum > 0) return element_loop<TorchSgdMomentum>(numbers, State{"momentum_buffer"});
  return element_loop<TorchSgd>(numbers);
}

}  // namespace p3::rules
