#include "p3/slicing.h"

#include <algorithm>

namespace p3 {

uint32_t slice_count(const KeyPlan& plan) {
  if (plan.elements == 0) return 1;
  return static_cast<uint32_t>((plan.elements + plan.slice_elements - 1) / plan.slice_elements);
}

Slice slice_at(const KeyPlan& plan, uint32_t index) {
  const uint64_t offset = static_cast<uint64_t>(index) * plan.slice_elements;
  const uint64_t rest = plan.elements - offset;
  return {offset, static_cast<uint32_t>(std::min<uint64_t>(rest, plan.slice_elements))};
}

int server_of(const KeyPlan& plan, uint32_t index, int num_servers) {
  return static_cast<int>((plan.first_slice + index) % static_cast<uint64_t>(num_servers));
}

}  // namespace p3
