// A key of rows on the leader of its machine: see machine_sum.h.
#pragma once

#include <cstdint>
#include <deque>
#include <utility>
#include <vector>

#include "transport/lent_buffers.h"
#include "worker/machine_sum.h"
#include "numeric/rank_row_sum.h"

namespace p3 {

class MachineRows final : public MachineSum {
 public:
  // `lent` holds the sums that leave. Each partition has a slot for each row (RowSum).
  MachineRows(const KeyPlan& plan, int workers, uint64_t next_round, BufferPool& pool, LentBuffers& lent);

  // Frame by frame. The machine's frames are blocks if the leader's own were.
  Outcome add(int place, const Header& push, PooledBuffer payload) override;

  // Whether a worker wants what has become of the rows, until the next round.
  bool wants(int place, uint32_t partition) const { return partitions_[partition].wants[static_cast<size_t>(place)]; }
  // Of the machine's pushes since the last call.
  uint64_t take_pushed_bytes() { return std::exchange(pushed_bytes_, 0); }

 private:
  struct Partition {
    Partition(int workers, const KeyPlan& plan, const RowRange& its_range, BufferPool& pool)
        : range(its_range), sum(workers, plan, range, pool), wants(static_cast<size_t>(workers), false) {}

    const RowRange range;
    RankRowSum sum;
    std::vector<bool> wants;  // by place
    uint64_t pushed_rows = 0;
    bool as_blocks = false;
    uint32_t next_plan = 0;  // that the leader's own frames tell of, if it is rank 0
  };

  const char* problem_with_payload(const Header& push) const override;
  std::vector<Frame> take(uint32_t partition);

  BufferPool& pool_;
  LentBuffers& lent_;
  std::deque<Partition> partitions_;
  uint64_t pushed_bytes_ = 0;
};

}  // namespace p3
