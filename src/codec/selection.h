// The largest elements of a slice, exactly.
// Threads: a pure function. Memory: beside what it returns about 4 bytes for 32 elements and 8 for each that is selected.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace p3 {

// The offsets, ascending, of the `count` elements of largest magnitude; of equal ones the first. All are finite, and `count`
// is at most `elements`.
std::vector<uint32_t> offsets_of_largest(const float* values, size_t elements, size_t count);

}  // namespace p3
