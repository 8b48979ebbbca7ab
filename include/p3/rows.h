// Rows of a key of rows: what a row_sparse gradient touches of a tensor whose first dimension is large.
// Memory: plain values; a RowsView borrows.
#pragma once

#include <cstdint>

namespace p3 {

// Rows of a key: ids and, one after the other in the same order, their elements.
struct RowsView {
  const int64_t* ids = nullptr;  // ascending, each once
  uint64_t count = 0;
  const void* values = nullptr;
};

// Neighbouring rows.
struct RowRange {
  uint64_t first = 0;
  uint64_t count = 0;
};

}  // namespace p3
