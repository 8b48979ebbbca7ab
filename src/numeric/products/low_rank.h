// The arithmetic of low-rank compression (p3/worker/lowrank/) of which every worker has to get the same bits, on whatever
// processor: the columns that a matrix is projected on, and the product of two thin matrices.
//
// One order of summation, and multiply and add are never contracted. Products that are summed over the workers need no
// such order, and are made elsewhere.
//
// Threads: pure functions. Memory: the caller's; no two arrays overlap. Matrices lie row by row.
#pragma once

#include <cstddef>

namespace p3 {

// Makes the columns of a matrix orthonormal, from the first to the last, by the modified Gram-Schmidt process in float64.
// A column that is a combination of those before, to a part in 1e9, takes the place of that column of `instead`, which is
// treated alike; without one, or if that is such a combination, too, it becomes zero. `instead`: of the same shape, or
// null. All elements are finite.
void orthonormalise(float* matrix, size_t rows, size_t columns, const float* instead);

// product = left right^T, in float32 and over the columns in their order. `left`: rows x rank; `right`: columns x rank.
void multiply_thin(const float* left, const float* right, size_t rows, size_t columns, size_t rank, float* product);

}  // namespace p3
