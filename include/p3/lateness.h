// Which workers keep others waiting: those whose push of a round is missing while others' have arrived. A silent peer
// is dead, not late (transport.h); a late one sends heartbeats, but its script is doing something else.
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace p3 {

// One worker, with the key and round where others have waited for it longest.
struct Late {
  int worker = 0;
  bool of_machine = false;  // it leads its machine, and the one that is late may be any worker there
  std::string key;
  uint64_t round = 0;
  double waited_s = 0;  // since the first push of that round came
  int waiting = 0;      // workers whose push has arrived
};

// Collects what several keys report, and keeps for each worker the place where others have waited longest.
class LateWorkers {
 public:
  void note(Late late) {
    Late& longest = by_worker_[late.worker];
    if (late.waited_s >= longest.waited_s) longest = std::move(late);
  }
  std::vector<Late> take() {
    std::vector<Late> all;
    for (auto& [worker, late] : by_worker_) all.push_back(std::move(late));
    by_worker_.clear();
    return all;
  }

 private:
  std::map<int, Late> by_worker_;
};

// How late one worker's pushes come: for each round the longest delay after the first push of the same slice, then a
// mean over recent rounds in which the newest count most.
class Lateness {
 public:
  void note(uint64_t round, double late_s) {
    if (round > round_) {
      mean_s_ += (worst_s_ - mean_s_) / kRounds;
      round_ = round;
      worst_s_ = 0;
    }
    if (late_s > worst_s_) worst_s_ = late_s;
  }
  double mean_s() const { return mean_s_; }

 private:
  static constexpr double kRounds = 8;
  uint64_t round_ = 1;
  double worst_s_ = 0;
  double mean_s_ = 0;
};

inline double seconds_since(std::chrono::steady_clock::time_point then, std::chrono::steady_clock::time_point now) {
  return std::chrono::duration<double>(now - then).count();
}

}  // namespace p3
