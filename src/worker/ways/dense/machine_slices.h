// A dense key on the leader of its machine: see machine/sum.h.
#pragma once

#include <vector>

#include "numeric/rank_sum.h"
#include "worker/machine/sum.h"

namespace p3 {

class MachineSlices final : public MachineSum {
 public:
  MachineSlices(const Machine& machine, const KeyPlan& plan, uint64_t next_round);

  size_t room_bytes(const Header& push) const override { return push.payload_bytes; }
  Outcome add(int place, const Frame& frame, PooledBuffer payload) override;
  // From where it has landed; the leader has it already.
  Passed pass_on(const Header& header, const void* value, Lender& landing) override;
  int frames_from_landing() const override { return workers() - 1; }

 private:
  const char* problem_with_payload(int place, const Header& push) const override;

  std::vector<RankSum> sums_;  // by slice
};

}  // namespace p3
