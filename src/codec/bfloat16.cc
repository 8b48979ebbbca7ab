// Rounded to nearest even, and nothing is kept of the difference. The range is float32's.
#include <cstring>

#include "base/half.h"
#include "base/simd.h"
#include "p3/codec.h"

namespace p3 {
namespace {

class BrainFloat final : public Codec {
 public:
  BrainFloat() : Codec(Encoding::kBfloat16, "bf16", "rounded to bfloat16, whose range is float32's") {}

  bool carries_sums() const override { return true; }
  size_t bytes(const Options&, size_t n) const override { return n * sizeof(bfloat16); }
  void encode(const Options&, const float* gradient, float*, void* payload, size_t n) const override {
    auto* const to = static_cast<char*>(payload);  // of any alignment
    loop(n, [=](size_t i) {
      const bfloat16 rounded = float_to_bfloat16(gradient[i]);
      std::memcpy(to + i * sizeof rounded, &rounded, sizeof rounded);
    });
  }
  void start_sum(const Options&, float* accumulator, const void* payload, size_t n) const override {
    const auto* const from = static_cast<const char*>(payload);
    loop(n, [=](size_t i) { accumulator[i] = element_at(from, i); });
  }
  void add_to_sum(const Options&, float* accumulator, const void* payload, size_t n) const override {
    const auto* const from = static_cast<const char*>(payload);
    loop(n, [=](size_t i) { accumulator[i] += element_at(from, i); });
  }

 private:
  static float element_at(const char* from, size_t i) {
    bfloat16 element;
    std::memcpy(&element, from + i * sizeof element, sizeof element);
    return bfloat16_to_float(element);
  }
};

}  // namespace

const Codec& brain_float() {
  static const BrainFloat codec;
  return codec;
}

}  // namespace p3
