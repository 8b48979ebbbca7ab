#include "numeric/products/factors.h"

#include <algorithm>
#include <cstring>

#include "base/simd.h"

namespace p3 {
namespace {

// A tile of the sum stays in registers while all rows of the factors are added to it.
constexpr size_t kTileRows = 4, kTileColumns = 16;
constexpr size_t kPanel = 2 * kTileColumns;  // of x: a panel of some hundred rows fits into the nearest cache

// Of the compiler's own vectors, as it keeps them in registers; a narrower processor gets each in two halves.
using Vector __attribute__((vector_size(32), aligned(4), may_alias)) = float;
constexpr size_t kVectors = kTileColumns / 8;

// `dy`: rows x kTileRows; `x`: rows x kPanel, from the tile's first column on. Inlined into a build for each processor.
__attribute__((always_inline)) inline void add_up(const float* dy, const float* x, size_t rows, float* tile) {
  Vector sums[kTileRows][kVectors] = {};
  for (size_t k = 0; k < rows; ++k, dy += kTileRows, x += kPanel)
    for (size_t j = 0; j < kVectors; ++j) {
      const Vector its = *reinterpret_cast<const Vector*>(x + 8 * j);
      for (size_t i = 0; i < kTileRows; ++i) sums[i][j] += dy[i] * its;
    }
  std::memcpy(tile, sums, sizeof sums);
}

void tile_baseline(const float* dy, const float* x, size_t rows, float* tile) { add_up(dy, x, rows, tile); }
P3_AVX2 void tile_avx2(const float* dy, const float* x, size_t rows, float* tile) { add_up(dy, x, rows, tile); }

// Copies `count` columns from `first` on of each row, `padded` of them in the copy, with zeros behind.
float* pack(const float* part, size_t rows, size_t stride, size_t first, size_t count, size_t padded, float* to) {
  for (size_t k = 0; k < rows; ++k, to += padded) {
    std::copy_n(part + k * stride + first, count, to);
    std::fill(to + count, to + padded, 0.f);
  }
  return to;
}

}  // namespace

void FactorSum::rows(const std::vector<const float*>& parts, size_t first, size_t count, float* sum) {
  const size_t outputs = shape_.outputs, inputs = shape_.inputs, stride = outputs + inputs;
  const size_t rows = shape_.rows * parts.size();
  const size_t tiles = (count + kTileRows - 1) / kTileRows;
  outputs_.resize(tiles * rows * kTileRows);
  inputs_.resize(rows * kPanel);
  float* packed = outputs_.data();
  for (size_t i = 0; i < count; i += kTileRows)
    for (const float* part : parts)
      packed = pack(part, shape_.rows, stride, first + i, std::min(kTileRows, count - i), kTileRows, packed);

  const auto tile_of = use_avx2 ? tile_avx2 : tile_baseline;
  float tile[kTileRows * kTileColumns];
  for (size_t column = 0; column < inputs; column += kPanel) {
    const size_t width = std::min(kPanel, inputs - column);
    packed = inputs_.data();
    for (const float* part : parts) packed = pack(part, shape_.rows, stride, outputs + column, width, kPanel, packed);
    for (size_t j = 0; j < width; j += kTileColumns)
      for (size_t i = 0; i < count; i += kTileRows) {
        tile_of(outputs_.data() + i * rows, inputs_.data() + j, rows, tile);
        for (size_t row = i; row < std::min(i + kTileRows, count); ++row)
          std::copy_n(tile + (row - i) * kTileColumns, std::min(kTileColumns, width - j),
                      sum + row * inputs + column + j);
      }
  }
}

}  // namespace p3
