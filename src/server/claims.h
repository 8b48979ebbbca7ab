// What the workers have said of a shard that this server has inherited, until all have, and the value that all go on from
// has come: docs/replicated-servers.md.
// Threads: the receiver's.
// Memory:  one value, and at most one frame of each worker.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "base/buffer_pool.h"
#include "server/task.h"
#include "wire/urgency.h"

namespace p3 {

class Claims {
 public:
  explicit Claims(int workers) : claimed_(static_cast<size_t>(workers)), held_(claimed_.size()) {}

  bool has(int worker) const { return claimed_[index_of(worker)].has_value(); }

  // Of its claim, or of the value that it gives to that; null: nothing. `bytes`: of a value.
  const char* problem_with_claim(const Header& claim, int worker, size_t bytes) const {
    const bool is_absent = static_cast<Encoding>(claim.encoding) == Encoding::kAbsent;
    if (has(worker) && (is_absent || !is_owed(claim, worker))) return "out of turn";
    if (claim.part > static_cast<uint8_t>(Claimed::kRoundAlone)) return "unexpected";
    if (says_nothing(claim) != (inits_of(claim) == 0) || (says_nothing(claim) && !is_absent)) return "unexpected";
    if (is_absent) return nullptr;
    if (!has_its_value(claim)) return "unexpected";
    if (static_cast<Encoding>(claim.encoding) != Encoding::kPlain) return "in another encoding than agreed";
    return claim.payload_bytes == bytes ? nullptr : "of another size than agreed";
  }
  // Of any other frame, whether it is this worker's turn. Its request for a first value says that it has none.
  bool in_turn(const Header& header, int worker) const {
    if (held_[index_of(worker)]) return false;
    if (!has(worker)) return header.kind == FrameKind::kInit && header.round == 0;
    const Header& claim = claimed_[index_of(worker)]->header;
    if (!is_push(header.kind)) return header.round == claim.round;
    return inits_of(claim) > 0 && header.round == claim.round + 1;
  }

  // `fields`: of the optimizer in that round. Without a value it is still to be given, if the claim says that there is one.
  void note(int worker, const Header& claim, const SharedFields& fields, PooledBuffer value) {
    auto& its = claimed_[index_of(worker)];
    if (!its) its = {claim, fields};
    if (static_cast<Encoding>(claim.encoding) == Encoding::kAbsent) return;
    its->is_given = true;
    if (!is_later(*its, given_)) return;
    given_ = *its;
    value_ = std::move(value);
  }
  void note_nothing(int worker) {
    if (!has(worker)) claimed_[index_of(worker)] = Claim{};
  }

  // All have claimed. True once the latest claim, of those that were given and of those whose worker can_give(), has come
  // with its value: best(), value(). Or lacks_value(), as those alone are left who have claimed that round without. Else
  // asks(worker) one that has it, chosen by `turn`; another one only if that one can no longer give it.
  template <typename CanGive, typename Asks>
  bool settle(CanGive can_give, size_t turn, Asks asks) {
    best_ = given_;
    std::vector<int> holders;
    for (int worker = 0; worker < static_cast<int>(claimed_.size()); ++worker) {
      const auto& its = claimed_[index_of(worker)];
      if (!its || !can_give(worker) || is_later(best_, *its) || !is_later(*its, given_)) continue;
      if (is_later(*its, best_)) holders.clear();
      best_ = *its;
      if (has_its_value(its->header)) holders.push_back(worker);
    }
    if (holders.empty()) return true;
    if (std::find(holders.begin(), holders.end(), asked_) == holders.end())
      asks(asked_ = holders[turn % holders.size()]);
    return false;
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
    if (has(worker) && inits_of_worker(worker) > 0) set_inits(claimed_[index_of(worker)]->header, inits_of(best()));
  }

  // No first value, if none has any. Behind settle().
  const Header& best() const { return best_.header; }
  const void* value() const { return value_.data(); }
  bool lacks_value() const { return !has_its_value(best()); }
  RoundSettings settings() const { return {best().scalars, best_.fields}; }
  uint64_t round_of(int worker) const { return has(worker) ? claimed_[index_of(worker)]->header.round : best().round; }
  uint32_t inits_of_worker(int worker) const {
    return inits_of(has(worker) ? claimed_[index_of(worker)]->header : best());
  }

 private:
  struct Claim {
    Header header = nothing_claimed();
    SharedFields fields{};
    bool is_given = false;  // with its value
  };

  static size_t index_of(int worker) { return static_cast<size_t>(worker); }
  static bool says_nothing(const Header& claim) { return claim.part == static_cast<uint8_t>(Claimed::kNothing); }
  static bool has_its_value(const Header& claim) { return claim.part != static_cast<uint8_t>(Claimed::kRoundAlone); }
  static bool is_later(const Claim& one, const Claim& other) {
    const auto place = [](const Header& its) { return std::tuple(inits_of(its) > 0, its.round, inits_of(its)); };
    return place(one.header) > place(other.header);
  }
  bool is_owed(const Header& claim, int worker) const {
    const Claim& its = *claimed_[index_of(worker)];
    return !its.is_given && !says_nothing(its.header) && claim.part == its.header.part &&
           claim.round == its.header.round && claim.priority == its.header.priority;
  }

  std::vector<std::optional<Claim>> claimed_;  // by worker
  std::vector<std::optional<Task>> held_;
  int asked_ = -1;
  Claim best_{}, given_{};  // the latest that all can go on from, and the latest with its value
  PooledBuffer value_;
};

}  // namespace p3
