// Deep gradient compression of a slice (Lin et al., ICLR 2018): momentum before selection, and what is not selected is
// kept. The options are Dgc's; what is sent is wire/top_k.h's, or plain.
//
// On a worker, for each element, in float32 and without contraction:
//   u = momentum * u + rate * gradient;  v = v + u
// Then the elements of largest |v| leave, of equal ones those of lower offset first. Where one has left, v becomes 0, and
// with masking u does, too. What was sent and what is kept are the sum of all u. Where any v would not be finite, u and v
// stay as they are, and NaN leaves, for the first elements.
//
// On servers and workers alike, with the sum of what the workers have sent (the same operations on the same values: so
// all have the same bits):
//   weight = weight - decay * weight, of the whole slice, if decay is not 0
//   weight = weight - sum, where the sum is not 0
//
// Threads: pure functions. Memory: the caller's; no two arrays overlap. encode_step() also takes some for as long as it
// runs, about 4 bytes for 32 elements and 12 for each that is sent. Every build gives the same bits.
#pragma once

#include <cstddef>
#include <cstdint>

#include "p3/codec.h"
#include "p3/optimizer.h"

namespace p3 {

struct Dgc {
  double ratio;            // of the elements of a slice, that leave in a round; above 0, at most 1
  uint64_t warmup_rounds;  // of a key, in whose quarters more leave: 1/4, 1/16, 1/64, 1/256
  bool masking;            // the momentum of what has left begins anew
};
// Of the codec's options, whose standard values are in src/codec/top_k.cc.
Dgc dgc_of(const Compression& compression);

// --- a worker ------------------------------------------------------------------------------------------------------

// The share of elements that leave in a round, counted from 1: a quarter of the former one in each quarter of the
// warm-up, from 1/4 on, but never less than the ratio.
double ratio_at(const Dgc& options, uint64_t round);
// How many of a slice: at least one, ceil(ratio x elements) in float64; all, plain, where kTopK takes no fewer bytes.
size_t elements_to_send(const Dgc& options, uint64_t round, size_t elements);

struct DgcStep {
  float momentum;
  float rate;   // what a gradient is multiplied by
  bool masks;   // Dgc::masking
  size_t sent;  // of elements_to_send()
};

// `payload`: kTopK of so many elements; plain if that is all of them.
void encode_step(const DgcStep& step, const float* gradient, float* u, float* v, void* payload, size_t elements);

// The learning rate and rescale in the order of MXNet's SGD, in float32.
float rate_of(const RoundScalars& round);
// By what a gradient of that many elements is to be multiplied further, so that |rescale| x its norm is at most
// `bound`. The squares are summed in float64 in eight parts, of the elements i with the same i mod 8, which are then
// added in that order.
float clipping_of(const float* gradient, uint64_t elements, double rescale, double bound);

// What a snapshot keeps of a key: u and v of the whole key, and the rounds that it has had, as two floats.
constexpr size_t kRoundFloats = 2;
void write_round(uint64_t round, float* two);
uint64_t read_round(const float* two);  // throws Error(kUsage) if it is none

// --- servers and workers -------------------------------------------------------------------------------------------

float decay_of(const RoundScalars& round);
void decay_weight(float decay, float* weight, size_t elements);
// `payload`: sound, of kTopK.
void subtract_top_k(float* weight, const void* payload, size_t elements);

// --- a server ------------------------------------------------------------------------------------------------------

// How many elements of a sum are not 0: those that are sent.
size_t count_nonzero(const float* sum, size_t elements);
void encode_nonzero(const float* sum, size_t count, void* payload, size_t elements);
// The same subtraction, where kTopK takes no fewer bytes.
void subtract_nonzero(float* weight, const float* sum, size_t elements);

}  // namespace p3
