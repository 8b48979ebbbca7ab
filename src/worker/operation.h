// Something asked for about one key, and not yet complete.
// Threads: plain values; those of a Key, the Worker's lock.
#pragma once

#include <chrono>
#include <cstdint>
#include <limits>
#include <memory>

#include "p3/worker.h"
#include "worker/transfer.h"

namespace p3 {

struct Operation {
  std::shared_ptr<Transfer> transfer;
  Worker::Done done;
  int32_t priority = 0;
  RoundScalars scalars{};
  std::shared_ptr<const KeyPlan> plan{};  // that it is about, where it is not the key's yet
  std::chrono::steady_clock::time_point asked_at = std::chrono::steady_clock::now();
  uint64_t ready_elements = kAll;  // of a gated round: how many have been said to be ready
  SharedFields fields{};           // of a push: what it goes by, besides the scalars

  static constexpr uint64_t kAll = std::numeric_limits<uint64_t>::max();
  bool is_gated() const { return ready_elements != kAll; }
};

}  // namespace p3
