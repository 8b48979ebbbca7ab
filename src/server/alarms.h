// When shards want to go on although nothing comes for them. The receiver ends its wait for frames by then.
// Threads: any.
#pragma once

#include <chrono>
#include <map>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "p3/thread_annotations.h"

namespace p3 {

class Shard;

class Alarms {
 public:
  using Time = std::chrono::steady_clock::time_point;

  // Of this shard from here on; none: it wants nothing, as before it goes. True: it is the first of all now.
  bool set(Shard& shard, std::optional<Time> when) {
    MutexLock lock(mutex_);
    if (const auto found = of_shard_.find(&shard); found != of_shard_.end()) {
      if (when == found->second) return false;
      in_order_.erase({found->second, &shard});
      of_shard_.erase(found);
    }
    if (!when) return false;
    of_shard_[&shard] = *when;
    in_order_.insert({*when, &shard});
    return in_order_.begin()->second == &shard;
  }

  std::optional<Time> first() const {
    MutexLock lock(mutex_);
    return in_order_.empty() ? std::nullopt : std::optional(in_order_.begin()->first);
  }

  // Those whose time has come; from here on they want nothing.
  std::vector<Shard*> take(Time now) {
    MutexLock lock(mutex_);
    std::vector<Shard*> due;
    while (!in_order_.empty() && in_order_.begin()->first <= now) {
      due.push_back(in_order_.begin()->second);
      of_shard_.erase(due.back());
      in_order_.erase(in_order_.begin());
    }
    return due;
  }

 private:
  mutable Mutex mutex_;
  std::map<Shard*, Time> of_shard_ P3_GUARDED_BY(mutex_);
  std::set<std::pair<Time, Shard*>> in_order_ P3_GUARDED_BY(mutex_);
};

}  // namespace p3
