// What a dense key's servers would keep if they updated, on a worker that outlives them (docs/replicated-servers.md): the
// value, and the optimizer's state. The servers only sum, and each worker updates by every sum, so all have the same.
//
// Memory:  the value, its master if it is of half precision, and the state.
// Threads: one at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "p3/live_optimizer.h"
#include "p3/slicing.h"

namespace p3 {

class Replica {
 public:
  // Of that value, of a floating type, before its first update. `optimizer` outlives it.
  Replica(const LiveOptimizer& optimizer, DType dtype, uint64_t elements, const void* value);

  // The slice has another value, as no update has made it; the state stays. Returns where the value is.
  const void* replace(const Slice& slice, const void* value);
  // By a sum of the value's type. Returns where the new value is. Throws as LiveOptimizer::as_of().
  const void* update(const Slice& slice, const void* sum, const RoundSettings& settings);

  // Of the state: 1 .. Optimizer::state_count(), or kMaster if there is one.
  static bool has_state(const LiveOptimizer& optimizer, DType dtype, uint8_t part);
  // That of the state, or of the value: 0.
  std::vector<char>& array(uint8_t part);

 private:
  size_t state_bytes() const { return elements_ * size_of(sum_type(dtype_)); }
  void* at(std::vector<char>& array, DType type, const Slice& slice) const {
    return array.empty() ? nullptr : array.data() + slice.offset * size_of(type);
  }

  const LiveOptimizer& optimizer_;
  const DType dtype_;
  const uint64_t elements_;
  std::vector<char> value_, master_;
  std::vector<std::vector<char>> state_;
  std::vector<char> sum_;  // of half precision, widened
};

}  // namespace p3
