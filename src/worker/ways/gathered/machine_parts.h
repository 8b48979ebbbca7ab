// A key of factors on the leader of its machine: see machine/sum.h. Nothing is summed: the part of a worker leaves the
// machine once, and the workers here get it from the leader, as they get those of other machines, which come once for all
// of them.
#pragma once

#include <vector>

#include "worker/machine/sum.h"
#include "worker/ways/gathered/factored_update.h"

namespace p3 {

class MachineParts final : public MachineSum {
 public:
  // `factored`: the leader's own; outlives it.
  MachineParts(const Machine& machine, const KeyPlan& plan, uint64_t next_round, FactoredUpdate& factored);

  size_t room_bytes(const Header& push) const override { return push.payload_bytes; }
  Outcome add(int place, const Frame& frame, PooledBuffer payload) override;
  // From where the part lies on the leader, to all but its worker.
  Passed pass_on(const Header& header, const void* part, Lender& landing) override;
  bool hands_on_fields() const override { return true; }
  int frames_from_key(uint32_t) const override { return workers() - 1; }

 private:
  struct Shard {
    int owner = -1;        // the place of the worker whose part it belongs to; -1: of another machine
    int missing = 0;       // pushes to come
    PooledBuffer part;     // that has come, until the machine's push is made
    bool is_here = false;  // it lies on the leader, until the answer
  };

  const char* problem_with_payload(int place, const Header& push) const override;

  FactoredUpdate& factored_;
  std::vector<Shard> shards_;  // by slice
};

}  // namespace p3
