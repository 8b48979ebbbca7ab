#include "numeric/sorted_rows.h"

#include <algorithm>
#include <numeric>

#include "numeric/sum.h"

namespace p3 {

SortedRows::SortedRows(const RowsView& rows, DType type, uint32_t row_elements) {
  std::vector<uint64_t> order(rows.count);
  std::iota(order.begin(), order.end(), uint64_t{0});
  std::stable_sort(order.begin(), order.end(), [&](uint64_t a, uint64_t b) { return rows.ids[a] < rows.ids[b]; });
  const size_t row_bytes = row_elements * size_of(type);
  const auto row_at = [&](uint64_t i) { return static_cast<const char*>(rows.values) + order[i] * row_bytes; };
  values.resize(rows.count * row_bytes);  // enough if none is repeated
  std::vector<double> sum(row_elements);  // of any type; aligned for all
  for (uint64_t i = 0; i < rows.count;) {
    const int64_t id = rows.ids[order[i]];
    char* const place = values.data() + ids.size() * row_bytes;
    start_sum(type, sum.data(), row_at(i), row_elements);
    for (++i; i < rows.count && rows.ids[order[i]] == id; ++i) add_to_sum(type, sum.data(), row_at(i), row_elements);
    finish_sum(type, place, sum.data(), row_elements);
    ids.push_back(id);
  }
  values.resize(ids.size() * row_bytes);
}

}  // namespace p3
