#include "numeric/norm.h"

#include <cmath>

#include "base/half.h"
#include "base/simd.h"

namespace p3 {
namespace {

constexpr size_t kLanes = 16;

template <typename Read>
inline __attribute__((always_inline)) NormPart add_up(size_t count, Read read) {
  double squares[kLanes] = {}, largest[kLanes] = {};
  const auto take = [&](size_t lane, size_t i) {
    const double value = read(i), size = std::fabs(value);
    squares[lane] += value * value;
    largest[lane] = size > largest[lane] ? size : largest[lane];
  };
  const size_t whole = count / kLanes * kLanes;
  for (size_t begin = 0; begin < whole; begin += kLanes)
    for (size_t lane = 0; lane < kLanes; ++lane) take(lane, begin + lane);
  for (size_t i = whole; i < count; ++i) take(i - whole, i);
  NormPart sum;
  for (size_t lane = 0; lane < kLanes; ++lane) sum.add({squares[lane], largest[lane]});
  return sum;
}

template <typename Read>
P3_AVX2 NormPart add_up_avx2(size_t count, Read read) {
  return add_up(count, read);
}

template <typename Read>
NormPart dispatch(size_t count, Read read) {
  return use_avx2.load(std::memory_order_relaxed) ? add_up_avx2(count, read) : add_up(count, read);
}

}  // namespace

NormPart norm_part(DType type, const void* elements, size_t count) {
  switch (type) {
    case DType::kFloat32:
      return dispatch(count, [from = static_cast<const float*>(elements)](size_t i) { return double{from[i]}; });
    case DType::kFloat64:
      return dispatch(count, [from = static_cast<const double*>(elements)](size_t i) { return from[i]; });
    case DType::kFloat16:
      return dispatch(count,
                      [from = static_cast<const half*>(elements)](size_t i) { return double{half_to_float(from[i])}; });
    case DType::kBfloat16:
      return dispatch(count, [from = static_cast<const bfloat16*>(elements)](size_t i) {
        return double{bfloat16_to_float(from[i])};
      });
    default:
      return {};
  }
}

}  // namespace p3
