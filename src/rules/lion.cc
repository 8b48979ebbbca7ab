// Lion (Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023): the sign of a momentum, with decoupled decay.

#include "rules/element_loop.h"

namespace p3::rules {
namespace {

struct LionNumbers final : Hyperparameters {
  double beta1, beta2;

  explicit LionNumbers(Fields& fields) : beta1(fields.fraction("beta1", 0.9)), beta2(fields.fraction("beta2", 0.99)) {}
};

template <typename T>
struct Lion {
  T lr, wd, rescale, beta1, rest1, beta2, rest2;

  Lion(const LionNumbers& numbers, const RoundScalars& round)
      : lr(static_cast<T>(round.lr)),
        wd(static_cast<T>(round.wd)),
        rescale(static_cast<T>(round.rescale)),
        beta1(static_cast<T>(numbers.beta1)),
        rest1(static_cast<T>(1 - numbers.beta1)),
        beta2(static_cast<T>(numbers.beta2)),
        rest2(static_cast<T>(1 - numbers.beta2)) {}

  void operator()(T& weight, T gradient, T& momentum) const {
    const T g = gradient * rescale;
    const T lead = beta1 * momentum + rest1 * g;
    const T direction = lead != lead ? lead : sign(lead);  // a NaN is not to go unnoticed
    weight -= lr * (direction + wd * weight);
    momentum = beta2 * momentum + rest2 * g;
  }
};

}  // namespace

std::unique_ptr<Optimizer> lion(Fields& fields) { return element_loop<Lion>(LionNumbers(fields), State{"momentum"}); }

}  // namespace p3::rules
