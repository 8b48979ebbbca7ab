#include "numeric/sum.h"

#include <cstdint>
#include <cstring>
#include <string>

#include "base/half.h"
#include "base/simd.h"
#include "p3/error.h"

#if P3_X86
#include <immintrin.h>
#endif

namespace p3 {
namespace {

template <typename T>
void add(void* accumulator, const void* source, size_t elements) {
  T* to = static_cast<T*>(accumulator);
  const T* from = static_cast<const T*>(source);
  loop(elements, [=](size_t i) { to[i] = static_cast<T>(to[i] + from[i]); });
}

template <typename T>
void divide(void* accumulator, int count, size_t elements) {
  T* values = static_cast<T*>(accumulator);
  const T divisor = static_cast<T>(count);
  loop(elements, [=](size_t i) { values[i] /= divisor; });
}

void copy(DType type, void* destination, const void* source, size_t elements) {
  if (elements > 0) std::memcpy(destination, source, elements * size_of(type));  // null is allowed for nothing
}

[[noreturn]] void refuse(DType type) {
  throw Error(ErrorKind::kUsage, "cannot sum elements of type code " + std::to_string(static_cast<int>(type)) +
                                     ": it is none of P3's element types");
}

// float16, eight elements at a time. Each returns how many elements it did; the portable code does the rest.
#if P3_X86
P3_AVX2 __m256 load_halves(const half* from) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}

P3_AVX2 size_t widen_avx2(float* to, const half* from, size_t n) {
  size_t i = 0;
  for (; i + 8 <= n; i += 8) _mm256_storeu_ps(to + i, load_halves(from + i));
  return i;
}

P3_AVX2 size_t add_halves_avx2(float* to, const half* from, size_t n) {
  size_t i = 0;
  for (; i + 8 <= n; i += 8) _mm256_storeu_ps(to + i, _mm256_add_ps(_mm256_loadu_ps(to + i), load_halves(from + i)));
  return i;
}

P3_AVX2 size_t narrow_avx2(half* to, const float* from, size_t n) {
  size_t i = 0;
  for (; i + 8 <= n; i += 8)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i),
                     _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT));
  return i;
}
#else
size_t widen_avx2(float*, const half*, size_t) { return 0; }
size_t add_halves_avx2(float*, const half*, size_t) { return 0; }
size_t narrow_avx2(half*, const float*, size_t) { return 0; }
#endif

void widen(float* to, const half* from, size_t n) {
  const size_t done = use_avx2 ? widen_avx2(to, from, n) : 0;
  for (size_t i = done; i < n; ++i) to[i] = half_to_float(from[i]);
}

void add_halves(float* to, const half* from, size_t n) {
  const size_t done = use_avx2 ? add_halves_avx2(to, from, n) : 0;
  for (size_t i = done; i < n; ++i) to[i] += half_to_float(from[i]);
}

void narrow(half* to, const float* from, size_t n) {
  const size_t done = use_avx2 ? narrow_avx2(to, from, n) : 0;
  for (size_t i = done; i < n; ++i) to[i] = float_to_half(from[i]);
}

}  // namespace

void start_sum(DType type, void* accumulator, const void* source, size_t elements) {
  if (!is_known(type)) refuse(type);
  float* const to = static_cast<float*>(accumulator);  // of half precision
  if (type == DType::kFloat16) return widen(to, static_cast<const half*>(source), elements);
  if (type != DType::kBfloat16) return copy(type, accumulator, source, elements);
  const auto* from = static_cast<const bfloat16*>(source);
  loop(elements, [=](size_t i) { to[i] = bfloat16_to_float(from[i]); });
}

void add_to_sum(DType type, void* accumulator, const void* source, size_t elements) {
  switch (type) {
    case DType::kFloat32:
      return add<float>(accumulator, source, elements);
    case DType::kFloat64:
      return add<double>(accumulator, source, elements);
    case DType::kFloat16:
      return add_halves(static_cast<float*>(accumulator), static_cast<const half*>(source), elements);
    case DType::kBfloat16: {
      float* const to = static_cast<float*>(accumulator);
      const auto* from = static_cast<const bfloat16*>(source);
      return loop(elements, [=](size_t i) { to[i] += bfloat16_to_float(from[i]); });
    }
    // Signed integers are added as unsigned ones, because only those may overflow: the bits are the same.
    case DType::kUint8:
    case DType::kInt8:
      return add<uint8_t>(accumulator, source, elements);
    case DType::kInt32:
      return add<uint32_t>(accumulator, source, elements);
    case DType::kInt64:
      return add<uint64_t>(accumulator, source, elements);
  }
  refuse(type);
}

void divide_sum(DType type, void* accumulator, int count, size_t elements) {
  if (!is_float(type)) refuse(type);
  if (type == DType::kFloat64)
    divide<double>(accumulator, count, elements);
  else
    divide<float>(accumulator, count, elements);
}

void finish_sum(DType type, void* destination, const void* accumulator, size_t elements) {
  if (!is_known(type)) refuse(type);
  const auto* from = static_cast<const float*>(accumulator);  // of half precision
  if (type == DType::kFloat16) return narrow(static_cast<half*>(destination), from, elements);
  if (type != DType::kBfloat16) return copy(type, destination, accumulator, elements);
  auto* const to = static_cast<bfloat16*>(destination);
  loop(elements, [=](size_t i) { to[i] = float_to_bfloat16(from[i]); });
}

}  // namespace p3
