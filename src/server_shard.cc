#include "server_shard.h"

#include <algorithm>
#include <cstring>

namespace p3 {

void ServerShard::note_push(int worker, bool of_machine) {
  if (!of_machine) {
    ++next_round[static_cast<size_t>(worker)];
    return;
  }
  for (int each : key.machines->workers(key.machines->of(worker))) ++next_round[static_cast<size_t>(each)];
}

void ServerShard::note_init(int worker, uint32_t n) {
  inits_here_[static_cast<size_t>(worker)] = n;
  waiting_for_init_.push_back({worker, n});
}

std::vector<int> ServerShard::take_answerable() {
  const auto must_wait = [this](const auto& waiting) {
    return waiting.second > std::min(inits_here_[0], inits_here_[static_cast<size_t>(key.leader_of(waiting.first))]);
  };
  const auto ready = std::stable_partition(waiting_for_init_.begin(), waiting_for_init_.end(), must_wait);
  std::vector<int> answered;
  for (auto it = ready; it != waiting_for_init_.end(); ++it) answered.push_back(it->first);
  waiting_for_init_.erase(ready, waiting_for_init_.end());
  return answered;
}

int ServerShard::note_scalars(int worker, const RoundScalars& scalars) {
  if (first_worker_ < 0) {
    first_worker_ = worker;
    scalars_ = scalars;
  }
  return std::memcmp(&scalars, &scalars_, sizeof scalars) == 0 ? -1 : first_worker_;
}

bool ServerShard::is_its_to_send(const Header& header, int worker) const {
  const Machines& machines = *key.machines;
  if (!is_push(header.kind) || !key.aggregated || machines.is_alone(worker)) return header.of_machine == 0;
  return header.of_machine != 0 && machines.leader_of(worker) == worker &&
         header.contributors <= machines.workers(machines.of(worker)).size();
}

bool ServerShard::in_turn(const Header& header, int worker) const {
  const uint64_t next = next_round[static_cast<size_t>(worker)];
  if (header.of_machine != 0)
    for (int other : key.machines->workers(key.machines->of(worker)))
      if (next_round[static_cast<size_t>(other)] != next) return false;
  if (next == 0) {
    const bool is_value = header.kind == FrameKind::kInit ||
                          (header.kind == FrameKind::kStoreRows && (header.part == 0 || key.is_successor));
    return is_value && (header.round == published || (key.is_successor && published == 0));
  }
  return next == published + 1 && header.round == (is_push(header.kind) ? next : next - 1);
}

bool ServerShard::has_state(uint8_t part, const Optimizer* optimizer) const {
  if (optimizer == nullptr) return false;
  if (part == kMaster) return optimizer->needs_master(key.plan.dtype);
  return part >= 1 && part <= optimizer->state_count();
}

}  // namespace p3
