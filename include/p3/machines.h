// Which workers share a machine. Machines are numbered in the order of their lowest ranks, which is the order in which
// their sums are added; the worker of lowest rank is the machine's leader. The same of groups of workers: there each
// server has leaders of its own (KeyPlan::adds_up_in_groups).
// Threads: a plain value, immutable.
#pragma once

#include <cstddef>
#include <vector>

namespace p3 {

class Machines {
 public:
  // Every worker on a machine of its own.
  explicit Machines(int num_workers);
  // By rank, any number that is equal for workers of one machine.
  // `leader`: which of them leads, by place; of few workers, that place modulo their number.
  explicit Machines(const std::vector<int>& machine_of_worker, int leader = 0);

  int num_workers() const { return static_cast<int>(machine_of_.size()); }
  int count() const { return static_cast<int>(workers_.size()); }
  int of(int worker) const { return machine_of_[static_cast<size_t>(worker)]; }
  int place(int worker) const { return place_of_[static_cast<size_t>(worker)]; }  // among its machine's workers
  const std::vector<int>& workers(int machine) const { return workers_[static_cast<size_t>(machine)]; }  // by rank
  int leader(int machine) const { return workers(machine)[static_cast<size_t>(leader_) % workers(machine).size()]; }
  int leader_of(int worker) const { return leader(of(worker)); }
  bool is_alone(int worker) const { return workers(of(worker)).size() == 1; }

 private:
  int leader_ = 0;
  std::vector<int> machine_of_, place_of_;  // by worker
  std::vector<std::vector<int>> workers_;   // by machine
};

}  // namespace p3
