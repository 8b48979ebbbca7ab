#include "plan/routing.h"

#include <algorithm>

#include "p3/dtype.h"
#include "plan/rows.h"

namespace p3 {
namespace {

// Of the ids of `count` rows, as gaps in LEB128: seven bits of a gap to a byte.
double id_bytes(double rows, double count) {
  if (count <= 0) return 0;
  double bytes = 1;
  for (double gap = rows / count; gap > 128; gap /= 128) ++bytes;
  return bytes * count;
}

}  // namespace

RouteBytes bytes_of_routes(const KeyPlan& plan, int pushes, const RowCounts& counts, bool holds_value) {
  const auto rows = static_cast<double>(row_count(plan));
  const double row_bytes = static_cast<double>(plan.row_elements) * static_cast<double>(size_of(plan.dtype));
  const double all = static_cast<double>(counts.touched_rows);
  const double own = std::min(static_cast<double>(counts.pushed_rows) / pushes, all);
  const double asked_for = own * row_bytes + id_bytes(rows, own);

  RouteBytes bytes;
  bytes.rows = own * row_bytes + id_bytes(rows, own);
  bytes.slices = rows * row_bytes + rows / 8;
  bytes.rows += holds_value ? all * row_bytes + id_bytes(rows, all) : asked_for;
  bytes.slices += holds_value ? rows * row_bytes + rows / 8 : asked_for;
  return bytes;
}

}  // namespace p3
