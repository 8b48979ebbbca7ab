// A key of rows on the leader of its machine: see machine/sum.h.
#pragma once

#include <cstdint>
#include <deque>
#include <utility>
#include <vector>

#include "numeric/rank_row_sum.h"
#include "worker/machine/sum.h"

namespace p3 {

class MachineRows final : public MachineSum {
 public:
  // Each partition has a slot for each row (RowSum).
  MachineRows(const Machine& machine, const KeyPlan& plan, uint64_t next_round);

  // Frame by frame. The machine's frames are blocks if the leader's own were.
  Outcome add(int place, const Frame& frame, PooledBuffer payload) override;

  size_t room_bytes(const Header& push) const override { return BufferPool::roomy(push.payload_bytes); }
  // As copies, because the leader's own may be somewhere else by the time they leave; to those who want rows. The others
  // get an acknowledgement without rows once the last frame is there.
  Passed pass_on(const Header& header, const void* payload, Lender& landing) override;
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

  const char* problem_with_payload(int place, const Header& push) const override;
  std::vector<Frame> take(uint32_t partition);
  bool wants(int place, uint32_t partition) const { return partitions_[partition].wants[static_cast<size_t>(place)]; }
  void pass_to(bool wanting, const Frame& frame, Passed& passed);

  std::deque<Partition> partitions_;
  uint64_t pushed_bytes_ = 0;
  RowsHeader acknowledgement_;  // that was last given to the leader
};

}  // namespace p3
