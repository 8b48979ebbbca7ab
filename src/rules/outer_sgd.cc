// The outer optimizer of local steps (DiLoCo, arXiv 2311.08105), where workers send weights: what is summed are those, and
// the gradient is how far the weight is from their mean. SGD with momentum, as PyTorch's; the first velocity is 0.
//
// From weights, not from differences, because a float32 difference cannot give a weight back: with a learning rate of 1
// and no momentum the new weight is the mean to the bit, of one worker its own.

#include "rules/torch.h"

namespace p3::rules {
namespace {

struct OuterSgdNumbers final : Hyperparameters {
  double momentum;
  bool nesterov;

  explicit OuterSgdNumbers(Fields& fields)
      : momentum(fields.at_least_0("momentum", 0)), nesterov(fields.flag("nesterov")) {}
};

template <typename T>
struct OuterSgd {
  T rescale;
  Lerp<T> toward;

  OuterSgd(const OuterSgdNumbers&, const RoundScalars& round)
      : rescale(static_cast<T>(round.rescale)), toward(static_cast<T>(round.lr)) {}

  void operator()(T& weight, T sum) const { weight = toward(weight, sum * rescale); }
};

template <typename T>
struct OuterSgdMomentum {
  T rescale, momentum, minus_ahead;
  Lerp<T> toward;
  bool nesterov;

  OuterSgdMomentum(const OuterSgdNumbers& numbers, const RoundScalars& round)
      : rescale(static_cast<T>(round.rescale)),
        momentum(static_cast<T>(numbers.momentum)),
        minus_ahead(static_cast<T>(-round.lr * numbers.momentum)),
        toward(static_cast<T>(round.lr)),
        nesterov(numbers.nesterov) {}

  // The step is lr * (g + momentum * v), of the velocity v after this round (Nesterov) or before it: so the first part is
  // a way toward the mean.
  void operator()(T& weight, T sum, T& velocity) const {
    const T mean = sum * rescale;
    const T before = velocity;
    velocity = std::fma(momentum, before, weight - mean);
    weight = std::fma(minus_ahead, nesterov ? velocity : before, toward(weight, mean));
  }
};

}  // namespace

std::unique_ptr<Optimizer> outer_sgd(Fields& fields) {
  const OuterSgdNumbers numbers(fields);
  if (numbers.momentum > 0) return element_loop<OuterSgdMomentum>(numbers, State{"momentum_buffer"});
  return element_loop<OuterSgd>(numbers);
}

}  // namespace p3::rules
