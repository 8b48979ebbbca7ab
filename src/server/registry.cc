#include "server/registry.h"

#include <algorithm>
#include <iterator>
#include <new>
#include <utility>

#include "server/partition.h"
#include "server/slice.h"
#include "server/stale_partition.h"
#include "server/stale_slice.h"

namespace p3 {

void Registry::define(const KeyPlan& plan, std::string name, int store) {
  if (!makes_sense(plan)) host_.refuse_call("the plan of key '" + name + "' makes no sense.");
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
  {
    MutexLock lock(mutex_);
    Store& settings = stores_[store];
    settings.has_keys = true;
    if (!plan.has_rows() && !plan.is_gathered())
      key.compression = settings.compression.for_key(plan.dtype, plan.is_vector);
    if (!plan.is_gathered()) key.reduction = settings.reduction;
    key.aggregated = aggregates_ && key.compression.encoding == Encoding::kPlain && plan.is_synchronous();
  }
  if (key.takes_steps() && !plan.is_synchronous())
    host_.refuse_call("key '" + key.name + "' has staleness, but deep gradient compression needs common rounds.");
  if (key.averages() && !is_float(plan.dtype))
    host_.refuse_call("key '" + key.name + "' is of type " + name_of(plan.dtype) +
                      "; only floating point keys can be averaged.");
  add(std::move(entry), 1);
}

void Registry::define_successor(const KeyPlan& plan, uint32_t predecessor) {
  auto entry = std::make_unique<Entry>();
  int parts = 1;
  {
    MutexLock lock(mutex_);
    const auto found = keys_.find(predecessor);
    if (found == keys_.end() || !makes_sense(plan) || !plan.has_rows() || !plan.is_synchronous() ||
        !found->second->key.plan.is_synchronous() || plan.elements != found->second->key.plan.elements ||
        plan.row_elements != found->second->key.plan.row_elements || plan.dtype != found->second->key.plan.dtype)
      host_.refuse_call("key " + std::to_string(predecessor) + " can have no such successor.");
    entry->key = found->second->key;
    if (const Optimizer* optimizer = stores_.at(entry->key.store).optimizer.get())
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
  stores_.erase(store);
  return true;
}

void Registry::set_optimizer(int store, const OptimizerSpec& spec) {
  auto optimizer = Optimizer::make(spec);
  MutexLock lock(mutex_);
  Store& settings = stores_[store];
  if (settings.optimizer != nullptr) host_.refuse_call("store " + std::to_string(store) + " has an optimizer already.");
  settings.optimizer = std::move(optimizer);
  check_together(store, settings);
}

void Registry::set_compression(int store, const Compression& compression) {
  check(compression);
  MutexLock lock(mutex_);
  Store& settings = without_keys(store);
  settings.compression = compression;
  check_together(store, settings);
}

void Registry::set_reduction(int store, Reduction reduction) {
  MutexLock lock(mutex_);
  Store& settings = without_keys(store);
  settings.reduction = reduction;
  check_together(store, settings);
}

// What deep gradient compression leaves to the workers, nobody else must do as well.
void Registry::check_together(int store, const Store& settings) const {
  if (!settings.compression.makes_steps()) return;
  const auto refuse = [&](const std::string& why) {
    host_.refuse_call("store " + std::to_string(store) + " has deep gradient compression, " + why + ".");
  };
  if (settings.reduction != Reduction::kSum) refuse("which sums gradients and does not average them");
  if (settings.optimizer == nullptr) return;
  const OptimizerSpec& spec = settings.optimizer->spec();
  const bool is_sgd = spec.algorithm == Algorithm::kSgd || spec.algorithm == Algorithm::kTorchSgd;
  if (!is_sgd || spec.nesterov || spec.dampening != 0 || spec.maximize || spec.clip_gradient >= 0)
    refuse("which is for SGD with momentum alone");
}

Store& Registry::without_keys(int store) {
  Store& settings = stores_[store];
  if (settings.has_keys)
    host_.refuse_call("store " + std::to_string(store) +
                      " has keys already; set its compression and reduction before its first init.");
  return settings;
}

const Optimizer* Registry::optimizer_of(const ServerKey& key) const {
  if (key.plan.is_gathered()) return nullptr;  // the workers update
  MutexLock lock(mutex_);
  const Optimizer* optimizer = stores_.at(key.store).optimizer.get();
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
