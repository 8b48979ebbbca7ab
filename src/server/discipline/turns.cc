#include "server/discipline/turns.h"

#include <algorithm>

namespace p3 {

Turns::Turns(const ServerKey& key)
    : key_(key),
      next_round_(static_cast<size_t>(key.machines->num_workers()), 0),
      inits_(next_round_.size(), 0),
      catches_up_(next_round_.size(), false) {
  if (key.plan.is_synchronous()) return;
  last_push_.resize(next_round_.size());
  if (key.plan.has_quorum())
    is_aside_ = is_known_gone_ = std::vector<bool>(next_round_.size());
  else
    clocks_.emplace(next_round_.size(), key.plan.staleness);
}

bool Turns::may_send(const Header& header, int worker) const {
  const Machines& machines = *key_.machines;
  if (!is_push(header.kind) || !key_.is_shared(worker)) return header.of_machine == 0;
  return header.of_machine != 0 && machines.leader_of(worker) == worker &&
         header.contributors <= machines.workers(machines.of(worker)).size();
}

bool Turns::in_turn(const Header& header, int worker, uint64_t published) const {
  const uint64_t next = next_round_[index_of(worker)];
  if (is_behind(worker)) return is_push(header.kind) && header.round == published;
  if (catches_up(worker)) return header.kind == FrameKind::kInit && header.round == 0;
  if (header.of_machine != 0)
    for (int other : key_.machines->workers(key_.machines->of(worker)))
      if (next_round_[index_of(other)] != next) return false;
  if (next == 0) {
    const bool is_value = header.kind == FrameKind::kInit ||
                          (header.kind == FrameKind::kStoreRows && (header.part == 0 || key_.is_successor));
    return is_value && (header.round == published || (key_.is_successor && published == 0));
  }
  return (counts_each() || next == published + 1) && header.round == (is_push(header.kind) ? next : next - 1);
}

double Turns::note_push(int worker, const Header& push, Clock::time_point now) {
  if (counts_each()) {
    ++next_round_[index_of(worker)];
    last_push_[index_of(worker)] = now;
    if (is_dismissed(worker) && !is_known_gone_.empty()) is_known_gone_[index_of(worker)] = true;
    if (clocks_) {
      clocks_->advance(worker, is_last_step(push));
    } else if (is_last_step(push)) {
      is_aside_[index_of(worker)] = true;
      if (std::count(is_aside_.begin(), is_aside_.end(), false) == 0)
        for (int each = 0; each < key_.machines->num_workers(); ++each) is_aside_[index_of(each)] = is_dismissed(each);
    }
    return 0;
  }
  if (pushes_in_ == 0) first_push_ = now;
  pushes_in_ = (pushes_in_ + 1) % key_.pushes_of_round();
  if (push.of_machine == 0)
    ++next_round_[index_of(worker)];
  else
    for (int each : key_.machines->workers(key_.machines->of(worker))) ++next_round_[index_of(each)];
  return seconds_since(first_push_, now);
}

uint32_t Turns::note_init(int worker, uint64_t published, bool has_value) {
  has_value_ |= has_value;
  uint64_t& next = next_round_[index_of(worker)];
  if (next == 0) next = published + 1;
  return ++inits_[index_of(worker)];
}

std::optional<Awaited> Turns::needs(int worker, uint64_t published) const {
  if (clocks_) {
    for (int other = 0; other < key_.machines->num_workers(); ++other)
      if (const auto round = clocks_->missing(other, worker)) return Awaited{Awaited::What::kPush, key_.name, *round};
  } else if (counts_each()) {
    if (!stands_aside(worker) && waiting_aside() > 0)
      return Awaited{Awaited::What::kPush, key_.name, next_round_[index_of(worker)]};
  } else if (last_begun() > std::max<uint64_t>(next_round_[index_of(worker)], 1)) {
    return Awaited{Awaited::What::kPush, key_.name, published + 1};
  }
  for (int other = 0; other < key_.machines->num_workers(); ++other)
    if ((worker == key_.first() || key_.leader_of(other) == worker) &&
        inits_[index_of(other)] > inits_[index_of(worker)])
      return Awaited{Awaited::What::kFirstValue, key_.name};
  return {};
}

std::optional<uint64_t> Turns::would_wait_for_push_of(int other, const Header& push) const {
  if (clocks_) return clocks_->missing(push.round, is_last_step(push), other);
  const bool waits = !counts_each() || (is_last_step(push) && !stands_aside(other));
  return waits ? std::optional(push.round) : std::nullopt;
}

void Turns::note_late(Clock::time_point now, LateWorkers& late) const {
  if (clocks_) return note_late_clocks(now, late);
  if (counts_each()) return note_late_for_meeting(now, late);
  if (pushes_in_ == 0) return;
  const double waited_s = seconds_since(first_push_, now);
  if (waited_s <= 0) return;
  const uint64_t next = last_begun();
  const auto waiting = static_cast<int>(std::count(next_round_.begin(), next_round_.end(), next));
  for (int worker = 0; worker < key_.machines->num_workers(); ++worker)
    if (next_round_[index_of(worker)] < next && key_.pushes(worker))
      late.note({worker, key_.is_shared(worker), key_.name, next - 1, waited_s, waiting});
}

void Turns::note_late_clocks(Clock::time_point now, LateWorkers& late) const {
  for (int worker = 0; worker < key_.machines->num_workers(); ++worker) {
    Late its{worker, false, key_.name, 0, 0, 0};
    for (int other = 0; other < key_.machines->num_workers(); ++other) {
      const auto round = clocks_->missing(other, worker);
      if (!round) continue;
      its.round = *round;
      its.waited_s = std::max(its.waited_s, seconds_since(last_push_[index_of(other)], now));
      ++its.waiting;
    }
    if (its.waiting > 0) late.note(its);
  }
}

int Turns::waiting_aside() const {
  int waiting = 0;
  for (int worker = 0; worker < key_.machines->num_workers(); ++worker) waiting += waits_aside(worker);
  return waiting;
}

void Turns::note_late_for_meeting(Clock::time_point now, LateWorkers& late) const {
  const int waiting = waiting_aside();
  if (waiting == 0) return;
  double waited_s = 0;
  for (int other = 0; other < key_.machines->num_workers(); ++other)
    if (waits_aside(other)) waited_s = std::max(waited_s, seconds_since(last_push_[index_of(other)], now));
  for (int worker = 0; worker < key_.machines->num_workers(); ++worker)
    if (!stands_aside(worker)) late.note({worker, false, key_.name, next_round_[index_of(worker)], waited_s, waiting});
}

uint32_t Turns::begin_behind(uint64_t round) {
  constexpr uint32_t kFirst = 1;
  std::fill(next_round_.begin(), next_round_.end(), round + 1);
  std::fill(inits_.begin(), inits_.end(), kFirst);
  has_value_ = true;
  return kFirst;
}

// --- a server that is lost -----------------------------------------------------------------------------------------

bool Turns::go_on_behind(int worker, uint64_t landed, uint32_t inits, uint64_t published, bool has_value) {
  behind_.resize(next_round_.size());
  has_value_ |= has_value;
  inits_[index_of(worker)] = inits;
  if (inits == 0) return published == 0;  // its first frame is still to come
  next_round_[index_of(worker)] = published + 1;
  behind_[index_of(worker)] = landed < published;
  return landed == published || landed + 1 == published;
}

// --- going on without a worker -------------------------------------------------------------------------------------

std::optional<std::string> Turns::problem_of_dismissing(int worker) const {
  if (worker != key_.first() || is_handed_over_) return {};
  const uint32_t given = inits_[index_of(worker)];
  for (int other = 0; other < key_.machines->num_workers(); ++other) {
    if (is_dismissed(other) || inits_[index_of(other)] == given) continue;
    if (inits_[index_of(other)] > given) return "others wait for its value of key '" + key_.name + "'";
    return "others have not asked yet for the value that it gave key '" + key_.name + "'";
  }
  return {};
}

void Turns::dismiss(int worker) {
  is_dismissed_.resize(next_round_.size());
  is_dismissed_[index_of(worker)] = true;
  uint64_t& next = next_round_[index_of(worker)];
  next = std::max<uint64_t>(next, 1);  // without its init
}

std::optional<uint64_t> Turns::to_complete(int worker, uint64_t published) const {
  if (!is_dismissed(worker)) return {};
  const uint64_t next = next_round_[index_of(worker)];
  if (!is_aside_.empty()) return is_known_gone_[index_of(worker)] ? std::nullopt : std::optional(next);
  const bool has_begun = next == published + 1 && pushes_in_ > 0;  // else there may be no such round
  return has_begun ? std::optional(next) : std::nullopt;
}

std::optional<std::string> Turns::problem_of_admitting(uint64_t published) const {
  for (int other = 0; other < key_.machines->num_workers(); ++other) {
    const bool has_pushed_more = next_round_[index_of(other)] > published + 1;
    if (pushes_in_ > 0 || has_pushed_more) return "a round of key '" + key_.name + "' is under way";
  }
  return {};
}

void Turns::admit(int worker, uint64_t published) {
  is_dismissed_[index_of(worker)] = false;
  next_round_[index_of(worker)] = has_begun() ? published + 1 : 0;
  inits_[index_of(worker)] =
      has_begun() ? inits_[index_of(key_.first())] : 0;  // it will ask for the value that is there
  catches_up_[index_of(worker)] = false;
  if (!behind_.empty()) behind_[index_of(worker)] = false;  // as its predecessor may have been
}

void Turns::enter(int worker) {
  if (next_round_[index_of(worker)] == 0) return;  // no first value has come, and nothing after it
  catches_up_[index_of(worker)] = true;
  inits_[index_of(worker)] = inits_[index_of(key_.first())];
}

}  // namespace p3
