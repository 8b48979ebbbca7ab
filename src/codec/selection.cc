#include "codec/selection.h"

#include <algorithm>
#include <cstring>

#include "base/simd.h"

namespace p3 {
namespace {

// As unsigned numbers these are in the order of magnitudes.
uint32_t magnitude_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits & 0x7fffffff;
}

struct Cut {
  uint32_t magnitude;  // all above it are selected
  size_t equal;        // and so many, the first ones, of this magnitude
};

// The `count`-th largest of magnitude(0) .. magnitude(n - 1), 11 or 10 bits at a time from the highest on.
template <typename Magnitude>
Cut cut_of(Magnitude magnitude, size_t n, size_t count) {
  struct Digit {
    int shift, bits;
  };
  uint32_t prefix = 0, known = 0;
  size_t left = count;
  for (const Digit digit : {Digit{20, 11}, Digit{10, 10}, Digit{0, 10}}) {
    uint32_t counts[1u << 11] = {};
    const uint32_t mask = (1u << digit.bits) - 1;
    for (size_t i = 0; i < n; ++i) {
      const uint32_t one = magnitude(i);
      if ((one & known) == prefix) ++counts[one >> digit.shift & mask];
    }
    uint32_t largest = mask;
    for (; counts[largest] < left; --largest) left -= counts[largest];
    prefix |= largest << digit.shift;
    known |= mask << digit.shift;
  }
  return {prefix, left};
}

// Where few are selected, nearly all blocks have none of them, and need no second look. The `count`-th largest of the
// blocks' greatest magnitudes is no greater than that of all: so what is below it is not selected.
constexpr size_t kBlock = 32;

bool are_few(size_t count, size_t elements) { return 3 * count <= 2 * (elements / kBlock); }

std::vector<uint32_t> greatest_of_blocks(const float* values, size_t elements) {
  const size_t whole = elements / kBlock;
  std::vector<uint32_t> greatest(whole + (elements % kBlock != 0));
  uint32_t* const out = greatest.data();
  loop(whole, [=](size_t block) {
    const float* const first = values + block * kBlock;
    int32_t most = 0;  // magnitudes have no 32nd bit, and numbers with a sign are compared sooner
    for (size_t i = 0; i < kBlock; ++i) most = std::max(most, static_cast<int32_t>(magnitude_of(first[i])));
    out[block] = static_cast<uint32_t>(most);
  });
  for (size_t i = whole * kBlock; i < elements; ++i) out[whole] = std::max(out[whole], magnitude_of(values[i]));
  return greatest;
}

// Offsets, ascending, of all that may be among the `count` largest.
std::vector<uint32_t> candidates_of(const float* values, size_t elements, size_t count) {
  const std::vector<uint32_t> greatest = greatest_of_blocks(values, elements);
  const uint32_t least = cut_of([&](size_t block) { return greatest[block]; }, greatest.size(), count).magnitude;
  std::vector<uint32_t> candidates;
  candidates.reserve(2 * count);
  for (size_t block = 0; block < greatest.size(); ++block) {
    if (greatest[block] < least) continue;
    const size_t end = std::min(elements, (block + 1) * kBlock);
    for (size_t i = block * kBlock; i < end; ++i)
      if (magnitude_of(values[i]) >= least) candidates.push_back(static_cast<uint32_t>(i));
  }
  return candidates;
}

}  // namespace

std::vector<uint32_t> offsets_of_largest(const float* values, size_t elements, size_t count) {
  std::vector<uint32_t> offsets;
  offsets.reserve(count);
  const auto select = [&](auto offset_of, size_t n) {
    const auto magnitude = [&](size_t i) { return magnitude_of(values[offset_of(i)]); };
    const Cut cut = cut_of(magnitude, n, count);
    size_t equal = cut.equal;
    for (size_t i = 0; i < n; ++i) {
      const uint32_t one = magnitude(i);
      if (one < cut.magnitude || (one == cut.magnitude && equal == 0)) continue;
      equal -= one == cut.magnitude;
      offsets.push_back(static_cast<uint32_t>(offset_of(i)));
    }
  };
  if (!are_few(count, elements)) {
    select([](size_t i) { return i; }, elements);
    return offsets;
  }
  const std::vector<uint32_t> candidates = candidates_of(values, elements, count);
  select([&](size_t i) -> size_t { return candidates[i]; }, candidates.size());
  return offsets;
}

}  // namespace p3
