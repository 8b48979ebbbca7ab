// Rows with ids in any order, made ascending.
// Memory: its own copy. Threads: a plain value.
#pragma once

#include <cstdint>
#include <vector>

#include "p3/dtype.h"
#include "p3/rows.h"

namespace p3 {

// Rows with ids in any order, made ascending: the values of a repeated id are added up in the order of appearance.
struct SortedRows {
  SortedRows(const RowsView& rows, DType type, uint32_t row_elements);
  RowsView view() const { return {ids.data(), ids.size(), values.data()}; }

  std::vector<int64_t> ids;
  std::vector<char> values;
};

}  // namespace p3
