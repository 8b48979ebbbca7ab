#include "worker/ways/gathered/machine_parts.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "plan/frames.h"

namespace p3 {

MachineParts::MachineParts(const Machine& machine, const KeyPlan& its_plan, uint64_t next_round,
                           FactoredUpdate& factored)
    : MachineSum(machine, its_plan, next_round, kSliceFrames.push), factored_(factored), shards_(slice_count(plan)) {
  for (uint32_t i = 0; i < shards_.size(); ++i) {
    const auto owner = std::find(machine.ranks.begin(), machine.ranks.end(), worker_of(plan, i));
    shards_[i].owner = owner == machine.ranks.end() ? -1 : static_cast<int>(owner - machine.ranks.begin());
    shards_[i].missing = workers();
  }
}

const char* MachineParts::problem_with_payload(int place, const Header& push) const {
  const auto encoding = static_cast<Encoding>(push.encoding);
  if (encoding != Encoding::kPlain && encoding != Encoding::kAbsent) return "in another encoding than agreed";
  if (push.part > 1) return "malformed";
  if (encoding == Encoding::kPlain && place != shards_[push.slice].owner) return "another worker's to send";
  const size_t expected = encoding == Encoding::kAbsent ? 0 : slice_at(plan, push.slice).elements * sizeof(float);
  return push.payload_bytes == expected ? nullptr : "of another size than agreed";
}

// The leader has begun the round once all are in, so nothing is computed any more from where the part goes to.
MachineSum::Outcome MachineParts::add(int place, const Frame& frame, PooledBuffer payload) {
  const Header& push = frame.header;
  Shard& shard = shards_[push.slice];
  Outcome outcome;
  outcome.contradicts = note(place, frame, static_cast<bool>(payload) || goes_on(push));
  if (payload) shard.part = std::move(payload);
  if (outcome.contradicts >= 0 || --shard.missing > 0) return outcome;
  shard.missing = workers();
  shard.is_here = static_cast<bool>(shard.part);
  Header header = take_header(push.slice);
  header.part = header.contributors > 0 && !shard.is_here;
  header.contributors = shard.is_here;
  header.encoding = static_cast<uint8_t>(shard.is_here ? Encoding::kPlain : Encoding::kAbsent);
  if (!shard.is_here) {
    outcome.push.push_back({header});
    return outcome;
  }
  const size_t bytes = shard.part.bytes();
  std::memcpy(factored_.gathered() + slice_at(plan, push.slice).offset, shard.part.data(), bytes);
  outcome.push.push_back(lent_.lend(header, std::move(shard.part), bytes, 1));
  return outcome;
}

MachineSum::Passed MachineParts::pass_on(const Header& header, const void* part, Lender& landing) {
  answered(header.slice);
  Shard& shard = shards_[header.slice];
  Frame absent;
  absent.header = header;
  absent.header.of_machine = 0;
  absent.header.encoding = static_cast<uint8_t>(Encoding::kAbsent);
  absent.header.payload_bytes = 0;
  Frame whole = absent;
  if (std::exchange(shard.is_here, false)) {
    const Slice slice = slice_at(plan, header.slice);
    whole.header.encoding = static_cast<uint8_t>(Encoding::kPlain);
    whole.header.payload_bytes = static_cast<uint32_t>(slice.elements * sizeof(float));
    whole.payload = factored_.gathered() + slice.offset;
  } else if (shard.owner < 0) {
    whole.header.encoding = header.encoding;
    whole.header.payload_bytes = header.payload_bytes;
    whole.payload = part;
  }
  Passed passed;
  passed.own = shard.owner == 0 ? absent : whole;
  absent.context = whole.context = &landing;
  for (int place = 1; place < workers(); ++place)
    passed.frames.push_back({place, place == shard.owner ? absent : whole});
  return passed;
}

}  // namespace p3
