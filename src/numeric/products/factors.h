// The sum of gradients that are given as factors (p3/factors.h).
//
// Each element is added up in float32, from 0, over the parts in their order and over the rows of each in theirs, and
// multiply and add are never contracted: so every worker, and every build, gets the same bits.
//
// Threads: one at a time. Memory: borrows the parts for a call; keeps what a block of rows needs.
#pragma once

#include <cstddef>
#include <vector>

#include "p3/factors.h"

namespace p3 {

class FactorSum {
 public:
  explicit FactorSum(const FactorShape& shape) : shape_(shape) {}

  // So many rows of the weight are best asked for at once.
  static constexpr size_t kBlock = 32;

  // Writes rows `first` .. `first + count` of the sum: count x inputs floats. `parts`: one of each worker that has any.
  void rows(const std::vector<const float*>& parts, size_t first, size_t count, float* sum);

 private:
  const FactorShape shape_;
  std::vector<float> outputs_, inputs_;  // a block of dy, and a panel of x, of all rows, as the kernel reads them
};

}  // namespace p3
