#include "p3/machines.h"

#include <map>
#include <numeric>

namespace p3 {
namespace {

std::vector<int> apart(int num_workers) {
  std::vector<int> machines(static_cast<size_t>(num_workers));
  std::iota(machines.begin(), machines.end(), 0);
  return machines;
}

}  // namespace

Machines::Machines(int num_workers) : Machines(apart(num_workers)) {}

Machines::Machines(const std::vector<int>& machine_of_worker) {
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
