// PyTorch's Adam and AdamW.

#include "rules/torch.h"

namespace p3::rules {
namespace {

struct AdamNumbers final : Hyperparameters {
  double beta1, beta2, epsilon;
  bool amsgrad;
  bool decoupled;  // decays the weight itself, as AdamW does
  bool maximize;

  explicit AdamNumbers(Fields& fields)
      : beta1(fields.fraction("beta1", 0.9)),
        beta2(fields.fraction("beta2", 0.999)),
        epsilon(fields.at_least_0("epsilon", 1e-8)),
        amsgrad(fields.flag("amsgrad")),
        decoupled(fields.flag("decoupled")),
        maximize(fields.flag("maximize")) {
    fields.per_round("updates");
  }
};

// Adam; AdamW where the decay is decoupled. States: exp_avg, exp_avg_sq, and max_exp_avg_sq for AMSGrad.
template <typename T, bool kAmsgrad>
struct TorchAdamBase : Torch<T> {
  Lerp<T> lerp;
  T beta2, share2, epsilon, shrinking, minus_step, correction;

  TorchAdamBase(const AdamNumbers& numbers, const RoundScalars& round)
      : Torch<T>(numbers, round),
        lerp(static_cast<T>(1 - numbers.beta1)),
        beta2(static_cast<T>(numbers.beta2)),
        share2(static_cast<T>(1 - numbers.beta2)),
        epsilon(static_cast<T>(numbers.epsilon)),
        shrinking(static_cast<T>(numbers.decoupled ? 1 - round.lr * round.wd : 1)),
        minus_step(static_cast<T>(-(round.lr / (1 - std::pow(numbers.beta1, round.updates))))),
        correction(static_cast<T>(std::pow(1 - std::pow(numbers.beta2, round.updates), 0.5))) {
    if (numbers.decoupled) this->wd = 0;
  }

  template <typename... Largest>
  void operator()(T& weight, T gradient, T& mean, T& square, Largest&... largest) const {
    const T g = this->decayed(gradient, weight);
    mean = lerp(mean, g);
    square = std::fma(share2 * g, g, square * beta2);
    T counts = square;
    ((counts = largest = maximum(largest, square)), ...);
    weight = weight * shrinking + minus_step * mean / (std::sqrt(counts) / correction + epsilon);
  }
};
template <typename T>
using TorchAdam = TorchAdamBase<T, false>;
template <typename T>
using TorchAmsgrad = TorchAdamBase<T, true>;

}  // namespace

std::unique_ptr<Optimizer> torch_adam(Fields& fields) {
  const AdamNumbers numbers(fields);
  const State mean{"exp_avg"}, square{"exp_avg_sq"};
  if (numbers.amsgrad) return element_loop<TorchAmsgrad>(numbers, mean, square, State{"max_exp_avg_sq"});
  return element_loop<TorchAdam>(numbers, mean, square);
}

}  // namespace p3::rules
