// A weight that this worker updates itself, with the servers' arithmetic, from the factors of all workers.
//
// Threads: one at a time.
// Memory:  the factors that are gathered, and the optimizer's state; borrows the weight and this worker's own factors.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "numeric/products/factors.h"
#include "p3/key_plan.h"
#include "p3/live_optimizer.h"

namespace p3 {

class FactoredUpdate {
 public:
  FactoredUpdate(const FactorShape& shape, int workers);

  const FactorShape& shape() const { return shape_; }
  uint32_t workers() const { return static_cast<uint32_t>(present_.size()); }
  bool has_optimizer() const { return optimizer_.has_value(); }
  // Before the first update. Without one the sum takes the weight's place. Throws as Optimizer::make().
  void set_optimizer(const OptimizerSpec& spec) { optimizer_.emplace(spec); }

  // Of its state, 1 .. Optimizer::state_count(): elements() floats. All of them are stored, or none, before the first
  // update, which else begins them.
  bool has_state(uint8_t part) const {
    return optimizer_ && part >= 1 && part <= optimizer_->announced().state_count();
  }
  float* state(uint8_t part);

  // Where the factors of a worker go; they count in the next update once note() has said that they are there.
  float* gathered() { return gathered_.data(); }
  void note(int worker) { present_[static_cast<size_t>(worker)] = true; }

  // With the factors that are there, and `own` of the worker `rank`, or null. False if there are none: nothing changes.
  bool update(float* weight, int rank, const float* own, const RoundSettings& settings, Reduction reduction);

 private:
  std::vector<void*> make_state();

  const FactorShape shape_;
  std::optional<LiveOptimizer> optimizer_;
  std::vector<float> gathered_;  // a part of each worker, by rank; its own stays empty, unless it leads others
  std::vector<bool> present_;    // in this round
  std::vector<std::vector<float>> state_;
  std::vector<float> block_;  // of the sum
  FactorSum sum_;
};

}  // namespace p3
