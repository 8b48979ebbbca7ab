// One slice of a dense key with staleness on its server: each push updates the value at once, and its answer waits for
// those who are too far behind (clocks.h). So what a worker receives holds its own pushes up to that one, and all others'
// up to `staleness` rounds before.
#pragma once

#include <cstdint>

#include "numeric/rank_sum.h"
#include "server/discipline/stale/copied_slice.h"
#include "server/discipline/stale/unanswered.h"

namespace p3 {

class StaleSlice final : public CopiedSlice {
 public:
  StaleSlice(const ServerKey& key, uint32_t index, int thread, ShardHost& host);

 private:
  void push(Task& task, Reply& reply) override;
  void update(const Optimizer& optimizer, Task& task);
  // Whoever may be answered by now. `nobody_goes_on`: all, with the last value.
  void answer_waiting(bool nobody_goes_on, Reply& reply);
  uint64_t round_of(int worker) const override { return unanswered_.round(worker); }

  Unanswered unanswered_;  // of the pushes that have updated the value
  RankSum gradient_;       // of one worker, as float32 or wider
};

}  // namespace p3
