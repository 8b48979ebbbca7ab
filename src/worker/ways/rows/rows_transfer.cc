#include "worker/ways/rows/rows_transfer.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <utility>

#include "p3/dtype.h"
#include "worker/ways/rows/machine_rows.h"

namespace p3 {

RowsTransfer::RowsTransfer(Kind its_kind, RowsWay& way, const RowsView& rows, void* landing, uint8_t part,
                           std::shared_ptr<const void> memory, bool goes_on)
    : Transfer(its_kind, way.key, part),
      way_(way),
      memory_(std::move(memory)),
      rows_(rows),
      landing_(landing),
      goes_on_(goes_on),
      asked_(rows) {
  if (kind != Kind::kFetch || is_ascending(rows_.ids, rows_.count)) return;
  sorted_ids_.assign(rows_.ids, rows_.ids + rows_.count);
  std::sort(sorted_ids_.begin(), sorted_ids_.end());
  sorted_ids_.erase(std::unique(sorted_ids_.begin(), sorted_ids_.end()), sorted_ids_.end());
  asked_ = {sorted_ids_.data(), sorted_ids_.size(), nullptr};
}

std::vector<Frame> RowsTransfer::begin(const KeyPlan& plan, Header header) {
  plan_ = plan;
  row_bytes_ = plan.row_elements * size_of(type_);
  sorted_rows_.resize(sorted_ids_.size() * row_bytes_);
  parts_.resize(slice_count(plan));
  const uint32_t next_plan = kind == Kind::kPush ? std::exchange(way_.announced, 0) : 0;

  const bool absent = kind == Kind::kInit || (kind == Kind::kSkip && (!goes_on_ || plan.is_synchronous()));
  Frame frame;
  frame.header = header_of(header, absent ? Encoding::kAbsent : Encoding::kPlain);
  if (is_round()) frame.header.part = landing_ != nullptr;
  if (kind == Kind::kSkip) frame.header.scalars.updates = kNoUpdate;
  if (!absent) frame.encoder = this;

  std::vector<Frame> frames;
  uint64_t begin = 0, end = 0;
  for (uint32_t i = 0; i < parts_.size(); ++i, begin = end) {
    const RowRange range = partition_at(plan, i);
    const auto behind = static_cast<int64_t>(range.first + range.count);
    end = static_cast<uint64_t>(std::lower_bound(asked_.ids + begin, asked_.ids + asked_.count, behind) - asked_.ids);
    Part& part = parts_[i];
    part.next_row = range.first;
    frame.header.slice = i;
    if (absent) {
      frames.push_back(frame);
      continue;
    }
    // A push is waited for by every partition; of all else, something must be answered.
    if (begin == end && !is_round() && !(asked_.count == 0 && i == 0)) continue;
    part.pieces = cut_rows(plan, range, asked_.ids, begin, end, way_.counters.as_slices && kind == Kind::kPush);
    for (RowsPiece& piece : part.pieces) {
      piece.header.next_plan = next_plan;
      frame.header.payload_bytes = static_cast<uint32_t>(
          kind == Kind::kFetch ? sizeof(RowsHeader) + piece.header.id_bytes : piece.payload_bytes(row_bytes_));
      frame.payload = &piece;
      bytes_sent_ += frame.header.payload_bytes;
      frames.push_back(frame);
    }
  }
  return frames;
}

void RowsTransfer::encode(const Header&, const void* source, void* payload) {
  const RowsPiece& piece = *static_cast<const RowsPiece*>(source);
  if (kind == Kind::kFetch) {
    write_ids(piece, asked_.ids, payload);
    return;
  }
  const char* const values = static_cast<const char*>(rows_.values);
  write_rows(piece, rows_.ids, row_bytes_, payload,
             [&](void* destination, uint64_t i) { std::memcpy(destination, values + i * row_bytes_, row_bytes_); });
}

// --- answers -------------------------------------------------------------------------------------------------------

const char* RowsTransfer::problem_with(const Header& header) const {
  const auto encoding = static_cast<Encoding>(header.encoding);
  if (static_cast<DType>(header.dtype) != type_) return "wrongly sized";
  if (is_round()) {
    const bool is_stale = !plan_.is_synchronous();
    const bool may_have_part = !is_stale || kind == Kind::kSkip;  // they are sums; or all have taken their last step
    if (header.kind != FrameKind::kRows || header.part > may_have_part) return "unexpected";
    if (encoding == Encoding::kAbsent && kind == Kind::kSkip && !is_stale) return nullptr;
    if (encoding != Encoding::kPlain) return "in another encoding than agreed";
    const bool fits = header.payload_bytes >= sizeof(RowsHeader) &&
                      header.payload_bytes <= max_rows_payload(plan_, size_of(plan_.dtype));
    return fits ? nullptr : "wrongly sized";
  }
  const bool due =
      kind == Kind::kInit ? header.kind == FrameKind::kValue : header.kind == FrameKind::kPart && header.part == part_;
  if (!due || encoding != (kind == Kind::kFetch ? Encoding::kPlain : Encoding::kAbsent)) return "unexpected";
  if (kind != Kind::kFetch) return nullptr;
  const Part& part = parts_[header.slice];
  return header.payload_bytes == part.pieces[part.fetched].count * row_bytes_ ? nullptr : "wrongly sized";
}

void* RowsTransfer::place_of(const Header& header) {
  if (kind != Kind::kFetch) return nullptr;
  const Part& part = parts_[header.slice];
  char* const start = sorted_ids_.empty() ? landing() : sorted_rows_.data();
  return start + part.pieces[part.fetched].begin * row_bytes_;
}

const char* RowsTransfer::land(const Header& header, const void* payload, bool& is_last) {
  if (!plan_.is_synchronous()) way_.progress.note(header);
  Part& part = parts_[header.slice];
  if (kind == Kind::kFetch) {
    is_last = ++part.fetched == part.pieces.size();
    return nullptr;
  }
  is_last = true;
  if (static_cast<Encoding>(header.encoding) == Encoding::kAbsent) return nullptr;
  const RowRange range = partition_at(plan_, header.slice);
  const char* problem = read_rows(plan_, range, row_bytes_, payload, header.payload_bytes, part.next_row, received_);
  if (problem != nullptr) return problem;
  if (landing_ == nullptr && !received_.ids.empty()) return "not asked for";
  const bool is_over = header.part == 1 && !plan_.is_synchronous();
  is_updated_ |= !is_over;
  has_sums_ |= header.part == 1 && !is_over;
  bytes_received_ += header.payload_bytes;
  for (size_t i = 0; i < received_.ids.size(); ++i)
    std::memcpy(landing() + static_cast<size_t>(received_.ids[i]) * row_bytes_, received_.row(i), row_bytes_);
  part.landed.insert(part.landed.end(), received_.ids.begin(), received_.ids.end());
  is_last = received_.header.last == 1;
  if (!is_last) return nullptr;
  counts_.pushed_rows += received_.header.pushed_rows;
  counts_.touched_rows += received_.header.touched_rows;
  next_plan_ = std::max(next_plan_, received_.header.next_plan);
  if (next_plan_ != 0 && !plan_.is_synchronous()) return "naming another plan";
  const bool all_came = landing_ == nullptr || part.landed.size() == received_.header.touched_rows;
  return all_came ? nullptr : "not all that was touched";
}

void RowsTransfer::finish() {
  for (const Part& part : parts_) changed_.insert(changed_.end(), part.landed.begin(), part.landed.end());
  if (has_sums_ && landing_ != nullptr) {
    std::vector<int64_t> zeroed;
    std::set_difference(way_.left_over.begin(), way_.left_over.end(), changed_.begin(), changed_.end(),
                        std::back_inserter(zeroed));
    for (int64_t row : zeroed) std::memset(landing() + static_cast<size_t>(row) * row_bytes_, 0, row_bytes_);
    way_.left_over = changed_;
    const auto middle = static_cast<std::ptrdiff_t>(changed_.size());
    changed_.insert(changed_.end(), zeroed.begin(), zeroed.end());
    std::inplace_merge(changed_.begin(), changed_.begin() + middle, changed_.end());
  }
  if (sorted_ids_.empty()) return;
  for (uint64_t i = 0; i < rows_.count; ++i) {
    const auto place = std::lower_bound(sorted_ids_.begin(), sorted_ids_.end(), rows_.ids[i]) - sorted_ids_.begin();
    std::memcpy(landing() + i * row_bytes_, sorted_rows_.data() + static_cast<size_t>(place) * row_bytes_, row_bytes_);
  }
}

void RowsTransfer::count() {
  Transfer::count();
  if (!is_round()) return;
  RowsCounters& counters = way_.counters;
  counters.own_rows = rows_.count;
  counters.pushed_rows = counts_.pushed_rows;
  counters.touched_rows = counts_.touched_rows;
  auto* const machine = static_cast<MachineRows*>(key_.machine_sum.get());  // of this way's making
  counters.row_bytes_sent += machine == nullptr ? bytes_sent_ : machine->take_pushed_bytes();
  counters.row_bytes_received += bytes_received_;
  way_.next_plan = next_plan_;
  key_.moves = next_plan_ != 0;
  if (way_.pushes > 0 && is_updated())
    counters.as_slices = bytes_of_routes(*key_.plan, way_.pushes, counts_, landing_ != nullptr).slices_are_cheaper();
}

}  // namespace p3
