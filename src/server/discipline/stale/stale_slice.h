// One slice of a dense key with staleness on its server: each push updates the value at once, and its answer waits for
// those who are too far behind (clocks.h). So what a worker receives holds its own pushes up to that one, and all others'
// up to `staleness` rounds before.
//
// Memory: the value and the optimizer's state; a copy of the value for each answer that is on its way, as the value does
//         not wait for slow readers. One push of each worker at a time, so at most one copy for each.
#pragma once

#include <cstdint>
#include <vector>

#include "numeric/rank_sum.h"
#include "server/discipline/stale/stale_shard.h"
#include "server/ways/dense_shard.h"
#include "transport/lent_buffers.h"

namespace p3 {

class StaleSlice final : public StaleShard<DenseShard> {
 public:
  StaleSlice(const ServerKey& key, uint32_t index, int thread, ShardHost& host);

 private:
  bool has_all_back() override { return lent_.is_idle(); }

  // --- rounds, of each worker its own ------------------------------------------------------------------------------
  void push(Task& task, Reply& reply) override;
  void update(const Optimizer& optimizer, Task& task);
  // Whoever may be answered by now. `nobody_goes_on`: all, with the last value.
  void answer_waiting(bool nobody_goes_on, Reply& reply);
  void send_value(const std::vector<int>& workers, Reply& reply, bool asked_for) override;
  // A frame of the value, or of that array, as it is now, for so many receivers. Round and priority are still to come.
  Frame copy_of_value(const std::vector<int>& workers);
  Frame copy_of(const Header& header, const void* array, size_t bytes, int receivers);

  // --- other contents ----------------------------------------------------------------------------------------------
  void replace_value(PooledBuffer value) override;
  void fetch(Task& task, Reply& reply) override;
  void store(Task& task, Reply& reply) override;

  RankSum gradient_;  // of one worker, as float32 or wider
  LentBuffers lent_;
};

}  // namespace p3
