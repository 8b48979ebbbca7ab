// How many updates a shard has had that updates with each push: the workers do not know, as each counts its own pushes. So
// of a key with staleness they send the numbers of the push alone, and what depends on the count is worked out here, as
// MXNet's and PyTorch's optimizers do where one process takes all pushes one after the other.
// Threads: none of its own.
#pragma once

#include <cstdint>

#include "p3/rule.h"

namespace p3 {

class UpdateCount {
 public:
  const uint64_t& count() const { return count_; }

  // So many updates are in the state that the shard has been given.
  void begin_behind(const Optimizer& optimizer, uint64_t count) {
    count_ = count;
    schedule_ = optimizer.rule().schedule_behind(count);
  }

  // The numbers of the next update. `pushed`: with the learning rate itself, without a correction.
  RoundScalars next(const Optimizer& optimizer, RoundScalars pushed) {
    pushed.updates = static_cast<double>(++count_);
    RoundScalars scalars = optimizer.rule().counted(pushed, schedule_);
    scalars.schedule = schedule_;
    return scalars;
  }

 private:
  uint64_t count_ = 0;
  double schedule_ = 1;  // RoundScalars::schedule of the last update
};

}  // namespace p3
