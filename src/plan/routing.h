// Which route the rows of a key take: only those that were touched, each with its id, or all of them in slices with a
// bitmap of the touched ones. By the bytes that leave and reach one worker, or with local aggregation one machine, in a
// round, as Parallax (EuroSys'19, section 3.1) compares what travels for a sparse variable; here for servers that
// broadcast what they have updated.
// Pure functions: all workers know the same numbers after the same round, so they choose alike.
#pragma once

#include <cstdint>

#include "p3/slicing.h"

namespace p3 {

// Of one round of a key, over all its partitions. alpha is pushed_rows / (workers * rows), U is touched_rows / rows.
struct RowCounts {
  uint64_t pushed_rows = 0;   // added up over the workers
  uint64_t touched_rows = 0;  // the union of what they pushed
};

struct RouteBytes {
  double rows = 0;
  double slices = 0;

  // Otherwise rows, which leave less to add up.
  bool slices_are_cheaper() const { return slices < rows; }
};

// `pushes`: how many reach the servers in a round, of all workers or with local aggregation of all machines; a is how
// dense each is, pushed_rows / (pushes * rows). The union of a machine's rows, which is what it pushes, is not known;
// it is at most that, and at most U.
// Up: rows, (row + id) * a * R; slices, (row + a bit) * R. Down, if the worker holds the whole value: the same of U.
// If it does not, it asks for rows by their ids whatever the route, a of them as far as anyone knows, and both are
// alike.
RouteBytes bytes_of_routes(const KeyPlan& plan, int pushes, const RowCounts& counts, bool holds_value);

}  // namespace p3
