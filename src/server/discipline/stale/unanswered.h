// Whose pushes at one shard with staleness are in and not answered yet, and who may be answered by now (clocks.h).
// Threads: none of its own.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "p3/optimizer.h"
#include "p3/wire.h"
#include "server/discipline/clocks.h"

namespace p3 {

class Unanswered {
 public:
  Unanswered(size_t workers, uint64_t staleness) : clocks_(workers, staleness), waiting_(workers) {}

  // What is wrong with a push of this worker, whatever it brings, or null.
  const char* problem_with_push(int worker) const {
    return waiting_[static_cast<size_t>(worker)].waits ? "before its last push was answered" : nullptr;
  }
  // And with a gradient; a worker that skips the round needs no optimizer. `optimizer`: of the key, null if none.
  static const char* problem_with_gradient(const Optimizer* optimizer) {
    return optimizer == nullptr ? "for servers that update at once, but have no optimizer" : nullptr;
  }

  // The last frame of a worker's push has updated the value. True: nobody goes on, see Clocks.
  bool add(int worker, const Header& push) {
    waiting_[static_cast<size_t>(worker)] = {true, push.priority};
    return clocks_.advance(worker, is_last_step(push));
  }

  // Whose last push may be answered by now, and is from here on.
  std::vector<int> take_answerable() {
    std::vector<int> workers;
    for (int worker = 0; worker < static_cast<int>(waiting_.size()); ++worker)
      if (waiting_[static_cast<size_t>(worker)].waits && clocks_.may_be_answered(worker)) workers.push_back(worker);
    for (int worker : workers) waiting_[static_cast<size_t>(worker)].waits = false;
    return workers;
  }

  // Of a worker's last push; 0: none.
  uint64_t round(int worker) const { return clocks_.round(worker); }
  // As Clocks says.
  uint64_t least_clock() const { return clocks_.least(); }
  int32_t priority(int worker) const { return waiting_[static_cast<size_t>(worker)].priority; }

 private:
  struct Waiting {
    bool waits = false;
    int32_t priority = 0;
  };

  Clocks clocks_;
  std::vector<Waiting> waiting_;  // by worker
};

}  // namespace p3
