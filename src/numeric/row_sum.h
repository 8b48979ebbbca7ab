// The sum of several senders' rows: each row that anybody touched, in the order in which the caller adds.
//
// A slot map tells where the sum of a row is, so that memory follows the rows that are touched, not those of the key;
// it is one number for each row of the range, once there was one to add. The sums are kept in one array, which grows
// and goes back to the pool in clear().
// Threads: none of its own.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/buffer_pool.h"
#include "p3/dtype.h"
#include "plan/rows.h"

namespace p3 {

class RowSum {
 public:
  RowSum(DType type, uint32_t row_elements, const RowRange& range, BufferPool& pool);
  ~RowSum() { clear(); }
  RowSum(const RowSum&) = delete;
  RowSum& operator=(const RowSum&) = delete;

  // Rows of the range, in the element type. The first contribution to a row is copied: it is no sum with zero.
  void add(const ReceivedRows& rows);
  // All sums /= count.
  void divide(int count);

  // The rows touched so far, ascending.
  std::vector<int64_t> ids() const;
  // The sum of one of them, in the type in which sums are made. Sums of neighbours may follow each other in memory.
  char* sum_of(int64_t row) const { return sums_ + slot_of(row) * row_bytes_; }
  size_t row_bytes() const { return row_bytes_; }
  // Writes one of them in the element type: half precision is rounded.
  void write_row(int64_t row, void* destination) const;
  void clear();

 private:
  static constexpr uint32_t kNone = ~uint32_t{0};
  uint32_t& slot_of(int64_t row) { return slots_[static_cast<size_t>(row) - range_.first]; }
  uint32_t slot_of(int64_t row) const { return slots_[static_cast<size_t>(row) - range_.first]; }
  void reserve(size_t rows);

  const DType type_;
  const uint32_t row_elements_;
  const size_t row_bytes_;  // of a sum
  const RowRange range_;
  BufferPool& pool_;
  std::vector<uint32_t> slots_;  // of each row of the range; empty before the first
  std::vector<int64_t> rows_;    // of each slot
  char* sums_ = nullptr;
  size_t bytes_ = 0;       // of that buffer
  size_t last_count_ = 0;  // rows of the sum before, a guess at this one's
};

}  // namespace p3
