// Which rows of one partition: a bit for each.
// Threads: none of its own.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "plan/rows.h"

namespace p3 {

class RowSet {
 public:
  explicit RowSet(const RowRange& range) : first_(range.first), words_((range.count + 63) / 64, 0) {}

  // A row of the range.
  void insert(int64_t row) {
    const uint64_t bit = static_cast<uint64_t>(row) - first_;
    words_[bit / 64] |= uint64_t{1} << bit % 64;
  }

  // All of them, ascending; then there are none.
  std::vector<int64_t> take() {
    std::vector<int64_t> rows;
    for (size_t i = 0; i < words_.size(); ++i)
      for (; words_[i] != 0; words_[i] &= words_[i] - 1)
        rows.push_back(static_cast<int64_t>(first_ + i * 64) + __builtin_ctzll(words_[i]));
    return rows;
  }

 private:
  const uint64_t first_;
  std::vector<uint64_t> words_;
};

}  // namespace p3
