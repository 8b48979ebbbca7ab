#include "worker/machine/sum.h"

#include <algorithm>
#include <utility>

namespace p3 {

MachineSum::MachineSum(const Machine& machine, const KeyPlan& its_plan, uint64_t next_round, FrameKind push_kind)
    : plan(its_plan),
      pool_(machine.pool),
      lent_(machine.lent),
      workers_(static_cast<int>(machine.ranks.size())),
      push_kind_(push_kind),
      shards_(slice_count(plan), {std::vector<uint64_t>(machine.ranks.size(), 0), next_round, {}, {}, {}, {}, false}) {}

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
  if (push.of_machine != 0) return "marked as a whole machine's";
  if (static_cast<DType>(push.dtype) != plan.dtype) return "of another element type than agreed";
  if (const char* problem = problem_with_payload(place, push)) return problem;
  const Shard& shard = shards_[push.slice];
  const bool in_turn =
      push.round == shard.round && shard.came[static_cast<size_t>(place)] < push.round && !shard.awaiting;
  return in_turn ? nullptr : "out of turn";
}

std::optional<Late> MachineSum::late(int place, std::chrono::steady_clock::time_point now) const {
  std::optional<Late> longest;
  for (const Shard& shard : shards_) {
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
  const auto contributors = static_cast<uint16_t>(shard.push.contributors + takes_part);
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
