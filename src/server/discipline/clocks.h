// The clocks of the workers at one shard that updates at once: how many rounds each has pushed, and so who may be
// answered while the fastest stays at most `staleness` rounds ahead of the slowest.
//
// Source: bounded staleness as in Ho et al., "More Effective Distributed ML via a Stale Synchronous Parallel Parameter
// Server", NIPS 2013, section 2.
// Threads: none of its own.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

namespace p3 {

class Clocks {
 public:
  Clocks(size_t workers, uint64_t staleness) : staleness_(staleness), clocks_(workers) {}

  // A push of this worker, for the round after its last one. `leaves`: it has taken its last step, so it holds up nobody
  // any more. True if it was the last one to leave, behind the same round as all: nobody goes on.
  bool advance(int worker, bool leaves) {
    Clock& clock = clocks_[static_cast<size_t>(worker)];
    ++clock.round;
    clock.has_left = leaves;
    const auto is_over = [&](const Clock& each) { return each.has_left && each.round == clock.round; };
    if (!std::all_of(clocks_.begin(), clocks_.end(), is_over)) return false;
    for (Clock& each : clocks_) each.has_left = false;
    return true;
  }

  uint64_t round(int worker) const { return clocks_[static_cast<size_t>(worker)].round; }

  // Whose rounds up to this one all workers have pushed; who has taken its last step pushes no more.
  uint64_t least() const {
    uint64_t least = 0;
    bool anybody_goes_on = false;
    for (const Clock& each : clocks_)
      if (!each.has_left) least = std::exchange(anybody_goes_on, true) ? std::min(least, each.round) : each.round;
    if (anybody_goes_on) return least;
    for (const Clock& each : clocks_) least = std::max(least, each.round);
    return least;
  }

  // The round of `other` that the answer to a push of `round` needs and that has not come; none: it has. Who leaves waits
  // as in synchronous training, until all others have come as far.
  std::optional<uint64_t> missing(uint64_t round, bool leaves, int other) const {
    const Clock& its = clocks_[static_cast<size_t>(other)];
    const uint64_t needed = leaves ? round : round - std::min(round, staleness_);
    if (its.round >= needed || (its.has_left && !leaves)) return {};
    return needed;
  }
  // The same for the last push of `worker`.
  std::optional<uint64_t> missing(int worker, int other) const {
    const Clock& its = clocks_[static_cast<size_t>(worker)];
    return worker == other ? std::nullopt : missing(its.round, its.has_left, other);
  }
  bool may_be_answered(int worker) const {
    for (int other = 0; other < static_cast<int>(clocks_.size()); ++other)
      if (missing(worker, other)) return false;
    return true;
  }

 private:
  struct Clock {
    uint64_t round = 0;
    bool has_left = false;
  };

  const uint64_t staleness_;
  std::vector<Clock> clocks_;
};

}  // namespace p3
