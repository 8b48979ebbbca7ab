// Element-wise loops at the width of the machine they run on. The loop is compiled twice, for the baseline the
// build targets and for AVX2, and the CPU decides at run time, so that one binary serves every x86-64 machine.
// Both builds give the same bits: elements do not mix, and multiply and add are never contracted. std::fma is exact in
// both, but a slow call of the C library where the baseline has no such instruction.
//
// Function attributes and a plain branch, not target_clones: its ifunc resolvers run before the sanitizers' start-up
// code, and neither templates nor every compiler support it.
#pragma once

#include <atomic>
#include <cstddef>

#if defined(__x86_64__) && defined(__GNUC__)
#define P3_X86 1
#define P3_AVX2 __attribute__((target("avx2,fma,f16c")))
#else
#define P3_X86 0
#define P3_AVX2
#endif

// Promises the compiler that an iteration touches no other iteration's elements, which spares it the overlap checks.
#if defined(__clang__)
#define P3_INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#elif defined(__GNUC__)
#define P3_INDEPENDENT _Pragma("GCC ivdep")
#else
#define P3_INDEPENDENT
#endif

// Of the body of a loop that has loops of its own: only within loop_avx2() they are compiled for AVX2.
#if defined(__GNUC__)
#define P3_INLINE __attribute__((always_inline))
#else
#define P3_INLINE
#endif

namespace p3 {

inline bool cpu_has_avx2() {
#if P3_X86
  __builtin_cpu_init();
#if defined(__clang__)  // older ones cannot ask for F16C, which every processor with AVX2 has
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#else
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
#endif
#else
  return false;
#endif
}

// Whether the AVX2 builds are used. Tests clear it to compare the two; true needs cpu_has_avx2().
extern std::atomic<bool> use_avx2;

template <typename Body>
void loop_baseline(size_t n, Body body) {
  P3_INDEPENDENT
  for (size_t i = 0; i < n; ++i) body(i);
}

template <typename Body>
P3_AVX2 void loop_avx2(size_t n, Body body) {
  P3_INDEPENDENT
  for (size_t i = 0; i < n; ++i) body(i);
}

// body(i) for i = 0 .. n-1, in no particular order. Pass pointers and numbers by value: [=].
template <typename Body>
void loop(size_t n, Body body) {
  use_avx2.load(std::memory_order_relaxed) ? loop_avx2(n, body) : loop_baseline(n, body);
}

}  // namespace p3
