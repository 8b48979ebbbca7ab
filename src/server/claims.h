// What the workers have said of a shard that this server has inherited, until all have: docs/replicated-servers.md.
// Threads: the receiver's.
// Memory:  one value, and at most one frame of each worker.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "base/buffer_pool.h"
#include "server/task.h"
#include "wire/urgency.h"

namespace p3 {

class Claims {
 public:
  explicit Claims(int workers) : claimed_(static_cast<size_t>(workers)), held_(claimed_.size()) { set_inits(best_, 0); }

  bool has(int worker) const { return claimed_[index_of(worker)].has_value(); }

  // Of its claim; null: nothing. `bytes`: of a value.
  const char* problem_with_claim(const Header& claim, int worker, size_t bytes) const {
    if (has(worker)) return "out of turn";
    const bool is_absent = static_cast<Encoding>(claim.encoding) == Encoding::kAbsent;
    if (claim.part > static_cast<uint8_t>(Claimed::kNothing)) return "unexpected";
    if (says_nothing(claim) != is_absent || says_nothing(claim) != (inits_of(claim) == 0)) return "unexpected";
    if (is_absent) return nullptr;
    if (static_cast<Encoding>(claim.encoding) != Encoding::kPlain) return "in another encoding than agreed";
    return claim.payload_bytes == bytes ? nullptr : "of another size than agreed";
  }
  // Of any other frame, whether it is this worker's turn. Its request for a first value says that it has none.
  bool in_turn(const Header& header, int worker) const {
    if (held_[index_of(worker)]) return false;
    if (!has(worker)) return header.kind == FrameKind::kInit && header.round == 0;
    const Header& claim = *claimed_[index_of(worker)];
    if (!is_push(header.kind)) return header.round == claim.round;
    return inits_of(claim) > 0 && header.round == claim.round + 1;
  }

  // `fields`: of the optimizer in that round.
  void note(int worker, const Header& claim, const SharedFields& fields, PooledBuffer value) {
    claimed_[index_of(worker)] = claim;
    if (says_nothing(claim)) return;
    if (inits_of(best_) > 0 && std::pair(claim.round, inits_of(claim)) <= std::pair(best_.round, inits_of(best_)))
      return;
    best_ = claim;
    fields_ = fields;
    value_ = std::move(value);
  }
  void note_nothing(int worker) {
    if (has(worker)) return;
    Header& nothing = claimed_[index_of(worker)].emplace();
    nothing.part = static_cast<uint8_t>(Claimed::kNothing);
    set_inits(nothing, 0);
  }
  void hold(Task task) {
    const size_t worker = index_of(task.worker);
    held_[worker] = std::move(task);
  }
  // Nobody waits for it any more; what it has claimed counts.
  std::optional<Task> take_held(int worker) { return std::exchange(held_[index_of(worker)], std::nullopt); }

  // The frame that is held of it; null: none.
  const Header* held(int worker) const {
    const auto& task = held_[index_of(worker)];
    return task ? &task->header : nullptr;
  }
  // It came later than others, and has counted first values from its own on: it has had as many as they.
  void count_first_values_as_best(int worker) {
    if (has(worker) && inits_of_worker(worker) > 0) set_inits(*claimed_[index_of(worker)], inits_of(best_));
  }

  // The latest that any worker has: no first value, if none has any.
  const Header& best() const { return best_; }
  const void* value() const { return value_.data(); }
  RoundSettings settings() const { return {best_.scalars, fields_}; }
  uint64_t round_of(int worker) const { return has(worker) ? claimed_[index_of(worker)]->round : best_.round; }
  uint32_t inits_of_worker(int worker) const { return inits_of(has(worker) ? *claimed_[index_of(worker)] : best_); }

 private:
  static size_t index_of(int worker) { return static_cast<size_t>(worker); }
  static bool says_nothing(const Header& claim) { return claim.part == static_cast<uint8_t>(Claimed::kNothing); }

  std::vector<std::optional<Header>> claimed_;  // by worker
  std::vector<std::optional<Task>> held_;
  Header best_{};
  SharedFields fields_{};
  PooledBuffer value_;
};

}  // namespace p3
