// MXNet's Nadam.

#include "rules/mxnet.h"

namespace p3::rules {
namespace {

struct NadamNumbers final : Hyperparameters {
  double beta1, beta2, epsilon, schedule_decay, clip_gradient;

  explicit NadamNumbers(Fields& fields)
      : beta1(fields.fraction("beta1", 0.9)),
        beta2(fields.fraction("beta2", 0.999)),
        epsilon(fields.at_least_0("epsilon", 1e-8)),
        schedule_decay(fields.at_least_0("schedule_decay", 0.004)),
        clip_gradient(fields.clipping("clip_gradient")) {
    fields.per_round("updates");
    fields.per_round("schedule");
  }

  // The workers multiply these, each of its own, into RoundScalars::schedule (p3/mxnet/optimizers/descriptions.py).
  double momentum_at(double update) const { return beta1 * (1 - 0.5 * std::pow(0.96, update * schedule_decay)); }

  RoundScalars counted(RoundScalars pushed, double& schedule) const override {
    schedule *= momentum_at(pushed.updates);
    return pushed;
  }
  double schedule_behind(uint64_t updates) const override {
    double schedule = 1;
    for (uint64_t i = 1; i <= updates && schedule > 0; ++i) schedule *= momentum_at(static_cast<double>(i));
    return schedule;
  }
};

template <typename T>
struct Nadam : Composed<T> {
  using Composed<T>::lr, Composed<T>::wd, Composed<T>::rescale, Composed<T>::bound;
  T beta1, beta1_rest, beta2, beta2_rest, epsilon, now_rest, next, schedule_rest, next_schedule_rest, correction;

  Nadam(const NadamNumbers& numbers, const RoundScalars& round)
      : Composed<T>(numbers, round),
        beta1(static_cast<T>(numbers.beta1)),
        beta1_rest(static_cast<T>(1 - numbers.beta1)),
        beta2(static_cast<T>(numbers.beta2)),
        beta2_rest(static_cast<T>(1 - numbers.beta2)),
        epsilon(static_cast<T>(numbers.epsilon)),
        now_rest(static_cast<T>(1 - numbers.momentum_at(round.updates))),
        next(static_cast<T>(numbers.momentum_at(round.updates + 1))),
        schedule_rest(static_cast<T>(1 - round.schedule)),
        next_schedule_rest(static_cast<T>(1 - round.schedule * numbers.momentum_at(round.updates + 1))),
        correction(static_cast<T>(1 - std::pow(numbers.beta2, round.updates))) {}

  void operator()(T& weight, T gradient, T& mean, T& variance) const {
    const T g = clip(gradient * rescale + wd * weight, bound);
    mean = mean * beta1 + beta1_rest * g;
    variance = variance * beta2 + beta2_rest * g * g;
    const T ahead = now_rest * (g / schedule_rest) + next * (mean / next_schedule_rest);
    weight -= lr * ahead / (std::sqrt(variance / correction) + epsilon);
  }
};

}  // namespace

std::unique_ptr<Optimizer> mxnet_nadam(Fields& fields) {
  return element_loop<Nadam>(NadamNumbers(fields), State{"mean"}, State{"variance"});
}

}  // namespace p3::rules
