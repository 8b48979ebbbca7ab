#include "numeric/row_sum.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "numeric/sum.h"

namespace p3 {

RowSum::RowSum(DType type, uint32_t row_elements, const RowRange& range, BufferPool& pool)
    : type_(type),
      row_elements_(row_elements),
      row_bytes_(row_elements * size_of(sum_type(type))),
      range_(range),
      pool_(pool) {}

void RowSum::add(const ReceivedRows& rows) {
  const size_t count = rows.ids.size();
  if (slots_.empty()) slots_.assign(range_.count, kNone);
  reserve(rows_.size() + count);
  // In runs as long as possible: rows new or known alike, that follow each other both where they come from and here.
  for (size_t begin = 0, end; begin < count; begin = end) {
    const bool is_new = slot_of(rows.ids[begin]) == kNone;
    for (end = begin; end < count && rows.row(end) == rows.row(begin) + (end - begin) * rows.row_bytes; ++end) {
      uint32_t& slot = slot_of(rows.ids[end]);
      if (is_new != (slot == kNone)) break;
      if (is_new) {
        slot = static_cast<uint32_t>(rows_.size());
        rows_.push_back(rows.ids[end]);
      }
      if (slot != slot_of(rows.ids[begin]) + (end - begin)) break;
    }
    (is_new ? start_sum : add_to_sum)(type_, sum_of(rows.ids[begin]), rows.row(begin), (end - begin) * row_elements_);
  }
}

void RowSum::divide(int count) { divide_sum(type_, sums_, count, rows_.size() * row_elements_); }

// One that touched all rows needs no sorting.
std::vector<int64_t> RowSum::ids() const {
  std::vector<int64_t> sorted = rows_;
  if (sorted.size() == range_.count)
    std::iota(sorted.begin(), sorted.end(), static_cast<int64_t>(range_.first));
  else if (!is_ascending(sorted.data(), sorted.size()))
    std::sort(sorted.begin(), sorted.end());
  return sorted;
}

void RowSum::write_row(int64_t row, void* destination) const {
  finish_sum(type_, destination, sum_of(row), row_elements_);
}

void RowSum::clear() {
  for (int64_t row : rows_) slot_of(row) = kNone;
  last_count_ = rows_.size();
  rows_.clear();
  if (sums_ != nullptr) pool_.give_back(std::exchange(sums_, nullptr), bytes_);
}

void RowSum::reserve(size_t rows) {
  const size_t needed = rows * row_bytes_;
  if (sums_ != nullptr && needed <= bytes_) return;
  const size_t bytes = BufferPool::roomy(std::max(needed, sums_ == nullptr ? last_count_ * row_bytes_ : 2 * bytes_));
  char* const grown = static_cast<char*>(pool_.take(bytes));
  if (sums_ != nullptr) {
    std::memcpy(grown, sums_, rows_.size() * row_bytes_);
    pool_.give_back(sums_, bytes_);
  }
  sums_ = grown;
  bytes_ = bytes;
}

}  // namespace p3
