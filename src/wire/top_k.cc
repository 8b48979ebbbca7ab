#include "wire/top_k.h"

namespace p3 {

bool can_be_top_k(size_t bytes, size_t elements) {
  const size_t entry_bytes = top_k_bytes(1, elements) - kTopKHeadBytes;
  if (bytes < kTopKHeadBytes || (bytes - kTopKHeadBytes) % entry_bytes != 0) return false;
  return is_worth_top_k((bytes - kTopKHeadBytes) / entry_bytes, elements);
}

const char* problem_with_top_k(const void* payload, size_t bytes, size_t elements) {
  if (top_k_bytes(top_k_count(payload), elements) != bytes) return "of another size than its number of elements says";
  size_t next = 0;
  bool ascends = true;
  each_of_top_k(payload, elements, [&](size_t offset, float) {
    ascends &= offset >= next && offset < elements;
    next = offset + 1;
  });
  return ascends ? nullptr : "of elements that do not ascend within its slice";
}

}  // namespace p3
