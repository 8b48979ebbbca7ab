// How many updates a shard has had that updates with each push: the workers do not know, as each counts its own pushes. So
// of a key with staleness they send the numbers of the push alone, and what depends on the count is worked out here, as
// MXNet's and PyTorch's optimizers do where one process takes all pushes one after the other.
// Threads: none of its own.
#pragma once

#include <cmath>
#include <cstdint>

#include "p3/optimizer.h"

namespace p3 {

class UpdateCount {
 public:
  uint64_t count() const { return count_; }

  // So many updates are in the state that the shard has been given.
  void begin_behind(const OptimizerSpec& spec, uint64_t count) {
    count_ = count;
    schedule_ = 1;
    for (uint64_t i = 1; spec.algorithm == Algorithm::kNadam && i <= count && schedule_ > 0; ++i)
      schedule_ *= nadam_momentum(spec, i);
  }

  // The numbers of the next update. `pushed`: with the learning rate itself, without the corrections of Adam and Adamax;
  // torch_adagrad: `schedule` is its lr_decay.
  RoundScalars next(const OptimizerSpec& spec, RoundScalars pushed) {
    const auto updates = static_cast<double>(++count_);
    const double lr_decay = pushed.schedule;
    pushed.updates = updates;
    pushed.schedule = 1;
    switch (spec.algorithm) {
      case Algorithm::kAdam:
        pushed.lr *= std::sqrt(1.0 - std::pow(spec.beta2, updates)) / (1.0 - std::pow(spec.beta1, updates));
        break;
      case Algorithm::kAdamax:
        pushed.lr /= 1.0 - std::pow(spec.beta1, updates);
        break;
      case Algorithm::kNadam:
        pushed.schedule = schedule_ *= nadam_momentum(spec, count_);
        break;
      case Algorithm::kTorchAdaGrad:
        pushed.lr /= 1 + (updates - 1) * lr_decay;
        break;
      default:
        break;
    }
    return pushed;
  }

 private:
  static double nadam_momentum(const OptimizerSpec& spec, uint64_t update) {
    return spec.beta1 * (1.0 - 0.5 * std::pow(0.96, static_cast<double>(update) * spec.schedule_decay));
  }

  uint64_t count_ = 0;
  double schedule_ = 1;  // nadam: the product of the momenta so far
};

}  // namespace p3
