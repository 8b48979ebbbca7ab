// Gradients in fewer bits: how a slice of float32 is written on the wire, and how it is summed from there.
//
//   float16   rounded to nearest even; beyond 65504 it becomes infinity. Half the bytes.
//   two-bit   -threshold, 0 or +threshold; what that leaves out is kept and added to the next gradient (error
//             feedback). A sixteenth of the bytes. The codes and their order are MXNet's: 16 elements in 4 bytes, the
//             first in the highest bits of the first byte; 11 is +threshold, 10 is -threshold, all else is 0.
//             Source: MXNet's documentation of gradient compression; Seide et al., Interspeech 2014.
//
// Threads: pure functions. Memory: the caller's; no two arrays may overlap.
#pragma once

#include <cstddef>

#include "p3/dtype.h"
#include "p3/wire.h"

namespace p3 {

// Of a store; the same on every node. Types other than float32 are always sent plain.
struct Compression {
  Encoding encoding = Encoding::kPlain;  // kPlain, kFloat16 or kTwoBit
  float threshold = 0.5f;                // kTwoBit

  Encoding of(DType type) const { return type == DType::kFloat32 ? encoding : Encoding::kPlain; }
  bool keeps_residual() const { return encoding == Encoding::kTwoBit; }
};

// Throws Error(kUsage) that says what is wrong with it.
void check(const Compression& compression);

// Bytes of a payload of so many elements of `type` (float32, unless the encoding is plain or absent).
size_t encoded_bytes(Encoding encoding, DType type, size_t elements);

// Not for kPlain: a plain payload is the gradient itself. `residual` (kTwoBit) is what earlier gradients left out.
void encode(const Compression& compression, const float* gradient, float* residual, void* payload, size_t elements);

// accumulator = the decoded payload, and accumulator += the decoded payload, in float32.
void start_encoded_sum(const Compression& compression, float* accumulator, const void* payload, size_t elements);
void add_encoded_to_sum(const Compression& compression, float* accumulator, const void* payload, size_t elements);

// Widens `elements` float16 that lie in the second half of `values` to float32 in place: where a worker receives them.
void widen_in_place(float* values, size_t elements);

}  // namespace p3
