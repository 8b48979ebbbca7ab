// An optimizer whose fields may have other values in a round than were announced for it.
//
// Threads: any. What as_of() returns is immutable, and stays for as long as somebody holds it.
// Memory:  the optimizers of the last two rounds with other values, as slices of two rounds are updated at a time.
#pragma once

#include <array>
#include <memory>
#include <utility>

#include "p3/optimizer.h"
#include "p3/thread_annotations.h"

namespace p3 {

class LiveOptimizer {
 public:
  // Throws as Optimizer::make().
  explicit LiveOptimizer(const OptimizerSpec& spec) : announced_(Optimizer::make(spec)) {}

  // Whose states there are.
  const Optimizer& announced() const { return *announced_; }
  // With those values of its fields. Throws as Optimizer::with().
  std::shared_ptr<const Optimizer> as_of(const SharedFields& fields) const {
    if (fields == nullptr) return announced_;
    MutexLock lock(mutex_);
    for (const auto& [values, optimizer] : made_)
      if (are_same(values, fields)) return optimizer;
    made_[1] = std::exchange(made_[0], {fields, announced_->with(*fields)});
    return made_[0].second;
  }

 private:
  const std::shared_ptr<const Optimizer> announced_;
  mutable Mutex mutex_;
  mutable std::array<std::pair<SharedFields, std::shared_ptr<const Optimizer>>, 2> made_ P3_GUARDED_BY(mutex_);
};

}  // namespace p3
