#include "worker/rows_transfer.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <utility>

#include "p3/dtype.h"
#include "wire/routing.h"

namespace p3 {

RowsTransfer::RowsTransfer(Kind its_kind, Key& key, const RowsView& rows, void* landing, uint8_t part)
    : Transfer(its_kind, key, part), rows_(rows), landing_(landing) {
  if (kind != Kind::kFetch || is_ascending(rows_.ids, rows_.count)) return;
  ids_.assign(rows_.ids, rows_.ids + rows_.count);
  std::sort(ids_.begin(), ids_.end());
  ids_.erase(std::unique(ids_.begin(), ids_.end()), ids_.end());
}

RowsTransfer::RowsTransfer(Kind its_kind, Key& key, std::vector<int64_t> ids, const void* values, void* landing,
                           uint8_t part)
    : Transfer(its_kind, key, part), landing_(landing), ids_(std::move(ids)) {
  rows_ = {ids_.data(), ids_.size(), values};
}

RowsTransfer::RowsTransfer(Key& key, std::unique_ptr<const SortedRows> sorted, void* landing)
    : Transfer(Kind::kPush, key), sorted_(std::move(sorted)), rows_(sorted_->view()), landing_(landing) {}

std::vector<Frame> RowsTransfer::begin(const KeyPlan& plan, Header header) {
  plan_ = plan;
  row_bytes_ = plan.row_elements * size_of(type());
  if (is_sorted_copy()) fetched_.resize(ids_.size() * row_bytes_);
  parts_.resize(slice_count(plan));
  const uint32_t next_plan = kind == Kind::kPush ? std::exchange(key_.announced, 0) : 0;

  Frame frame;
  frame.header = header;
  frame.header.kind = frame_kind();
  frame.header.dtype = static_cast<uint8_t>(type());
  frame.header.part = is_round() ? landing_ != nullptr : part_;
  const bool absent = kind == Kind::kSkip || kind == Kind::kInit;
  frame.header.encoding = static_cast<uint8_t>(absent ? Encoding::kAbsent : Encoding::kPlain);
  if (!absent) frame.encoder = this;

  const int64_t* const ids = ids_.empty() ? rows_.ids : ids_.data();
  const uint64_t count = ids_.empty() ? rows_.count : ids_.size();
  std::vector<Frame> frames;
  uint64_t begin = 0, end = 0;
  for (uint32_t i = 0; i < parts_.size(); ++i, begin = end) {
    const RowRange range = partition_at(plan, i);
    const auto behind = static_cast<int64_t>(range.first + range.count);
    end = static_cast<uint64_t>(std::lower_bound(ids + begin, ids + count, behind) - ids);
    Part& part = parts_[i];
    part.next_row = range.first;
    frame.header.slice = i;
    if (absent) {
      part.pieces.resize(1);
      frames.push_back(frame);
      continue;
    }
    // A push is waited for by every partition; of all else, something must be answered.
    if (begin == end && kind != Kind::kPush && !(count == 0 && i == 0)) continue;
    part.pieces = cut_rows(plan, range, ids, begin, end, key_.as_blocks && kind == Kind::kPush);
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

FrameKind RowsTransfer::frame_kind() const {
  switch (kind) {
    case Kind::kInit:
      return FrameKind::kInit;
    case Kind::kFetch:
      return FrameKind::kFetchRows;
    case Kind::kStore:
      return FrameKind::kStoreRows;
    default:
      return FrameKind::kPushRows;
  }
}

void RowsTransfer::encode(const Header&, const void* source, void* payload) {
  const RowsPiece& piece = *static_cast<const RowsPiece*>(source);
  if (kind == Kind::kFetch) {
    write_ids(piece, ids_.empty() ? rows_.ids : ids_.data(), payload);
    return;
  }
  const char* const values = static_cast<const char*>(rows_.values);
  write_rows(piece, rows_.ids, row_bytes_, payload,
             [&](void* destination, uint64_t i) { std::memcpy(destination, values + i * row_bytes_, row_bytes_); });
}

// --- answers -------------------------------------------------------------------------------------------------------

const char* RowsTransfer::problem_with(const Header& header) const {
  const auto encoding = static_cast<Encoding>(header.encoding);
  const Part& part = parts_[header.slice];
  if (static_cast<DType>(header.dtype) != type()) return "wrongly sized";
  switch (kind) {
    case Kind::kPush:
    case Kind::kSkip:
      if (header.kind != FrameKind::kRows || header.part > 1) return "unexpected";
      if (encoding == Encoding::kAbsent && kind == Kind::kSkip) return nullptr;
      if (encoding != Encoding::kPlain) return "in another encoding than agreed";
      return header.payload_bytes < sizeof(RowsHeader) ||
                     header.payload_bytes > max_rows_payload(plan_, size_of(plan_.dtype))
                 ? "wrongly sized"
                 : nullptr;
    case Kind::kInit:
      return header.kind == FrameKind::kValue && encoding == Encoding::kAbsent ? nullptr : "unexpected";
    case Kind::kStore:
      return header.kind == FrameKind::kPart && header.part == part_ && encoding == Encoding::kAbsent ? nullptr
                                                                                                      : "unexpected";
    default:
      break;
  }
  if (header.kind != FrameKind::kPart || header.part != part_ || encoding != Encoding::kPlain) return "unexpected";
  return header.payload_bytes == part.pieces[part.fetched].count * row_bytes_ ? nullptr : "wrongly sized";
}

void* RowsTransfer::place_of(const Header& header) {
  if (kind != Kind::kFetch) return nullptr;
  const Part& part = parts_[header.slice];
  char* const start = is_sorted_copy() ? fetched_.data() : landing();
  return start + part.pieces[part.fetched].begin * row_bytes_;
}

const char* RowsTransfer::land(const Header& header, const void* payload, bool& is_last) {
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
  is_updated_ = true;
  has_sums_ |= header.part == 1;
  bytes_received_ += header.payload_bytes;
  for (size_t i = 0; i < received_.ids.size(); ++i)
    std::memcpy(landing() + static_cast<size_t>(received_.ids[i]) * row_bytes_, received_.row(i), row_bytes_);
  part.landed.insert(part.landed.end(), received_.ids.begin(), received_.ids.end());
  is_last = received_.header.last == 1;
  if (!is_last) return nullptr;
  round_.pushed += received_.header.pushed_rows;
  round_.touched += received_.header.touched_rows;
  round_.next_plan = std::max(round_.next_plan, received_.header.next_plan);
  const bool all_came = landing_ == nullptr || part.landed.size() == received_.header.touched_rows;
  return all_came ? nullptr : "not all that was touched";
}

void RowsTransfer::finish() {
  for (const Part& part : parts_) changed_.insert(changed_.end(), part.landed.begin(), part.landed.end());
  if (has_sums_ && landing_ != nullptr) {
    std::vector<int64_t> zeroed;
    std::set_difference(key_.left_over.begin(), key_.left_over.end(), changed_.begin(), changed_.end(),
                        std::back_inserter(zeroed));
    for (int64_t row : zeroed) std::memset(landing() + static_cast<size_t>(row) * row_bytes_, 0, row_bytes_);
    key_.left_over = changed_;
    const auto middle = static_cast<std::ptrdiff_t>(changed_.size());
    changed_.insert(changed_.end(), zeroed.begin(), zeroed.end());
    std::inplace_merge(changed_.begin(), changed_.begin() + middle, changed_.end());
  }
  if (!is_sorted_copy()) return;
  for (uint64_t i = 0; i < rows_.count; ++i) {
    const auto place = std::lower_bound(ids_.begin(), ids_.end(), rows_.ids[i]) - ids_.begin();
    std::memcpy(landing() + i * row_bytes_, fetched_.data() + static_cast<size_t>(place) * row_bytes_, row_bytes_);
  }
}

void RowsTransfer::count() {
  if (!is_round()) return;
  KeyCounters& counters = key_.counters;
  counters.own_rows = rows_.count;
  counters.pushed_rows = round_.pushed;
  counters.touched_rows = round_.touched;
  counters.row_bytes_sent += key_.machine_sum == nullptr ? bytes_sent_ : key_.machine_sum->take_pushed_bytes();
  counters.row_bytes_received += bytes_received_;
  key_.next_plan = round_.next_plan;
  if (key_.pushes > 0 && is_updated())
    key_.as_blocks = counters.as_slices =
        slices_are_cheaper(*key_.plan, key_.pushes, {round_.pushed, round_.touched}, landing_ != nullptr);
}

}  // namespace p3
