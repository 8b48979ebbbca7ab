#include "p3/slicing.h"

#include <algorithm>
#include <limits>

#include "wire/rows.h"

namespace p3 {
namespace {

constexpr uint64_t kMaxPayload = std::numeric_limits<uint32_t>::max();
constexpr uint64_t kMaxSlices = std::numeric_limits<uint32_t>::max();
constexpr uint64_t kMaxRows = uint64_t{1} << 31;  // so that counts fit into RowsHeader, and products into 64 bits

// Of a key that is summed: of the whole.
uint64_t slices_of_part(const KeyPlan& plan) {
  return plan.elements == 0 ? 1 : (plan.elements + plan.slice_elements - 1) / plan.slice_elements;
}

}  // namespace

bool makes_sense(const KeyPlan& plan) {
  if (plan.slice_elements == 0 || !is_known(plan.dtype)) return false;
  const size_t element_bytes = size_of(sum_type(plan.dtype));
  if (plan.is_gathered() && (plan.has_rows() || !plan.is_synchronous() || plan.elements == 0 ||
                             plan.dtype != DType::kFloat32 || slices_of_part(plan) > kMaxSlices / plan.parts))
    return false;
  if (!plan.has_rows()) return plan.slice_elements * element_bytes <= kMaxPayload;
  const uint64_t rows = row_count(plan);
  return plan.elements % plan.row_elements == 0 && rows <= kMaxRows && plan.partitions >= 1 &&
         plan.partitions <= std::max<uint64_t>(rows, 1) && max_rows_payload(plan, element_bytes) <= kMaxPayload;
}

uint32_t slice_count(const KeyPlan& plan) {
  if (plan.has_rows()) return plan.partitions;
  return static_cast<uint32_t>(slices_of_part(plan) * std::max<uint32_t>(plan.parts, 1));
}

Slice slice_at(const KeyPlan& plan, uint32_t index) {
  uint64_t part_begin = 0, number = index;
  if (plan.is_gathered()) {
    const uint64_t in_part = slices_of_part(plan);
    part_begin = index / in_part * plan.elements;
    number = index % in_part;
  }
  const uint64_t offset = number * plan.slice_elements;
  const uint64_t rest = plan.elements - offset;
  return {part_begin + offset, static_cast<uint32_t>(std::min<uint64_t>(rest, plan.slice_elements))};
}

int worker_of(const KeyPlan& plan, uint32_t index) { return static_cast<int>(index / slices_of_part(plan)); }

int server_of(const KeyPlan& plan, uint32_t index, int num_servers) {
  return static_cast<int>((plan.first_slice + index) % static_cast<uint64_t>(num_servers));
}

}  // namespace p3
