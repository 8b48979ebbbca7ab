// PyTorch's Adagrad.

#include "rules/torch.h"

namespace p3::rules {
namespace {

struct AdaGradNumbers final : Hyperparameters {
  double epsilon, initial_accumulator_value;
  bool maximize;

  explicit AdaGradNumbers(Fields& fields)
      : epsilon(fields.at_least_0("epsilon", 1e-10)),
        initial_accumulator_value(fields.at_least_0("initial_accumulator_value", 0)),
        maximize(fields.flag("maximize")) {}

  // What is pushed as the schedule is lr_decay.
  RoundScalars counted(RoundScalars pushed, double&) const override {
    pushed.lr /= 1 + (pushed.updates - 1) * pushed.schedule;
    return pushed;
  }
};

template <typename T>
struct TorchAdaGrad : Torch<T> {
  T epsilon;

  TorchAdaGrad(const AdaGradNumbers& numbers, const RoundScalars& round)
      : Torch<T>(numbers, round), epsilon(static_cast<T>(numbers.epsilon)) {}

  void operator()(T& weight, T gradient, T& sum) const {
    const T g = this->decayed(gradient, weight);
    sum = std::fma(g, g, sum);
    weight += this->minus_lr * g / (std::sqrt(sum) + epsilon);
  }
};

}  // namespace

std::unique_ptr<Optimizer> torch_adagrad(Fields& fields) {
  const AdaGradNumbers numbers(fields);
  return element_loop<TorchAdaGrad>(numbers, State{"sum", numbers.initial_accumulator_value});
}

}  // namespace p3::rules
