// Beyond 65504 an element becomes infinity.
#include "codec/half.h"

namespace p3 {

const Codec& float16() {
  static const HalfCodec codec(Encoding::kFloat16, "fp16", DType::kFloat16);
  return codec;
}

}  // namespace p3
