#include "server/registry.h"

#include <algorithm>
#include <iterator>
#include <new>
#include <utility>

#include "p3/rule.h"
#include "server/discipline/stale/stale_partition.h"
#include "server/discipline/stale/stale_slice.h"
#include "server/discipline/sync/partition.h"
#include "server/discipline/sync/slice.h"

namespace p3 {

void Registry::define(const KeyPlan& plan, std::string name, int store) {
  check(plan.codec);
  if (const std::string problem = problem_with(plan); !problem.empty())
    host_.refuse_call("key '" + name + "' cannot have its plan: " + problem + ".");
  if ((!plan.is_synchronous() || plan.is_gathered()) && host_.outlives_workers)
    host_.refuse_call("key '" + name + "' has " + (plan.is_gathered() ? "factors" : "staleness") +
                      ", and no worker of such a key can be replaced.");
  if (plan.is_gathered() && plan.parts != static_cast<uint32_t>(machines_.num_workers()))
    host_.refuse_call("key '" + name + "' has " + std::to_string(plan.parts) +
                      " parts, one of each worker, but there are " + std::to_string(machines_.num_workers()) +
                      " workers.");
  auto entry = std::make_unique<Entry>();
  ServerKey& key = entry->key;
  key.machines = &machines_;
  key.plan = plan;
  key.name = std::move(name);
  key.store = store;
  key.aggregated = aggregates_ && plan.adds_up_on_machine();
  {
    MutexLock lock(mutex_);
    check_momentum(key, optimizer_of_store(store));
  }
  add(std::move(entry), 1);
}

void Registry::define_successor(const KeyPlan& plan, uint32_t predecessor) {
  auto entry = std::make_unique<Entry>();
  int parts = 1;
  {
    MutexLock lock(mutex_);
    const auto found = keys_.find(predecessor);
    if (found == keys_.end() || !problem_with(plan).empty() || !plan.has_rows() || !plan.is_synchronous() ||
        !found->second->key.plan.is_synchronous() || plan.elements != found->second->key.plan.elements ||
        plan.row_elements != found->second->key.plan.row_elements || plan.dtype != found->second->key.plan.dtype)
      host_.refuse_call("key " + std::to_string(predecessor) + " can have no such successor.");
    entry->key = found->second->key;
    if (const Optimizer* optimizer = optimizer_of_store(entry->key.store))
      parts += optimizer->state_count() + optimizer->needs_master(plan.dtype);
  }
  entry->key.plan = plan;
  entry->key.is_successor = true;
  add(std::move(entry), parts);
}

std::unique_ptr<Shard> Registry::make_shard(const ServerKey& key, uint32_t index, int thread, int parts) {
  const bool is_stale = !key.plan.is_synchronous();
  if (key.plan.has_rows() && is_stale) return std::make_unique<StalePartition>(key, index, thread, host_);
  if (key.plan.has_rows()) return std::make_unique<ServerPartition>(key, index, thread, host_, parts);
  if (is_stale) return std::make_unique<StaleSlice>(key, index, thread, host_);
  return std::make_unique<ServerSlice>(key, index, thread, host_);
}

void Registry::add(std::unique_ptr<Entry> entry, int parts) {
  const KeyPlan plan = entry->key.plan;
  try {
    entry->shards.resize(slice_count(plan));
    for (uint32_t i = 0; i < entry->shards.size(); ++i) {
      if (server_of(plan, i, num_servers_) != rank_) continue;
      const int thread = static_cast<int>(next_thread_++ % static_cast<size_t>(threads_));
      entry->shards[i] = make_shard(entry->key, i, thread, parts);
    }
  } catch (const std::bad_alloc&) {
    host_.refuse_call("no memory for this server's part of key '" + entry->key.name + "', which has " +
                      std::to_string(plan.elements) + " elements of type " + name_of(plan.dtype) +
                      ". Use more servers.");
  }
  MutexLock lock(mutex_);
  if (!keys_.emplace(plan.wire_key, std::move(entry)).second)
    host_.refuse_call("key " + std::to_string(plan.wire_key) + " is defined already.");
}

// Buffers that its shards have lent may still be in the hands of a sender, though all have come to their receivers.
void Registry::drop(uint32_t wire_key) {
  MutexLock lock(mutex_);
  const auto found = keys_.find(wire_key);
  if (found == keys_.end() || !found->second->key.plan.has_rows()) return;  // others never have a successor
  for (const auto& shard : found->second->shards)
    if (shard != nullptr) still_lent_.push_back(shard->hand_over_lent());
  keys_.erase(found);
  still_lent_.erase(
      std::remove_if(still_lent_.begin(), still_lent_.end(), [](LentBuffers& lent) { return lent.is_idle(); }),
      still_lent_.end());
}

bool Registry::drop_store(int store) {
  MutexLock lock(mutex_);
  for (auto it = keys_.begin(); it != keys_.end();) {
    const bool leaves = it->second->key.store == store;
    if (leaves) leaving_.push_back(std::move(it->second));
    it = leaves ? keys_.erase(it) : std::next(it);
  }
  const auto is_idle = [](const std::unique_ptr<Entry>& entry) {
    return std::all_of(entry->shards.begin(), entry->shards.end(),
                       [](const auto& shard) { return shard == nullptr || shard->is_idle(); });
  };
  leaving_.erase(std::remove_if(leaving_.begin(), leaving_.end(), is_idle), leaving_.end());
  if (std::any_of(leaving_.begin(), leaving_.end(), [=](const auto& entry) { return entry->key.store == store; }))
    return false;
  optimizers_.erase(store);
  return true;
}

void Registry::set_optimizer(int store, const OptimizerSpec& spec) {
  auto optimizer = Optimizer::make(spec);
  MutexLock lock(mutex_);
  if (optimizer_of_store(store) != nullptr)
    host_.refuse_call("store " + std::to_string(store) + " has an optimizer already.");
  for (const auto& [wire_key, entry] : keys_)
    if (entry->key.store == store) check_momentum(entry->key, optimizer.get());
  optimizers_[store] = std::move(optimizer);
}

const Optimizer* Registry::optimizer_of_store(int store) const {
  const auto found = optimizers_.find(store);
  return found == optimizers_.end() ? nullptr : found->second.get();
}

// What the workers do of SGD, nobody else must do as well.
void Registry::check_momentum(const ServerKey& key, const Optimizer* optimizer) const {
  if (key.plan.takes_steps() && optimizer != nullptr && !optimizer->rule().is_plain_sgd())
    host_.refuse_call("key '" + key.name + "' has deep gradient compression, which is for SGD with momentum alone.");
}

const Optimizer* Registry::optimizer_of(const ServerKey& key) const {
  if (key.plan.update == Update::kWorkers) return nullptr;
  MutexLock lock(mutex_);
  const Optimizer* optimizer = optimizer_of_store(key.store);
  if (optimizer != nullptr && !is_float(key.plan.dtype))
    host_.refuse_call("key '" + key.name + "' is of type " + name_of(key.plan.dtype) +
                      "; an optimizer updates floating point keys only.");
  return optimizer;
}

bool Registry::can_move(const ServerKey& key, uint32_t plan) const {
  MutexLock lock(mutex_);
  const auto found = keys_.find(plan);
  if (found == keys_.end() || plan == key.plan.wire_key) return false;
  const ServerKey& to = found->second->key;
  return to.is_successor && to.store == key.store && to.name == key.name;
}

std::vector<uint32_t> Registry::wire_keys() const {
  std::vector<uint32_t> wire_keys;
  MutexLock lock(mutex_);
  for (const auto& [wire_key, entry] : keys_) wire_keys.push_back(wire_key);
  return wire_keys;
}

Shard* Registry::find(const Header& header) const {
  MutexLock lock(mutex_);
  const auto found = keys_.find(header.key);
  if (found == keys_.end() || header.slice >= found->second->shards.size()) return nullptr;
  return found->second->shards[header.slice].get();
}

std::vector<Shard*> Registry::shards_of(uint32_t wire_key) const {
  std::vector<Shard*> shards;
  MutexLock lock(mutex_);
  const auto found = keys_.find(wire_key);
  if (found == keys_.end()) host_.refuse_call("there is no key " + std::to_string(wire_key) + ".");
  for (const auto& shard : found->second->shards)
    if (shard != nullptr) shards.push_back(shard.get());
  return shards;
}

}  // namespace p3
