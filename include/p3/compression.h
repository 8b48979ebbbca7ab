// Gradients in fewer bits: how a slice of float32 is written on the wire, and how it is summed from there.
//
//   float16   rounded to nearest even; beyond 65504 it becomes infinity. Half the bytes.
//   two-bit   -threshold, 0 or +threshold; what that leaves out is kept and added to the next gradient (error
//             feedback). A sixteenth of the bytes. The codes and their order are MXNet's: 16 elements in 4 bytes, the
//             first in the highest bits of the first byte; 11 is +threshold, 10 is -threshold, 01 is NaN, 00 is 0.
//             Source: MXNet's documentation of gradient compression; Seide et al., Interspeech 2014.
//   one-bit   the sign, as the mean of all elements of the slice at or above zero, or of those below; error feedback as
//             with two bits. Little more than a thirty-second of the bytes: two float32, the mean of those at or above
//             zero first, then 8 elements in each byte, the first in the highest bit; 1 is at or above zero.
//             A mean is the sum in float64, divided by the count, and rounded; or 0 if there are none. The sum is made
//             in eight parts, of the elements i with the same i mod 8 in ascending order, and they in that of i mod 8.
//             Source: Seide et al., Interspeech 2014; Zhang's thesis, 3.5.4.
//   top-k     deep gradient compression (numeric/dgc.h): each worker applies the momentum itself, and sends the few
//             elements that have grown largest; what comes back is their sum, which it subtracts from the value.
//             Servers with SGD only. Keys of one dimension stay plain. Lin et al., ICLR 2018.
//
// Overflow: where the gradient of a slice, added to what is kept, is not finite everywhere, two-bit, one-bit and top-k
// leave what is kept as it is and send NaN: two-bit and one-bit for each element of the slice (both means are NaN), top-k
// for the elements that leave. So every worker sees the overflow, and it is gone with the next gradient.
//
// Threads: pure functions. Memory: the caller's; no two arrays may overlap.
#pragma once

#include <cstddef>
#include <cstdint>

#include "p3/dtype.h"
#include "p3/wire.h"

namespace p3 {

// Of deep gradient compression.
struct Dgc {
  double ratio = 0.001;        // of the elements of a slice, that leave in a round; above 0, at most 1
  uint64_t warmup_rounds = 0;  // of a key, in whose quarters more leave: 1/4, 1/16, 1/64, 1/256
  bool masking = true;         // the momentum of what has left begins anew
};

// Of a store; the same on every node. Types other than float32 are always sent plain.
struct Compression {
  Encoding encoding = Encoding::kPlain;  // any but kAbsent
  float threshold = 0.5f;                // kTwoBit
  Dgc dgc{};                             // kTopK, on workers

  Encoding of(DType type, bool is_vector = false) const {
    return type != DType::kFloat32 || (is_vector && encoding == Encoding::kTopK) ? Encoding::kPlain : encoding;
  }
  // For a key of that type, of at most one dimension if `is_vector`.
  Compression for_key(DType type, bool is_vector = false) const {
    Compression suited = *this;
    suited.encoding = of(type, is_vector);
    return suited;
  }
  // Floats that a worker keeps for each element.
  size_t residuals() const {
    return encoding == Encoding::kTopK ? 2 : encoding == Encoding::kTwoBit || encoding == Encoding::kOneBit ? 1 : 0;
  }
};

// Throws Error(kUsage) that says what is wrong with it.
void check(const Compression& compression);

// Bytes of a payload of so many elements of `type` (float32, unless the encoding is plain or absent). Not for kTopK.
size_t encoded_bytes(Encoding encoding, DType type, size_t elements);
// Whether a payload in that encoding can have so many bytes.
bool can_have_bytes(Encoding encoding, DType type, size_t elements, size_t bytes);
// What is wrong with the content of a payload that has come, or null. Of others than kTopK anything is sound.
const char* problem_with_encoded(Encoding encoding, const void* payload, size_t bytes, size_t elements);

// Not for kPlain: a plain payload is the gradient itself; nor for kTopK. `residual` is what earlier gradients left out,
// of a compression that keeps it.
void encode(const Compression& compression, const float* gradient, float* residual, void* payload, size_t elements);

// accumulator = the decoded payload, and accumulator += the decoded payload, in float32.
void start_encoded_sum(const Compression& compression, float* accumulator, const void* payload, size_t elements);
void add_encoded_to_sum(const Compression& compression, float* accumulator, const void* payload, size_t elements);

// Widens `elements` float16 that lie in the second half of `values` to float32 in place: where a worker receives them.
void widen_in_place(float* values, size_t elements);

}  // namespace p3
