// The outer optimizer of local steps (DiLoCo, arXiv 2311.08105), where workers send weights: what is summed are those, and
// the gradient is how far the weight is from their mean. SGD with momentum, as PyTorch's; the first velocity is 0.
//
// From weights, not from differences, because a float32 difference cannot give a weight back: with a learning rate of 1
// and no momentum the new weight is the mean to the bit, of one worker its own, unless the sum cannot tell it from the old.

#include <limits>

#include "rules/torch.h"

namespace p3::rules {
namespace {

struct OuterSgdNumbers final : Hyperparameters {
  double momentum;
  bool nesterov;

  explicit OuterSgdNumbers(Fields& fields)
      : momentum(fields.at_least_0("momentum", 0)), nesterov(fields.flag("nesterov")) {}
};

// Of the sum of all workers' weights. A division, as T(1.0 / 3) is above a third. And a sum rounds: of three equal weights
// it is not three times one. What is within that of the weight is no difference, or weights that nobody trains would
// drift, the faster the more momentum. The sum of 2, 4, 8 ... equal weights is exact.
template <typename T>
struct Mean {
  T workers, noise;

  explicit Mean(const RoundScalars& round) : workers(static_cast<T>(1 / round.rescale)) {
    const double levels = std::log2(1 / round.rescale);  // of a tree of sums, each of which rounds
    noise = levels == std::floor(levels) ? T(0) : static_cast<T>(std::ceil(levels)) * std::numeric_limits<T>::epsilon();
  }
  T operator()(T weight, T sum) const {
    const T mean = sum / workers;
    return std::abs(mean - weight) < noise * std::abs(weight) ? weight : mean;
  }
};

template <typename T>
struct OuterSgd {
  Mean<T> mean_of;
  Lerp<T> toward;

  OuterSgd(const OuterSgdNumbers&, const RoundScalars& round) : mean_of(round), toward(static_cast<T>(round.lr)) {}

  void operator()(T& weight, T sum) const { weight = toward(weight, mean_of(weight, sum)); }
};

template <typename T>
struct OuterSgdMomentum {
  T momentum, minus_ahead;
  Mean<T> mean_of;
  Lerp<T> toward;
  bool nesterov;

  OuterSgdMomentum(const OuterSgdNumbers& numbers, const RoundScalars& round)
      : momentum(static_cast<T>(numbers.momentum)),
        minus_ahead(static_cast<T>(-round.lr * numbers.momentum)),
        mean_of(round),
        toward(static_cast<T>(round.lr)),
        nesterov(numbers.nesterov) {}

  // The step is lr * (g + momentum * v), of the velocity v after this round (Nesterov) or before it: so the first part is
  // a way toward the mean.
  void operator()(T& weight, T sum, T& velocity) const {
    const T mean = mean_of(weight, sum);
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
