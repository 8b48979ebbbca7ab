#include "worker/ways/dense/machine_slices.h"

#include <utility>

#include "plan/frames.h"
#include "worker/key.h"

namespace p3 {

MachineSlices::MachineSlices(const Machine& machine, const KeyPlan& its_plan, uint64_t next_round, DenseWay& way)
    : MachineSum(machine, its_plan, next_round, kSliceFrames.push),
      way_(way),
      leaving_(slice_count(plan)),
      goes_on_(slice_count(plan)) {
  for (uint32_t i = 0; i < slice_count(plan); ++i) {
    sums_.emplace_back();
    for (const Groups::Level& level : seats_of(i).levels)
      sums_.back().emplace_back(level.places, plan.dtype, slice_at(plan, i).elements, pool_);
  }
}

const char* MachineSlices::problem_with_payload(int, const Header& push) const {
  const auto encoding = static_cast<Encoding>(push.encoding);
  if (encoding != Encoding::kPlain && encoding != Encoding::kAbsent) return "in another encoding than agreed";
  const size_t expected = encoding == Encoding::kAbsent ? 0 : sums_[push.slice].front().bytes();
  return push.payload_bytes == expected ? nullptr : "of another size than agreed";
}

MachineSum::Outcome MachineSlices::add(int place, const Frame& frame, PooledBuffer payload) {
  const Header& push = frame.header;
  const Seats::Seat& seat = seat_of(place, push.slice);
  auto sum = sums_[push.slice].begin() + seat.level;
  Outcome outcome;
  outcome.contradicts = note(place, frame, static_cast<bool>(payload));
  sum->add(seat.position, std::move(payload));
  if (goes_on(push)) goes_on_[push.slice] = 1;
  if (outcome.contradicts >= 0) return outcome;
  for (; sum->complete() && sum + 1 != sums_[push.slice].end(); ++sum) {
    const Groups::Level& next = seats_of(push.slice).levels[static_cast<size_t>(sum - sums_[push.slice].begin()) + 1];
    (sum + 1)->add(next.own, sum->take_rounded());
  }
  if (!sum->complete()) return outcome;
  Header header = take_header(push.slice);
  header.part = std::exchange(goes_on_[push.slice], uint8_t{0});
  PooledBuffer total = sum->take_rounded();
  if (encodes())
    outcome.push.push_back(to_encode(header, std::move(total)));
  else if (!total)
    outcome.push.push_back({header});
  else
    outcome.push.push_back(lent_.lend(header, std::move(total), sum->bytes(), 1));
  return outcome;
}

// Lent by the key and not by `lent_`: this and the residual must stay where they are, and nobody else may use the residual,
// until it has left.
Frame MachineSlices::to_encode(const Header& header, PooledBuffer sum) {
  Frame frame;
  frame.header = header;
  frame.context = static_cast<Lender*>(&way_.key);
  if (!sum) return frame;
  const size_t bytes = encoded_bytes(plan.codec, plan.dtype, slice_at(plan, header.slice).elements);
  frame.header.encoding = static_cast<uint8_t>(plan.codec.encoding);
  frame.header.payload_bytes = static_cast<uint32_t>(bytes);
  frame.payload = sum.data();
  frame.encoder = this;
  frame.copied_bytes = static_cast<uint32_t>(sum.bytes());
  leaving_[header.slice] = std::move(sum);
  return frame;
}

void MachineSlices::encode(const Header& header, const void* sum, void* payload) {
  const Slice slice = slice_at(plan, header.slice);
  p3::encode(plan.codec, static_cast<const float*>(sum), way_.residual.of(slice), payload, slice.elements);
  leaving_[header.slice].give_back();
}

MachineSum::Passed MachineSlices::pass_on(const Header& header, const void* value, Lender& landing) {
  answered(header.slice);
  Frame frame;
  frame.header = header;
  frame.header.of_machine = 0;
  frame.payload = value;
  Passed passed;
  passed.own = frame;
  frame.context = &landing;
  for (int place = 1; place < workers(); ++place) {
    const int level = seat_of(place, header.slice).level;
    if (level < 0) continue;
    frame.header.of_machine = level > 0;
    passed.frames.push_back({place, frame});
  }
  return passed;
}

}  // namespace p3
