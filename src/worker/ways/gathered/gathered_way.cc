#include "worker/ways/gathered/gathered_way.h"

#include <algorithm>
#include <string>
#include <utility>

#include "worker/key.h"
#include "worker/ways/gathered/factors_transfer.h"
#include "worker/ways/gathered/machine_parts.h"
#include "worker/worker_impl.h"

namespace p3 {

using Kind = Transfer::Kind;

bool GatheredWay::is_here(int worker) const {
  return std::find(ranks_here_.begin(), ranks_here_.end(), worker) != ranks_here_.end();
}

std::vector<Operation> GatheredWay::init(const void*, void* landing, int32_t priority, Worker::Done done) {
  require_landing(landing);
  return {{std::make_shared<FactorsTransfer>(Kind::kInit, *this, nullptr, nullptr), std::move(done), priority}};
}

std::shared_ptr<Transfer> GatheredWay::push(const void* factors, void* weight, bool) {
  return std::make_shared<FactorsTransfer>(Kind::kPush, *this, factors, weight);
}

std::shared_ptr<Transfer> GatheredWay::skip(void* weight, bool gated, bool) {
  if (!gated) require_landing(weight);
  return std::make_shared<FactorsTransfer>(Kind::kSkip, *this, nullptr, weight);
}

std::shared_ptr<Transfer> GatheredWay::fetch(uint8_t part, void* landing) {
  require_state(part);
  return std::make_shared<FactorsTransfer>(Kind::kFetch, *this, nullptr, landing, part);
}

std::shared_ptr<Transfer> GatheredWay::store(uint8_t part, const void* content) {
  require_state(part);
  return std::make_shared<FactorsTransfer>(Kind::kStore, *this, content, nullptr, part);
}

void GatheredWay::set_optimizer(const OptimizerSpec& spec) {
  if (update.has_optimizer()) refuse("has an optimizer already");
  update.set_optimizer(spec);
}

std::shared_ptr<MachineSum> GatheredWay::sum_on(const Machine& machine, const KeyPlan& plan, uint64_t next_round) {
  ranks_here_ = machine.ranks;
  return std::make_shared<MachineParts>(machine, plan, next_round, update);
}

void GatheredWay::require_landing(const void* landing) const {
  if (landing == nullptr) refuse("needs its weight as the landing array");
}

void GatheredWay::require_state(uint8_t part) const {
  if (!update.has_state(part)) refuse("has no part " + std::to_string(part) + " of a state on this worker");
}

// --- what Worker has for such keys alone ---------------------------------------------------------------------------

int Worker::declare_factors(std::string name, const FactorShape& shape, int workers) {
  if (shape.part_elements() == 0 || workers < 1) impl_->refuse_call("key '" + name + "' has no factors");
  KeyPlan declared;
  declared.elements = shape.part_elements();
  declared.parts = static_cast<uint32_t>(workers);
  return impl_->add_key<GatheredWay>(std::move(name), declared, shape, workers);
}

}  // namespace p3
