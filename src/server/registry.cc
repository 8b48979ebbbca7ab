#include "server/registry.h"

#include <algorithm>
#include <iterator>
#include <map>
#include <new>
#include <utility>

#include "server/discipline/make_shard.h"

namespace p3 {

void Registry::define(const KeyPlan& plan, std::string name, int store) {
  check(plan.codec);
  check(plan.value_codec);
  auto entry = std::make_unique<Entry>();
  ServerKey& key = entry->key;
  const bool in_groups = groups_ != nullptr && plan.adds_up_in_groups();
  key.machines = in_groups ? groups_ : &machines_;
  key.first_worker = &host_.first_worker;
  key.plan = plan;
  key.name = std::move(name);
  key.store = store;
  key.aggregated = in_groups || (aggregates_ && plan.adds_up_on_machine());
  require(key, problem_with(plan));
  require(key, problem_with_servers(plan, num_servers_));
  require(key, problem_with(plan, machines_.num_workers(), host_.outlives_workers));
  {
    MutexLock lock(mutex_);
    if (const LiveOptimizer* its = optimizer_of_store(store)) require(key, problem_with(plan, its->announced()));
    key.norm = norm_of(key);
  }
  add(std::move(entry));
}

void Registry::inherit(const Registry& other) {
  std::map<uint32_t, const Entry*> in_order;  // as they were defined, so that the parts of a norm keep their places
  MutexLock lock(other.mutex_);
  for (const auto& [wire_key, entry] : other.keys_) in_order[wire_key] = entry.get();
  for (const auto& [wire_key, entry] : in_order) {
    const ServerKey& key = entry->key;
    require(key, other.optimizer_of_store(key.store) == nullptr ? "" : "its server is lost, and has updated it");
    define(key.plan, key.name, key.store);
  }
  open();
}

void Registry::open() {
  MutexLock lock(mutex_);
  for (const auto& [wire_key, entry] : keys_) {
    const ServerKey& key = entry->key;
    require(key,
            optimizer_of_store(key.store) == nullptr ? "" : "its servers update it, and no worker has that to claim");
    if (key.plan.tells_norms()) norms_[key.store].open();
    for (const auto& shard : entry->shards) {
      if (shard == nullptr) continue;
      require(key, shard->can_be_inherited() ? "" : "its server is lost, which had more of it than sums");
      shard->claims = std::make_unique<Claims>(machines_.num_workers());
    }
  }
}

void Registry::require(const ServerKey& key, const std::string& problem) const {
  if (!problem.empty()) host_.refuse_call("key '" + key.name + "' cannot have its plan: " + problem + ".");
}

StoreNorm* Registry::norm_of(const ServerKey& key) {
  if (key.plan.tells_norms()) {
    const auto is_of_store = [&](const auto& each) { return each.second->key.store == key.store; };
    const bool comes_first = std::none_of(keys_.begin(), keys_.end(), is_of_store);
    require(key, comes_first ? "" : "its store has keys already, of which it would know nothing");
    return &norms_[key.store];
  }
  const auto found = norms_.find(key.store);
  if (found == norms_.end() || !key.plan.is_part_of_norm()) return nullptr;
  require(key, found->second.has_begun() ? "the norm of its store has had rounds already" : "");
  return &found->second;
}

void Registry::define_successor(const KeyPlan& plan, uint32_t predecessor) {
  auto entry = std::make_unique<Entry>();
  {
    MutexLock lock(mutex_);
    const auto found = keys_.find(predecessor);
    if (found == keys_.end() || !problem_with(plan).empty() || !plan.can_follow(found->second->key.plan) ||
        found->second->key.norm != nullptr)  // what has summed a round must be known before it
      host_.refuse_call("key " + std::to_string(predecessor) + " can have no such successor.");
    entry->key = found->second->key;
  }
  entry->key.plan = plan;
  entry->key.is_successor = true;
  add(std::move(entry));
}

void Registry::recut(const KeyPlan& plan, uint32_t predecessor, uint64_t round) {
  auto entry = std::make_unique<Entry>();
  {
    MutexLock lock(mutex_);
    const auto found = keys_.find(predecessor);
    if (found == keys_.end()) host_.refuse_call("there is no key " + std::to_string(predecessor) + " to be cut anew.");
    const ServerKey& former = found->second->key;
    require(former, problem_with(plan));
    require(former, problem_with_servers(plan, num_servers_));
    const bool has_sums_alone = plan.is_another_cut_of(former.plan) && optimizer_of_store(former.store) == nullptr;
    require(former, has_sums_alone ? "" : "its servers keep more of it than sums, which would have to move");
    for (const auto& shard : found->second->shards)
      require(former, shard == nullptr || shard->published == round ? "" : "a round of it is under way");
    entry->key = former;
  }
  entry->key.plan = plan;
  add(std::move(entry));
  for (Shard* shard : shards_of(plan.wire_key)) shard->begin_behind(round);
  MutexLock lock(mutex_);
  const auto former = keys_.find(predecessor);
  for (const auto& shard : former->second->shards)
    if (shard != nullptr) shard->leave_norm();
  leaving_.push_back(std::move(former->second));
  keys_.erase(former);
  free_idle_locked();
}

void Registry::add(std::unique_ptr<Entry> entry) {
  const KeyPlan plan = entry->key.plan;
  try {
    entry->shards.resize(slice_count(plan));
    for (uint32_t i = 0; i < entry->shards.size(); ++i) {
      if (server_of(plan, i, num_servers_) != rank_) continue;
      const int thread = static_cast<int>(next_thread_++ % static_cast<size_t>(threads_));
      entry->shards[i] = make_shard(entry->key, i, thread, host_);
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

// What its shards have lent may still be in the hands of a sender, though all have come to their receivers, and a summing
// thread may not have put away yet what it did last.
void Registry::drop(uint32_t wire_key) {
  MutexLock lock(mutex_);
  const auto found = keys_.find(wire_key);
  if (found == keys_.end() || !found->second->key.plan.can_move()) return;  // others never have a successor
  leaving_.push_back(std::move(found->second));
  keys_.erase(found);
  free_idle_locked();
}

void Registry::free_idle() {
  MutexLock lock(mutex_);
  free_idle_locked();
}

void Registry::free_idle_locked() {
  const auto is_idle = [](const std::unique_ptr<Entry>& entry) {
    return std::all_of(entry->shards.begin(), entry->shards.end(),
                       [](const auto& shard) { return shard == nullptr || shard->is_idle(); });
  };
  leaving_.erase(std::remove_if(leaving_.begin(), leaving_.end(), is_idle), leaving_.end());
}

bool Registry::drop_store(int store) {
  MutexLock lock(mutex_);
  for (auto it = keys_.begin(); it != keys_.end();) {
    const bool leaves = it->second->key.store == store;
    if (leaves) leaving_.push_back(std::move(it->second));
    it = leaves ? keys_.erase(it) : std::next(it);
  }
  free_idle_locked();
  if (std::any_of(leaving_.begin(), leaving_.end(), [=](const auto& entry) { return entry->key.store == store; }))
    return false;
  optimizers_.erase(store);
  norms_.erase(store);
  return true;
}

void Registry::leave() {
  MutexLock lock(mutex_);
  for (auto& [wire_key, entry] : keys_) leaving_.push_back(std::move(entry));
  keys_.clear();
  free_idle_locked();
}

void Registry::set_optimizer(int store, const OptimizerSpec& spec) {
  auto optimizer = std::make_unique<const LiveOptimizer>(spec);
  MutexLock lock(mutex_);
  if (optimizer_of_store(store) != nullptr)
    host_.refuse_call("store " + std::to_string(store) + " has an optimizer already.");
  for (const auto& [wire_key, entry] : keys_)
    if (entry->key.store == store) require(entry->key, problem_with(entry->key.plan, optimizer->announced()));
  optimizers_[store] = std::move(optimizer);
}

const LiveOptimizer* Registry::optimizer_of_store(int store) const {
  const auto found = optimizers_.find(store);
  return found == optimizers_.end() ? nullptr : found->second.get();
}

const Optimizer* Registry::optimizer_of(const ServerKey& key) const {
  if (key.plan.update == Update::kWorkers) return nullptr;
  MutexLock lock(mutex_);
  const LiveOptimizer* optimizer = optimizer_of_store(key.store);
  if (optimizer != nullptr && !is_float(key.plan.dtype))
    host_.refuse_call("key '" + key.name + "' is of type " + name_of(key.plan.dtype) +
                      "; an optimizer updates floating point keys only.");
  return optimizer == nullptr ? nullptr : &optimizer->announced();
}

std::shared_ptr<const Optimizer> Registry::optimizer_of(const ServerKey& key, const SharedFields& fields) const {
  const LiveOptimizer* optimizer;
  {
    MutexLock lock(mutex_);
    optimizer = optimizer_of_store(key.store);
  }
  try {
    return optimizer->as_of(fields);
  } catch (const Error& error) {
    host_.refuse_call("key '" + key.name + "': " + error.what() + ".");
  }
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
