// Sufficient factors: the gradient of a fully connected layer as the two matrices that it is a product of.
//
// Of a layer y = x W^T with W of M x N (outputs x inputs), K rows x and the gradients dy of its K rows y, the gradient
// of W is dy^T x. A worker's factors are K rows of M + N floats: dy of the row, then x. The factors of all workers are
// gathered on each of them, and each forms the same sum, and makes the same update, by itself.
// Source: Xie et al., UAI 2016; Zhang et al. (Poseidon), USENIX ATC 2017; Zhang's thesis, 3.1.2.
#pragma once

#include <cstdint>

namespace p3 {

struct FactorShape {
  uint64_t rows = 0;     // K, of one worker
  uint64_t outputs = 0;  // M
  uint64_t inputs = 0;   // N

  uint64_t part_elements() const { return rows * (outputs + inputs); }  // of one worker's factors
  uint64_t elements() const { return outputs * inputs; }                // of the weight
};

}  // namespace p3
