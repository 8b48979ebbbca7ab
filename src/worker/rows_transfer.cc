#include "worker/rows_transfer.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <utility>

#include "p3/dtype.h"

namespace p3 {

RowsTransfer::RowsTransfer(Kind kind, const RowsView& rows, void* landing, uint8_t part)
    : kind_(kind), rows_(rows), landing_(landing), part_(part) {
  if (kind_ != Kind::kFetch || is_ascending(rows_.ids, rows_.count)) return;
  ids_.assign(rows_.ids, rows_.ids + rows_.count);
  std::sort(ids_.begin(), ids_.end());
  ids_.erase(std::unique(ids_.begin(), ids_.end()), ids_.end());
}

RowsTransfer::RowsTransfer(Kind kind, std::vector<int64_t> ids, const void* values, void* landing, uint8_t part)
    : kind_(kind), landing_(landing), part_(part), ids_(std::move(ids)) {
  rows_ = {ids_.data(), ids_.size(), values};
}

RowsTransfer::RowsTransfer(std::unique_ptr<const SortedRows> sorted, void* landing)
    : kind_(Kind::kPush), sorted_(std::move(sorted)), rows_(sorted_->view()), landing_(landing), part_(0) {}

std::vector<Frame> RowsTransfer::begin(const KeyPlan& plan, const Header& header, bool as_blocks, uint32_t next_plan) {
  plan_ = plan;
  const bool of_state = part_ != 0;
  row_bytes_ = plan.row_elements * size_of(of_state ? sum_type(plan.dtype) : plan.dtype);
  if (is_sorted_copy()) fetched_.resize(ids_.size() * row_bytes_);
  parts_.resize(slice_count(plan));

  Frame frame;
  frame.header = header;
  if (is_round()) frame.header.part = landing_ != nullptr;
  const bool absent = kind_ == Kind::kSkip || kind_ == Kind::kWish;
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
    if (begin == end && kind_ != Kind::kPush && !(count == 0 && i == 0)) continue;
    part.pieces = cut_rows(plan, range, ids, begin, end, as_blocks && kind_ == Kind::kPush);
    for (RowsPiece& piece : part.pieces) {
      piece.header.next_plan = next_plan;
      frame.header.payload_bytes = static_cast<uint32_t>(
          kind_ == Kind::kFetch ? sizeof(RowsHeader) + piece.header.id_bytes : piece.payload_bytes(row_bytes_));
      frame.payload = &piece;
      bytes_sent_ += frame.header.payload_bytes;
      frames.push_back(frame);
    }
  }
  return frames;
}

void RowsTransfer::encode(const Header&, const void* source, void* payload) {
  const RowsPiece& piece = *static_cast<const RowsPiece*>(source);
  if (kind_ == Kind::kFetch) {
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
  if (static_cast<DType>(header.dtype) != (part_ == 0 ? plan_.dtype : sum_type(plan_.dtype))) return "wrongly sized";
  switch (kind_) {
    case Kind::kPush:
    case Kind::kSkip:
      if (header.kind != FrameKind::kRows || header.part > 1) return "unexpected";
      if (encoding == Encoding::kAbsent && kind_ == Kind::kSkip) return nullptr;
      if (encoding != Encoding::kPlain) return "in another encoding than agreed";
      return header.payload_bytes < sizeof(RowsHeader) ||
                     header.payload_bytes > max_rows_payload(plan_, size_of(plan_.dtype))
                 ? "wrongly sized"
                 : nullptr;
    case Kind::kWish:
      return header.kind == FrameKind::kValue && encoding == Encoding::kAbsent ? nullptr : "unexpected";
    case Kind::kStore:
      return header.kind == FrameKind::kPart && header.part == part_ && encoding == Encoding::kAbsent ? nullptr
                                                                                                      : "unexpected";
    case Kind::kFetch:
      break;
  }
  if (header.kind != FrameKind::kPart || header.part != part_ || encoding != Encoding::kPlain) return "unexpected";
  return header.payload_bytes == part.pieces[part.fetched].count * row_bytes_ ? nullptr : "wrongly sized";
}

void* RowsTransfer::place_of(const Header& header) {
  if (kind_ != Kind::kFetch) return nullptr;
  const Part& part = parts_[header.slice];
  char* const start = is_sorted_copy() ? fetched_.data() : landing();
  return start + part.pieces[part.fetched].begin * row_bytes_;
}

const char* RowsTransfer::land(const Header& header, const void* payload, bool& complete) {
  Part& part = parts_[header.slice];
  if (kind_ == Kind::kFetch) {
    complete = ++part.fetched == part.pieces.size();
    return nullptr;
  }
  complete = true;
  if (static_cast<Encoding>(header.encoding) == Encoding::kAbsent) return nullptr;
  const RowRange range = partition_at(plan_, header.slice);
  const char* problem = read_rows(plan_, range, row_bytes_, payload, header.payload_bytes, part.next_row, received_);
  if (problem != nullptr) return problem;
  if (landing_ == nullptr && !received_.ids.empty()) return "not asked for";
  updated_ = true;
  sums_ |= header.part == 1;
  bytes_received_ += header.payload_bytes;
  for (size_t i = 0; i < received_.ids.size(); ++i)
    std::memcpy(landing() + static_cast<size_t>(received_.ids[i]) * row_bytes_, received_.row(i), row_bytes_);
  part.landed.insert(part.landed.end(), received_.ids.begin(), received_.ids.end());
  complete = received_.header.last == 1;
  if (!complete) return nullptr;
  round_.pushed += received_.header.pushed_rows;
  round_.touched += received_.header.touched_rows;
  round_.next_plan = std::max(round_.next_plan, received_.header.next_plan);
  const bool all_came = landing_ == nullptr || part.landed.size() == received_.header.touched_rows;
  return all_came ? nullptr : "not all that was touched";
}

void RowsTransfer::finish(std::vector<int64_t>& left_over) {
  for (const Part& part : parts_) changed_.insert(changed_.end(), part.landed.begin(), part.landed.end());
  if (sums_ && landing_ != nullptr) {
    std::vector<int64_t> zeroed;
    std::set_difference(left_over.begin(), left_over.end(), changed_.begin(), changed_.end(),
                        std::back_inserter(zeroed));
    for (int64_t row : zeroed) std::memset(landing() + static_cast<size_t>(row) * row_bytes_, 0, row_bytes_);
    left_over = changed_;
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

}  // namespace p3
