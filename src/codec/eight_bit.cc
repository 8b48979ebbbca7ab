// Blocks of 128 elements (codec/blocks.h), a byte for each, from -127 to 127: little more than a quarter of the bytes.
#include "codec/blocks.h"

namespace p3 {
namespace {

struct Bytes {
  static constexpr size_t kBits = 8, kBlock = 128;

  P3_INLINE static void pack(const int32_t* codes, size_t n, uint8_t* bytes) {
    for (size_t i = 0; i < n; ++i) bytes[i] = static_cast<uint8_t>(codes[i]);
  }
  template <typename Visit>
  P3_INLINE static void unpack(const uint8_t* bytes, size_t n, Visit visit) {
    P3_INDEPENDENT
    for (size_t i = 0; i < n; ++i) visit(i, static_cast<int8_t>(bytes[i]));
  }
};

}  // namespace

const Codec& eight_bit() {
  static const BlockCodec<Bytes> codec(
      Encoding::kEightBit, "int8",
      "a multiple of a 127th of the largest in its block of 128; the difference is added to the next gradient");
  return codec;
}

}  // namespace p3
