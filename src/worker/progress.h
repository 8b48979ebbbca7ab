// How far all workers are with a key that each pushes at its own pace, as the servers' answers tell this one.
// Threads: note() on the receiver thread; all else with the Worker's lock held.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "p3/wire.h"
#include "p3/worker.h"

namespace p3 {

class Progress {
 public:
  void note(const Header& answer) {
    const double updates = answer.scalars.updates;
    if (updates >= 0 && updates < 0x1p53) heard_updates_ = updates;
    heard_clock_ = std::min(heard_clock_, least_clock(answer));
  }
  // All answers of an operation have landed; of that round, if it is one.
  void complete(bool is_round, uint64_t round) {
    updates_ = heard_updates_;
    if (is_round) landed_ = {round, std::min(round, heard_clock_)};
    heard_clock_ = kNone;
  }

  double updates() const { return updates_; }  // as the shard that answered last counts them
  const LandedRound& landed() const { return landed_; }

 private:
  static constexpr uint64_t kNone = std::numeric_limits<uint64_t>::max();

  double heard_updates_ = 0, updates_ = 0;
  uint64_t heard_clock_ = kNone;
  LandedRound landed_;
};

}  // namespace p3
