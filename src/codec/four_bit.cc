// Blocks of 64 elements (codec/blocks.h), from -7 to 7: little more than an eighth of the bytes. Byte i of a block has
// element i in its lower half, and in its upper half the element that follows those in the lower halves at the same
// distance; of an odd number of elements, the last upper half is 0. So both halves are contiguous, as vectors are.
//   With 64 elements a block's scale costs a quarter of a bit for each: docs/decisions.md has the errors of other blocks.
#include "codec/blocks.h"

namespace p3 {
namespace {

struct Halves {
  static constexpr size_t kBits = 4, kBlock = 64;

  P3_INLINE static void pack(const int32_t* codes, size_t n, uint8_t* bytes) {
    const size_t upper = n / 2, lower = n - upper;
    for (size_t i = 0; i < upper; ++i) bytes[i] = static_cast<uint8_t>((codes[i] & 15) | (codes[lower + i] & 15) << 4);
    if (upper < lower) bytes[upper] = static_cast<uint8_t>(codes[upper] & 15);
  }
  template <typename Visit>
  P3_INLINE static void unpack(const uint8_t* bytes, size_t n, Visit visit) {
    const size_t upper = n / 2, lower = n - upper;
    P3_INDEPENDENT
    for (size_t i = 0; i < lower; ++i) visit(i, signed_of(bytes[i] & 15));
    P3_INDEPENDENT
    for (size_t i = 0; i < upper; ++i) visit(lower + i, signed_of(bytes[i] >> 4));
  }

 private:
  P3_INLINE static int32_t signed_of(int32_t half) { return (half ^ 8) - 8; }
};

}  // namespace

const Codec& four_bit() {
  static const BlockCodec<Halves> codec(
      Encoding::kFourBit, "int4",
      "a multiple of a seventh of the largest in its block of 64; the difference is added to the next gradient");
  return codec;
}

}  // namespace p3
