// Top-k: the elements of largest magnitude of a slice, in few bits, for any optimizer; what is not sent, or lost by
// rounding, is kept and added to the next gradient. (Deep gradient compression, top_k.cc, needs SGD, and sends steps.)
//
//   payload = scale base codes lows highs; with two bits, low high codes lows highs
//
// docs/protocol.md has the layout and every rule of rounding ("Largest"). Why they are so:
//   An offset takes its low byte and a share of one bit for 256 elements, of slices of any size.
//   What is sent is at least as large as the smallest of them, base x scale, so only the way from there to the largest
// needs steps. The scale has 8 digits and a number of scales 16, so their product is exact, and so is the difference
// that is kept: what was sent and what is kept are what came, to the bit.
//   With two bits a code has two values to choose from, and steps of one size would waste one wherever a few elements
// are far larger than the others: docs/decisions.md has the figures. What is sent is at most twice the magnitude, or
// has no digit below its last one: so the difference is exact here, too.
// Sources: Aji and Heafield, EMNLP 2017; Stich et al., NeurIPS 2018 (feedback); Elias, JACM 1974 (offsets).
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "base/half.h"
#include "base/simd.h"
#include "codec/overflow.h"
#include "codec/selection.h"
#include "p3/codec.h"

namespace p3 {
namespace {

constexpr size_t kBlock = 256;  // elements that a low byte tells apart

size_t bytes_of_bits(size_t bits) { return (bits + 7) / 8; }

void set_bit(uint8_t* bytes, size_t bit) { bytes[bit / 8] = static_cast<uint8_t>(bytes[bit / 8] | 1 << bit % 8); }
bool has_bit(const uint8_t* bytes, size_t bit) { return bytes[bit / 8] >> bit % 8 & 1; }

// Where the parts of a payload are.
struct Layout {
  Layout(const Codec::Options& with, size_t elements) : n(elements), value_bits(static_cast<size_t>(with[1])) {
    if (n == 0) return;
    const double share = std::ceil(with[0] * static_cast<double>(n));
    k = std::min(n, std::max<size_t>(1, static_cast<size_t>(share)));
    high_bits = k + (n + kBlock - 1) / kBlock;
    codes = sizeof(bfloat16) + sizeof(uint16_t);
    lows = codes + bytes_of_bits(k * value_bits);
    highs = lows + k;
    bytes = highs + bytes_of_bits(high_bits);
  }
  uint32_t most() const { return (1u << (value_bits - 1)) - 1; }
  bool has_levels() const { return value_bits == 2; }

  const size_t n, value_bits;
  size_t k = 0, high_bits = 0, codes = 0, lows = 0, highs = 0, bytes = 0;
};

// What a code stands for, up to its sign.
struct Grid {
  bfloat16 scale;
  uint16_t base;

  // `unit` is the scale. Of a magnitude below 2^16 units.
  static uint16_t units(float magnitude, float unit) {
    const float whole = std::nearbyint(magnitude / unit);
    return static_cast<uint16_t>(std::isfinite(whole * unit) ? whole : whole - 1);
  }
  static Grid of(float smallest, float largest, uint32_t most) {
    const float step = (largest - smallest) / static_cast<float>(most);
    Grid made;
    made.scale = float_to_bfloat16(std::max({step, largest * 0x1p-15f, 0x1p-126f}));
    made.base = units(smallest, made.unit());
    return made;
  }
  float unit() const { return bfloat16_to_float(scale); }
  float value(uint32_t m) const { return static_cast<float>(base + m) * unit(); }
  uint32_t code(float magnitude, uint32_t most) const {
    return std::min<uint32_t>(units(magnitude, unit()) - base, most);
  }
};

// The same of two bits.
struct Levels {
  bfloat16 low, high;

  static bfloat16 rounded(float value) {
    const bfloat16 nearest = float_to_bfloat16(value);
    return std::isinf(bfloat16_to_float(nearest)) ? float_to_bfloat16(0x1.fep127f) : nearest;
  }
  // Of the magnitudes of values[offset], all of which are finite.
  static Levels of(const float* values, const std::vector<uint32_t>& offsets, float smallest, float largest) {
    const auto mean_from = [&](float least) {
      double sum = 0;
      size_t count = 0;
      for (uint32_t offset : offsets) {
        const float size = std::fabs(values[offset]);
        if (size >= least) sum += static_cast<double>(size), ++count;
      }
      return static_cast<float>(sum / static_cast<double>(count));
    };
    Levels made;
    made.high = rounded(std::max(mean_from(mean_from(0)), largest * 0x1p-15f));
    made.low = rounded(smallest < bfloat16_to_float(made.high) * 0x1p-15f ? 0 : smallest);
    return made;
  }
  float unit() const { return bfloat16_to_float(low); }
  float value(uint32_t m) const { return bfloat16_to_float(m > 0 ? high : low); }
  uint32_t code(float magnitude, uint32_t) const { return magnitude >= value(0) / 2 + value(1) / 2 ? 1 : 0; }
};

static_assert(sizeof(Grid) == 4 && sizeof(Levels) == 4, "a payload begins with one of them, as it lies in memory");

// Codes of `bits` each, at most 8; behind the last of them is another byte of the payload.
void write_code(uint8_t* codes, size_t index, size_t bits, uint32_t code) {
  uint8_t* const two = codes + index * bits / 8;
  const uint32_t shifted = code << index * bits % 8;
  two[0] = static_cast<uint8_t>(two[0] | shifted);
  two[1] = static_cast<uint8_t>(two[1] | shifted >> 8);
}
uint32_t code_at(const uint8_t* codes, size_t index, size_t bits) {
  const uint8_t* const two = codes + index * bits / 8;
  return (two[0] | static_cast<uint32_t>(two[1]) << 8) >> index * bits % 8 & ((1u << bits) - 1);
}

void write_offsets(const Layout& at, const std::vector<uint32_t>& offsets, uint8_t* payload) {
  for (size_t i = 0; i < at.k; ++i) {
    payload[at.lows + i] = static_cast<uint8_t>(offsets[i] % kBlock);
    set_bit(payload + at.highs, i + offsets[i] / kBlock);  // behind a bit for each element and each block before it
  }
}

// visit(which of those sent, offset) for each, in the order of offsets. Of a payload of any content: of no more than k,
// and the blocks are those that the bits say. Returns whether there are as many of both as there must be.
template <typename Visit>
bool each_offset(const Layout& at, const uint8_t* payload, Visit visit) {
  size_t which = 0, block = 0;
  for (size_t bit = 0; bit < at.high_bits; ++bit) {
    if (!has_bit(payload + at.highs, bit))
      ++block;
    else if (which == at.k)
      return false;
    else
      visit(which, block * kBlock + payload[at.lows + which]), ++which;
  }
  return which == at.k;
}

// Writes the codes, and leaves what they do not say.
template <typename Scale>
void encode_values(const Layout& at, const Scale& scale, const std::vector<uint32_t>& offsets, float* residual,
                   uint8_t* payload) {
  std::memcpy(payload, &scale, sizeof scale);
  for (size_t i = 0; i < at.k; ++i) {
    float& left = residual[offsets[i]];
    const uint32_t m = scale.code(std::fabs(left), at.most());
    const bool is_minus = std::signbit(left);
    write_code(payload + at.codes, i, at.value_bits, m | static_cast<uint32_t>(is_minus) << (at.value_bits - 1));
    left -= is_minus ? -scale.value(m) : scale.value(m);
  }
}

void encode_largest(const Layout& at, const float* gradient, float* residual, uint8_t* payload) {
  std::fill_n(payload, at.bytes, static_cast<uint8_t>(0));
  if (at.n == 0) return;
  if (!adds_up(gradient, residual, at.n)) {
    const Grid none{float_to_bfloat16(kNaN), 0};
    std::memcpy(payload, &none, sizeof none);
    std::vector<uint32_t> first(at.k);
    for (size_t i = 0; i < at.k; ++i) first[i] = static_cast<uint32_t>(i);
    return write_offsets(at, first, payload);
  }
  loop(at.n, [=](size_t i) { residual[i] += gradient[i]; });
  const std::vector<uint32_t> offsets = offsets_of_largest(residual, at.n, at.k);
  float smallest = std::fabs(residual[offsets[0]]), largest = smallest;
  for (uint32_t offset : offsets) {
    smallest = std::min(smallest, std::fabs(residual[offset]));
    largest = std::max(largest, std::fabs(residual[offset]));
  }
  write_offsets(at, offsets, payload);
  if (at.has_levels())
    encode_values(at, Levels::of(residual, offsets, smallest, largest), offsets, residual, payload);
  else
    encode_values(at, Grid::of(smallest, largest, at.most()), offsets, residual, payload);
}

// accumulator += the decoded payload.
template <typename Scale>
void add_values(const Layout& at, float* accumulator, const uint8_t* payload) {
  Scale scale;
  std::memcpy(&scale, payload, sizeof scale);
  if (std::isnan(scale.unit())) {
    std::fill_n(accumulator, at.n, kNaN);
    return;
  }
  each_offset(at, payload, [&](size_t i, size_t offset) {
    const uint32_t code = code_at(payload + at.codes, i, at.value_bits);
    const float value = scale.value(code & at.most());
    accumulator[offset] += code > at.most() ? -value : value;
  });
}

void add_largest(const Layout& at, float* accumulator, const uint8_t* payload) {
  if (at.n == 0) return;
  if (at.has_levels())
    add_values<Levels>(at, accumulator, payload);
  else
    add_values<Grid>(at, accumulator, payload);
}

class Largest final : public Codec {
 public:
  Largest()
      : Codec(Encoding::kLargest, "topk",
              "sent, rounded, when it is one of the largest of its slice; the rest is added to the next gradient",
              {{"ratio", 0.01, 0, 1, true, "a number above 0 and at most 1"},
               {"value_bits", 8, 2, 8, false, "a whole number from 2 to 8", Option::Kind::kWhole}}) {}

  bool is_for(DType type, bool is_vector) const override { return type == DType::kFloat32 && !is_vector; }
  size_t residuals() const override { return 1; }
  size_t run() const override { return 16; }
  size_t bytes(const Options& with, size_t n) const override { return Layout(with, n).bytes; }
  const char* problem_with(const Options& with, const void* payload, size_t, size_t n) const override {
    const Layout at(with, n);
    size_t next = 0;
    bool ascends = true;
    const bool is_whole = each_offset(at, static_cast<const uint8_t*>(payload), [&](size_t, size_t offset) {
      ascends &= offset >= next && offset < n;
      next = offset + 1;
    });
    return is_whole && ascends ? nullptr : "of elements that do not ascend within its slice";
  }
  void encode(const Options& with, const float* gradient, float* residual, void* payload, size_t n) const override {
    encode_largest(Layout(with, n), gradient, residual, static_cast<uint8_t*>(payload));
  }
  void start_sum(const Options& with, float* accumulator, const void* payload, size_t n) const override {
    std::fill_n(accumulator, n, 0.0f);
    add_largest(Layout(with, n), accumulator, static_cast<const uint8_t*>(payload));
  }
  void add_to_sum(const Options& with, float* accumulator, const void* payload, size_t n) const override {
    add_largest(Layout(with, n), accumulator, static_cast<const uint8_t*>(payload));
  }
};

}  // namespace

const Codec& largest() {
  static const Largest codec;
  return codec;
}

}  // namespace p3
