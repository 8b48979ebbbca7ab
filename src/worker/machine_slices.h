// A dense key on the leader of its machine: see machine_sum.h.
#pragma once

#include <vector>

#include "transport/lent_buffers.h"
#include "worker/machine_sum.h"
#include "numeric/rank_sum.h"

namespace p3 {

class MachineSlices final : public MachineSum {
 public:
  // `lent` holds the sums that leave.
  MachineSlices(const KeyPlan& plan, int workers, uint64_t next_round, BufferPool& pool, LentBuffers& lent);

  Outcome add(int place, const Header& push, PooledBuffer payload) override;

 private:
  const char* problem_with_payload(const Header& push) const override;

  BufferPool& pool_;
  LentBuffers& lent_;
  std::vector<RankSum> sums_;  // by slice
};

}  // namespace p3
