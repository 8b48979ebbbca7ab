// Deep gradient compression (codec/dgc.h, which encodes it): each worker applies the momentum itself, and sends the few
// elements that have grown largest; what comes back is their sum, which it subtracts from the value. Servers with SGD
// only. Keys of one dimension stay plain. Lin et al., ICLR 2018.
#include "wire/top_k.h"

#include <algorithm>
#include <cstdint>

#include "codec/dgc.h"
#include "p3/codec.h"
#include "p3/error.h"

namespace p3 {
namespace {

class TopK final : public Codec {
 public:
  TopK()
      : Codec(Encoding::kTopK, "dgc",
              "sent when it has grown to one of the largest of its slice; the steps are not those of SGD",
              {{"ratio", 0.001, 0, 1, true, "a number above 0 and at most 1"},
               {"warmup_steps", 0, 0, 1e12, false, "a whole number of at least 0", Option::Kind::kWhole},
               {"clip_norm", 0, 0, 1e300, false, "a finite number of at least 0 (0: no clipping)"},
               {"masking", 1, 0, 1, false, "True or False", Option::Kind::kTruth}}) {}

  bool is_for(DType type, bool is_vector) const override { return type == DType::kFloat32 && !is_vector; }
  size_t residuals() const override { return 2; }
  bool makes_steps() const override { return true; }
  size_t run() const override { return 16; }
  size_t bytes(const Options&, size_t) const override { return 0; }
  bool can_have_bytes(const Options&, size_t elements, size_t payload_bytes) const override {
    return can_be_top_k(payload_bytes, elements);
  }
  size_t sent(const Options& with, uint64_t round, size_t n) const override {
    return elements_to_send(dgc_of({Encoding::kTopK, with}), round, n);
  }
  size_t bytes_with(const Options&, size_t count, size_t n) const override {
    return is_worth_top_k(count, n) ? top_k_bytes(count, n) : n * sizeof(float);
  }
  const char* problem_with(const Options&, const void* payload, size_t payload_bytes, size_t elements) const override {
    return problem_with_top_k(payload, payload_bytes, elements);
  }
  void encode(const Options&, const float*, float*, void*, size_t) const override {
    throw Error(ErrorKind::kUsage, "deep gradient compression encodes steps: encode_step()");
  }
  void start_sum(const Options& with, float* accumulator, const void* payload, size_t n) const override {
    std::fill_n(accumulator, n, 0.0f);
    add_to_sum(with, accumulator, payload, n);
  }
  void add_to_sum(const Options&, float* accumulator, const void* payload, size_t n) const override {
    each_of_top_k(payload, n, [=](size_t offset, float value) { accumulator[offset] += value; });
  }
};

}  // namespace

const Codec& top_k() {
  static const TopK codec;
  return codec;
}

Dgc dgc_of(const Compression& compression) {
  const Codec::Options& options = compression.options;
  return {options[0], static_cast<uint64_t>(options[1]), options[3] != 0};
}

}  // namespace p3
