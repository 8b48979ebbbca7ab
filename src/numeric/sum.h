// Adding slices, in the order the caller chooses. Element-wise, vectorised, never contracted into fused
// multiply-add: the same inputs in the same order give the same bits on every machine and build.
// NaN and infinity are passed on as IEEE 754 says. Integers wrap around.
// Every pointer is aligned to its element; all of them may be null when there are no elements. An unknown type throws
// Error(kUsage).
#pragma once

#include <cstddef>

#include "p3/dtype.h"

namespace p3 {

// The accumulator of a sum of `type` has sum_type(type): itself, or float32 for half precision.

// accumulator = source (half precision is widened).
void start_sum(DType type, void* accumulator, const void* source, size_t elements);

// accumulator += source.
void add_to_sum(DType type, void* accumulator, const void* source, size_t elements);

// accumulator /= count, which is at least 1: the average. Of a floating type only.
void divide_sum(DType type, void* accumulator, int count, size_t elements);

// destination (type) = accumulator (half precision: rounded to nearest even).
void finish_sum(DType type, void* destination, const void* accumulator, size_t elements);

}  // namespace p3
