#include "worker/machine/sum.h"

#include <algorithm>
#include <utility>

namespace p3 {

Seats Seats::of_machine(int workers) {
  Seats made;
  for (int place = 0; place < workers; ++place) made.of.push_back({0, place});
  made.levels = {{workers, 0}};
  made.followers = workers - 1;
  return made;
}

MachineSum::MachineSum(const Machine& machine, const KeyPlan& its_plan, uint64_t next_round, FrameKind push_kind)
    : plan(its_plan),
      pool_(machine.pool),
      lent_(machine.lent),
      workers_(static_cast<int>(machine.ranks.size())),
      push_kind_(push_kind),
      shards_(slice_count(plan), {std::vector<uint64_t>(machine.ranks.size(), 0), next_round, {}, {}, {}, {}, false}) {
  const auto num_servers = static_cast<int>(machine.seats.size());
  for (uint32_t shard = 0; shard < slice_count(plan); ++shard)
    seats_.push_back(&machine.seats[static_cast<size_t>(server_of(plan, shard, num_servers))]);
}

int MachineSum::most_contributors(uint32_t shard, int level) const {
  int most = level > 0 ? 1 : 0;  // of a single worker's push none are told
  for (int below = 0; below < level; ++below) most *= seats_of(shard).levels[static_cast<size_t>(below)].places;
  return most;
}

void MachineSum::note_arrival(int place, const Header& push) {
  Shard& shard = shards_[push.slice];
  if (*std::max_element(shard.came.begin(), shard.came.end()) < push.round)
    shard.first_came = std::chrono::steady_clock::now();
  shard.came[static_cast<size_t>(place)] = push.round;
}

const char* MachineSum::problem_with(int place, const Header& push) const {
  if (push.key != plan.wire_key) return "of a plan that its key no longer has";
  if (push.kind != push_kind_) return "unexpected";
  if (push.slice >= shards_.size()) return "of no slice of its key";
  const int level = seat_of(place, push.slice).level;
  if (level < 0) return "misplaced";
  if ((push.of_machine != 0) != (level > 0))
    return level > 0 ? "of one worker, in place of its group's" : "marked as a whole machine's";
  if (push.contributors > most_contributors(push.slice, level)) return "of more workers than its group has";
  if (static_cast<DType>(push.dtype) != plan.dtype) return "of another element type than agreed";
  if (const char* problem = problem_with_payload(place, push)) return problem;
  const Shard& shard = shards_[push.slice];
  const bool in_turn =
      push.round == shard.round && shard.came[static_cast<size_t>(place)] < push.round && !shard.awaiting;
  return in_turn ? nullptr : "out of turn";
}

std::optional<Late> MachineSum::late(int place, std::chrono::steady_clock::time_point now) const {
  std::optional<Late> longest;
  for (uint32_t index = 0; index < shards_.size(); ++index) {
    if (seat_of(place, index).level < 0) continue;
    const Shard& shard = shards_[index];
    const uint64_t last = *std::max_element(shard.came.begin(), shard.came.end());
    const double waited_s = seconds_since(shard.first_came, now);
    if (shard.came[static_cast<size_t>(place)] >= last || (longest && longest->waited_s >= waited_s)) continue;
    longest.emplace();
    longest->round = last;
    longest->waited_s = waited_s;
    longest->waiting = static_cast<int>(std::count(shard.came.begin(), shard.came.end(), last));
  }
  return longest;
}

int MachineSum::note(int place, const Frame& frame, bool takes_part) {
  const Header& push = frame.header;
  Shard& shard = shards_[push.slice];
  const int its = push.of_machine != 0 ? push.contributors : takes_part;
  const auto contributors = static_cast<uint16_t>(shard.push.contributors + its);
  if (place == 0) shard.push = push;
  shard.push.contributors = contributors;
  return takes_part ? shard.numbers.note(place, push.scalars, frame.fields) : -1;
}

Header MachineSum::take_header(uint32_t index) {
  Shard& shard = shards_[index];
  Header header = std::exchange(shard.push, {});
  const Encoding encoding = header.contributors == 0 ? Encoding::kAbsent : Encoding::kPlain;
  header.encoding = static_cast<uint8_t>(encoding);
  header.payload_bytes = 0;
  header.of_machine = 1;
  shard.fields.reset();
  if (shard.numbers.first >= 0) {  // else the leader's own
    header.scalars = shard.numbers.scalars;
    shard.fields = shard.numbers.fields;
  }
  shard.numbers = {};
  shard.awaiting = true;
  return header;
}

void MachineSum::answered(uint32_t index) {
  shards_[index].awaiting = false;
  ++shards_[index].round;
}

}  // namespace p3
