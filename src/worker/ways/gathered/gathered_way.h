// A key of factors on its worker (p3/factors.h): each round its own leave, those of all others are gathered, and the
// weight is updated from them here.
//
// Memory: its update's.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "worker/way.h"
#include "worker/ways/gathered/factored_update.h"

namespace p3 {

class GatheredWay final : public Way {
 public:
  GatheredWay(Key& its_key, WayHost& host, const FactorShape& shape, int workers)
      : Way(its_key, host, kSliceFrames), update(shape, workers) {}

  FactoredUpdate update;  // while a round is under way, who computes
  int rank() const { return host_.rank; }
  // Whether that worker's part reaches this one, which leads its machine, without the servers.
  bool is_here(int worker) const;

  size_t bytes(uint8_t part) const override { return part == 0 ? Way::bytes(0) : landing_bytes(); }
  size_t landing_bytes() const override { return update.shape().elements() * sizeof(float); }
  std::vector<Operation> init(const void* value, void* landing, int32_t priority, Worker::Done done) override;
  std::shared_ptr<Transfer> push(const void* factors, void* weight, bool gated) override;
  std::shared_ptr<Transfer> skip(void* weight, bool gated, bool goes_on) override;
  // Of this worker's own state.
  std::shared_ptr<Transfer> fetch(uint8_t part, void* landing) override;
  std::shared_ptr<Transfer> store(uint8_t part, const void* content) override;
  void set_optimizer(const OptimizerSpec& spec) override;
  std::shared_ptr<MachineSum> sum_on(const Machine& machine, const KeyPlan& plan, uint64_t next_round) override;

 private:
  void require_landing(const void* landing) const;
  void require_state(uint8_t part) const;

  std::vector<int> ranks_here_;  // empty, unless this worker leads its machine
};

}  // namespace p3
