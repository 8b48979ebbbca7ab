// Numbers of slices, as tests expect them.
#pragma once

#include <cstdint>
#include <numeric>
#include <vector>

namespace p3 {

// 0 to count - 1.
inline std::vector<uint32_t> up_to(uint32_t count) {
  std::vector<uint32_t> numbers(count);
  std::iota(numbers.begin(), numbers.end(), 0u);
  return numbers;
}

}  // namespace p3
