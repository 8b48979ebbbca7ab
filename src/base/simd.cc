#include "base/simd.h"

namespace p3 {

std::atomic<bool> use_avx2{cpu_has_avx2()};  // here, and not inline: one for the core and the extensions over it

}  // namespace p3
