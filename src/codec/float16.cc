// Beyond 65504 an element becomes infinity.
#include "codec/half.h"

namespace p3 {

const Codec& float16() {
  static const HalfCodec codec(Encoding::kFloat16, "fp16", "rounded to float16; beyond 65504 it becomes infinite",
                               DType::kFloat16);
  return codec;
}

}  // namespace p3
