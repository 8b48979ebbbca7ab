#include "server/shard.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "p3/lateness.h"

namespace p3 {

double ServerShard::note_push(int worker, bool of_machine, std::chrono::steady_clock::time_point now) {
  if (pushes_in_ == 0) first_push_ = now;
  pushes_in_ = (pushes_in_ + 1) % key.pushes();
  if (!of_machine)
    ++next_round[static_cast<size_t>(worker)];
  else
    for (int each : key.machines->workers(key.machines->of(worker))) ++next_round[static_cast<size_t>(each)];
  return seconds_since(first_push_, now);
}

double ServerShard::waited_s(std::chrono::steady_clock::time_point now) const {
  return pushes_in_ == 0 ? 0 : seconds_since(first_push_, now);
}

bool ServerShard::waits_for_init(int worker) const {
  return std::any_of(waiting_for_init_.begin(), waiting_for_init_.end(),
                     [worker](const auto& waiting) { return waiting.first == worker; });
}

void ServerShard::note_init(int worker, uint32_t n, bool waits) {
  inits_here_[static_cast<size_t>(worker)] = n;
  if (waits) waiting_for_init_.push_back({worker, n});
}

void ServerShard::lose(int worker, uint32_t incarnation, uint64_t pushed) {
  presence.lose(worker, incarnation, pushed);
  waiting_for_init_.erase(std::remove_if(waiting_for_init_.begin(), waiting_for_init_.end(),
                                         [worker](const auto& waiting) { return waiting.first == worker; }),
                          waiting_for_init_.end());
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

bool ServerShard::is_its_to_send(const Header& header, int worker) const {
  const Machines& machines = *key.machines;
  if (!is_push(header.kind) || !key.aggregated || machines.is_alone(worker)) return header.of_machine == 0;
  return header.of_machine != 0 && machines.leader_of(worker) == worker &&
         header.contributors <= machines.workers(machines.of(worker)).size();
}

bool ServerShard::in_turn(const Header& header, int worker) const {
  const uint64_t next = next_round[static_cast<size_t>(worker)];
  if (catches_up[static_cast<size_t>(worker)]) return header.kind == FrameKind::kInit && header.round == 0;
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

CapturedArray ServerShard::captured_array(uint8_t part, DType dtype, uint64_t elements) const {
  return {key.plan.wire_key, index, part, dtype, elements, new_bytes(elements * size_of(dtype)), 0};
}

void ServerShard::capture_state(const std::vector<void*>& state, const void* master, uint64_t elements,
                                std::vector<CapturedArray>& captured) const {
  const auto copy = [&](uint8_t part, const void* content) {
    CapturedArray array = captured_array(part, sum_type(key.plan.dtype), elements);
    std::memcpy(array.data.get(), content, array.bytes());
    captured.push_back(std::move(array));
  };
  for (size_t i = 0; i < state.size(); ++i) copy(static_cast<uint8_t>(i + 1), state[i]);
  if (master != nullptr) copy(kMaster, master);
}

}  // namespace p3
