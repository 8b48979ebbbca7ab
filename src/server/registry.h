// The keys and stores of one server, and the shards that it owns of them.
// Threads: any. A shard stays where it is until its key is dropped; who works on one makes sure that it is not dropped.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "p3/live_optimizer.h"
#include "p3/machines.h"
#include "p3/slicing.h"
#include "p3/thread_annotations.h"
#include "server/key.h"
#include "server/shard.h"

namespace p3 {

class Registry {
 public:
  // Server `rank` of `num_servers`. Shards are shared out to `threads` threads. `aggregates`: leaders push for their
  // machines. `groups`: or for these; null: there are none. All references outlive it.
  Registry(int rank, int num_servers, int threads, const Machines& machines, bool aggregates, const Machines* groups,
           ShardHost& host)
      : rank_(rank),
        num_servers_(num_servers),
        threads_(threads),
        machines_(machines),
        aggregates_(aggregates),
        groups_(groups),
        host_(host) {}

  int rank() const { return rank_; }

  // As Server's methods of the same name.
  void define(const KeyPlan& plan, std::string name, int store);
  // All keys of a server that this one inherits from, as the other registry has them; each shard is open. Throws
  // Error(kUsage) if servers keep more of one than sums.
  void inherit(const Registry& other);
  // What is of its keys, the workers will claim; each shard is open until then. Before any frame is for one. Throws as
  // inherit().
  void open();
  void define_successor(const KeyPlan& plan, uint32_t predecessor);
  void recut(const KeyPlan& plan, uint32_t predecessor, uint64_t round);
  // These, recut(), leave() and free_idle(), in the receiver thread, so that no frame is between find() and Shard::uses.
  void drop(uint32_t wire_key);
  bool drop_store(int store);
  // Drops all keys: another server has them from here on. It may go once it has left.
  void leave();
  bool has_left() const {
    MutexLock lock(mutex_);
    return keys_.empty() && leaving_.empty();
  }
  // Frees keys that were dropped and that nobody works on, or borrows from, any more.
  void free_idle();
  void set_optimizer(int store, const OptimizerSpec& spec);

  const Optimizer* optimizer_of(const ServerKey& key) const;
  std::shared_ptr<const Optimizer> optimizer_of(const ServerKey& key, const SharedFields& fields) const;
  bool can_move(const ServerKey& key, uint32_t plan) const;
  std::vector<uint32_t> wire_keys() const;
  size_t count() const {
    MutexLock lock(mutex_);
    return keys_.size();
  }
  // The shard that a frame is about; null: of no key, or another server's.
  Shard* find(const Header& header) const;
  // Throws Error(kUsage) if there is no such key.
  std::vector<Shard*> shards_of(uint32_t wire_key) const;
  // Asks each shard, under the lock, until one answers anything.
  template <typename Ask>
  auto first_answer(Ask ask) const -> decltype(ask(std::declval<Shard&>())) {
    MutexLock lock(mutex_);
    for (const auto& [wire_key, key] : keys_)
      for (const auto& shard : key->shards)
        if (shard != nullptr)
          if (auto answer = ask(*shard)) return answer;
    return {};
  }
  // Calls visit(shard) for each, under the lock.
  template <typename Visit>
  void each_shard(Visit visit) const {
    first_answer([&](Shard& shard) {
      visit(shard);
      return false;
    });
  }

 private:
  struct Entry {
    ServerKey key;
    std::vector<std::unique_ptr<Shard>> shards;  // null where another server owns it
  };

  void add(std::unique_ptr<Entry> entry);
  void free_idle_locked() P3_REQUIRES(mutex_);
  // Its store's, if the key has a part in it. A key of norms comes before the keys that it tells of.
  StoreNorm* norm_of(const ServerKey& key) P3_REQUIRES(mutex_);
  // Null: the servers only reduce.
  const LiveOptimizer* optimizer_of_store(int store) const P3_REQUIRES(mutex_);
  void require(const ServerKey& key, const std::string& problem) const;

  const int rank_, num_servers_, threads_;
  const Machines& machines_;
  const bool aggregates_;
  const Machines* const groups_;
  ShardHost& host_;
  size_t next_thread_ = 0;

  mutable Mutex mutex_;
  // The elements of these stay where they are.
  std::unordered_map<uint32_t, std::unique_ptr<Entry>> keys_ P3_GUARDED_BY(mutex_);
  std::vector<std::unique_ptr<Entry>> leaving_ P3_GUARDED_BY(mutex_);  // that were dropped, and are not idle
  std::map<int, std::unique_ptr<const LiveOptimizer>> optimizers_ P3_GUARDED_BY(mutex_);  // by store
  std::map<int, StoreNorm> norms_ P3_GUARDED_BY(mutex_);  // by store, of those that have one
};

}  // namespace p3
