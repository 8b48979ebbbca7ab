// Which workers a shard sends its values to, while one may be lost and another process may take its rank again.
//
// A worker that is lost is away until another process has come in its place, and has asked for the value if there is one.
// What was received of the lost one counts if it is a whole push; no answer to it is sent.
// Memory:  none before the first loss: a server has very many shards.
// Threads: none of its own; where the shard is summed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace p3 {

class Presence {
 public:
  explicit Presence(size_t workers) : count_(workers) {}

  // All processes of this rank up to number `incarnation` are gone; the last one's pushes are whole up to this round.
  void lose(int worker, uint32_t incarnation, uint64_t pushed) {
    workers_.resize(count_);
    workers_[static_cast<size_t>(worker)] = {false, incarnation, pushed};
  }
  bool is_of_the_lost(int worker, uint32_t incarnation) const { return incarnation <= of(worker).lost; }
  // A frame of a push that never became whole.
  bool is_torn(int worker, uint32_t incarnation, uint64_t round) const {
    return is_of_the_lost(worker, incarnation) && round > of(worker).pushed;
  }

  // Another process of this rank takes part from here on.
  void let_in(int worker) {
    if (!workers_.empty()) workers_[static_cast<size_t>(worker)].here = true;
  }
  bool is_here(int worker) const { return of(worker).here; }

 private:
  struct State {
    bool here = true;
    uint32_t lost = 0;  // number of the last process that is gone; the first one is number 1
    uint64_t pushed = 0;
  };

  State of(int worker) const { return workers_.empty() ? State() : workers_[static_cast<size_t>(worker)]; }

  size_t count_;
  std::vector<State> workers_;
};

}  // namespace p3
