// As float16.cc, with float32's range and fewer digits.
#include "codec/half.h"

namespace p3 {

const Codec& bfloat16() {
  static const HalfCodec codec(Encoding::kBfloat16, "bf16", "rounded to bfloat16, whose range is float32's",
                               DType::kBfloat16);
  return codec;
}

}  // namespace p3
