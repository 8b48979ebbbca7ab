// What norms of a gradient are made of: parts that can be added up, of slices and of servers.
// The same elements give the same bits on every machine and build. An element that is no number, or infinite, makes
// `squares` so, too.
// Threads: pure functions.
#pragma once

#include <algorithm>
#include <cstddef>

#include "p3/dtype.h"

namespace p3 {

struct NormPart {
  double squares = 0;  // the sum of all elements' squares
  double largest = 0;  // the largest absolute value; of elements that are no numbers nothing is said

  void add(const NormPart& other) {
    squares += other.squares;
    largest = std::max(largest, other.largest);
  }
};

// Of elements of a floating type; none of any other. The squares are added up in float64 in sixteen parts, of the elements
// i with the same i mod 16, which are then added in that order.
NormPart norm_part(DType type, const void* elements, size_t count);

}  // namespace p3
