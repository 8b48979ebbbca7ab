// What the shards have in common of keys in which each worker counts rounds of its own, with staleness or a quorum: what
// depends on the number of updates is counted here.
#pragma once

#include <cmath>

#include "server/discipline/stale/update_count.h"
#include "server/shard.h"

namespace p3 {

// `Base`: DenseShard or RowsShard.
template <typename Base>
class StaleShard : public Base {
 public:
  StaleShard(const ServerKey& its_key, uint32_t its_index, int its_thread, ShardHost& host)
      : Base(its_key, its_index, its_thread, host) {
    this->updates_ = &counted_.count();
  }

 protected:
  // Whether what this worker pushes is older than the value: rank 0 has given the key another one, and the worker's
  // request for that is still to come.
  bool is_before_value(int worker) const {
    return this->inits(worker) < this->inits(0) + (is_replacing_value_ ? 1 : 0);
  }
  // The numbers of the next update, by a push.
  RoundScalars next_update(const Optimizer& optimizer, const RoundScalars& pushed) {
    RoundScalars scalars = counted_.next(optimizer, pushed);
    if (this->key.plan.averages()) scalars.rescale /= static_cast<double>(this->workers());
    return scalars;
  }

 private:
  static constexpr uint64_t kMaxUpdates = uint64_t{1} << 32;

  // `updates` says how many are in the state that comes; or, of rows of the value, that they are an init's.
  const char* note_store(const Header& store) override {
    const double updates = store.scalars.updates;
    if (updates == 0) return nullptr;
    if (!(updates > 0 && updates <= static_cast<double>(kMaxUpdates) && updates == std::floor(updates)))
      return "of a number of updates that is none";
    if (store.part == 0)
      is_replacing_value_ = this->inits(0) > 0;
    else
      counted_.begin_behind(*this->optimizer(), static_cast<uint64_t>(updates));
    return nullptr;
  }
  void value_is_replaced() override { is_replacing_value_ = false; }

  UpdateCount counted_;
  bool is_replacing_value_ = false;  // another value of rank 0's is coming in, row by row
};

}  // namespace p3
