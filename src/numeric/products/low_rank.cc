#include "numeric/products/low_rank.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "numeric/products/factors.h"
#include "p3/factors.h"

namespace p3 {
namespace {

constexpr double kVanishes = 1e-9;  // of a column's length: what is left is rounding then
constexpr size_t kLanes = 8;        // sums side by side, as one would wait for itself

double dot(const double* a, const double* b, size_t count) {
  double lanes[kLanes] = {};
  size_t i = 0;
  for (; i + kLanes <= count; i += kLanes)
    for (size_t lane = 0; lane < kLanes; ++lane) lanes[lane] += a[i + lane] * b[i + lane];
  double sum = 0;
  for (; i < count; ++i) sum += a[i] * b[i];
  for (const double lane : lanes) sum += lane;
  return sum;
}

// Columns as rows of float64.
std::vector<double> transposed(const float* matrix, size_t rows, size_t columns) {
  std::vector<double> made(rows * columns);
  for (size_t i = 0; i < rows; ++i)
    for (size_t j = 0; j < columns; ++j) made[j * rows + i] = matrix[i * columns + j];
  return made;
}

// What of the last one is at right angles to all before, of length 1; false, and zero, if there is nothing.
bool straighten(double* all, size_t last, size_t rows) {
  double* const column = all + last * rows;
  const double length = std::sqrt(dot(column, column, rows));
  double left = length;
  for (int pass = 0; pass < 2; ++pass) {  // the second takes away what rounding has left in the first
    for (size_t before = 0; before < last; ++before) {
      const double* const other = all + before * rows;
      const double along = dot(other, column, rows);
      for (size_t i = 0; i < rows; ++i) column[i] -= along * other[i];
    }
    left = std::sqrt(dot(column, column, rows));
    if (left <= kVanishes * length) {
      std::fill_n(column, rows, 0.0);
      return false;
    }
  }
  for (size_t i = 0; i < rows; ++i) column[i] /= left;
  return true;
}

}  // namespace

void orthonormalise(float* matrix, size_t rows, size_t columns, const float* instead) {
  std::vector<double> all = transposed(matrix, rows, columns);
  for (size_t j = 0; j < columns; ++j) {
    if (straighten(all.data(), j, rows) || instead == nullptr) continue;
    for (size_t i = 0; i < rows; ++i) all[j * rows + i] = instead[i * columns + j];
    straighten(all.data(), j, rows);
  }
  for (size_t i = 0; i < rows; ++i)
    for (size_t j = 0; j < columns; ++j) matrix[i * columns + j] = static_cast<float>(all[j * rows + i]);
}

void multiply_thin(const float* left, const float* right, size_t rows, size_t columns, size_t rank, float* product) {
  FactorShape shape;  // the product of factors is the same, with a row for each column here
  shape.rows = rank, shape.outputs = rows, shape.inputs = columns;
  std::vector<float> part(shape.part_elements());
  for (size_t k = 0; k < rank; ++k) {
    float* const row = part.data() + k * (rows + columns);
    for (size_t i = 0; i < rows; ++i) row[i] = left[i * rank + k];
    for (size_t j = 0; j < columns; ++j) row[rows + j] = right[j * rank + k];
  }
  FactorSum sum(shape);
  const std::vector<const float*> parts = {part.data()};
  for (size_t first = 0; first < rows; first += FactorSum::kBlock)
    sum.rows(parts, first, std::min(FactorSum::kBlock, rows - first), product + first * columns);
}

}  // namespace p3
