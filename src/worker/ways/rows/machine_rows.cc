#include "worker/ways/rows/machine_rows.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "plan/frames.h"

namespace p3 {

MachineRows::MachineRows(const Machine& machine, const KeyPlan& its_plan, uint64_t next_round)
    : MachineSum(machine, its_plan, next_round, kRowsFrames.push) {
  for (uint32_t i = 0; i < slice_count(plan); ++i)
    partitions_.emplace_back(workers(), plan, partition_at(plan, i), pool_);
}

const char* MachineRows::problem_with_payload(int, const Header& push) const {
  const auto encoding = static_cast<Encoding>(push.encoding);
  if (push.part > 1) return "malformed";
  if (encoding == Encoding::kAbsent) return nullptr;
  if (encoding != Encoding::kPlain) return "in another encoding than agreed";
  const bool fits =
      push.payload_bytes >= sizeof(RowsHeader) && push.payload_bytes <= max_rows_payload(plan, size_of(plan.dtype));
  return fits ? nullptr : "of another size than agreed";
}

MachineSum::Outcome MachineRows::add(int place, const Frame& frame, PooledBuffer payload) {
  const Header& push = frame.header;
  Partition& partition = partitions_[push.slice];
  RankRowSum& sum = partition.sum;
  const bool has_gradient = static_cast<bool>(payload);
  Outcome outcome;
  if (has_gradient) {
    RankRowSum::Frame rows;
    outcome.problem = sum.read(place, std::move(payload), push.payload_bytes, rows);
    if (place == 0) {
      partition.as_blocks = rows.rows.header.coding == IdCoding::kBitmap;
      partition.next_plan = rows.rows.header.next_plan;
    } else if (outcome.problem == nullptr && rows.rows.header.next_plan != 0) {
      outcome.problem = "naming another plan, which only worker 0 may do";
    }
    if (outcome.problem != nullptr) return outcome;
    sum.add(place, std::move(rows));
    if (!sum.has_all_of(place)) return outcome;
  } else {
    sum.add_nothing(place);
  }
  partition.wants[static_cast<size_t>(place)] = push.part == 1;
  partition.pushed_rows += sum.rows_of(place);
  outcome.contradicts = note(place, frame, has_gradient);
  if (outcome.contradicts < 0 && sum.complete()) outcome.push = take(push.slice);
  return outcome;
}

std::vector<Frame> MachineRows::take(uint32_t index) {
  Partition& partition = partitions_[index];
  Header header = take_header(index);
  header.part = std::find(partition.wants.begin(), partition.wants.end(), true) != partition.wants.end();
  std::vector<Frame> frames;
  if (header.contributors == 0) {
    frames.push_back({header});
  } else {
    const RowSum& sum = partition.sum.sum();
    const std::vector<int64_t> ids = sum.ids();
    const size_t row_bytes = plan.row_elements * size_of(plan.dtype);
    for (RowsPiece& piece : cut_rows(plan, partition.range, ids.data(), 0, ids.size(), partition.as_blocks)) {
      piece.header.next_plan = partition.next_plan;
      piece.header.pushed_rows = RowsHeader::saturated(partition.pushed_rows);
      const size_t bytes = piece.payload_bytes(row_bytes);
      PooledBuffer payload(pool_, BufferPool::roomy(bytes));
      write_rows(piece, ids.data(), row_bytes, payload.data(),
                 [&](void* destination, uint64_t i) { sum.write_row(ids[i], destination); });
      frames.push_back(lent_.lend(header, std::move(payload), bytes, 1));
      pushed_bytes_ += bytes;
    }
  }
  partition.sum.clear();
  partition.pushed_rows = 0;
  partition.as_blocks = false;
  partition.next_plan = 0;
  return frames;
}

MachineSum::Passed MachineRows::pass_on(const Header& header, const void* payload, Lender&) {
  const bool absent = static_cast<Encoding>(header.encoding) == Encoding::kAbsent;
  const bool last = ends_round(header, absent ? nullptr : payload);
  Frame rows{header, payload};
  rows.header.of_machine = 0;
  Frame acknowledgement = rows;
  if (!absent) {
    std::memcpy(&acknowledgement_, payload, sizeof acknowledgement_);
    acknowledgement_.first_row = partition_at(plan, header.slice).first;
    acknowledgement_.rows = acknowledgement_.id_bytes = 0;
    acknowledgement_.coding = IdCoding::kRange;
    acknowledgement.header.payload_bytes = sizeof acknowledgement_;
    acknowledgement.payload = &acknowledgement_;
  }
  if (last) answered(header.slice);
  Passed passed;
  pass_to(true, rows, passed);
  if (last) pass_to(false, acknowledgement, passed);
  if (wants(0, header.slice))
    passed.own = rows;
  else if (last)
    passed.own = acknowledgement;
  return passed;
}

void MachineRows::pass_to(bool wanting, const Frame& frame, Passed& passed) {
  const size_t first = passed.frames.size(), bytes = frame.header.payload_bytes;
  for (int place = 1; place < workers(); ++place)
    if (wants(place, frame.header.slice) == wanting) passed.frames.push_back({place, frame});
  const auto receivers = static_cast<int>(passed.frames.size() - first);
  if (receivers == 0 || bytes == 0) return;
  PooledBuffer copy(pool_, BufferPool::roomy(bytes));
  std::memcpy(copy.data(), frame.payload, bytes);
  const Frame lent = lent_.lend(frame.header, std::move(copy), bytes, receivers);
  for (size_t i = first; i < passed.frames.size(); ++i) passed.frames[i].second = lent;
}

}  // namespace p3
