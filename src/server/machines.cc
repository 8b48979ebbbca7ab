#include "p3/machines.h"

#include <map>
#include <numeric>

namespace p3 {

Machines::Machines(int num_workers) : machine_of_(static_cast<size_t>(num_workers)), place_of_(machine_of_.size(), 0) {
  std::iota(machine_of_.begin(), machine_of_.end(), 0);
  for (int worker : machine_of_) workers_.push_back({worker});
}

Machines::Machines(const std::vector<int>& machine_of_worker, int leader) : leader_(leader) {
  std::map<int, int> numbers;
  for (int given : machine_of_worker) {
    const int machine = numbers.emplace(given, static_cast<int>(numbers.size())).first->second;
    if (machine == count()) workers_.emplace_back();
    auto& here = workers_[static_cast<size_t>(machine)];
    place_of_.push_back(static_cast<int>(here.size()));
    here.push_back(static_cast<int>(machine_of_.size()));
    machine_of_.push_back(machine);
  }
}

}  // namespace p3
