// Compressed payloads of any content: decoding stays within both arrays, and gives what encoding meant.
#include <cmath>

#include "codec/dgc.h"
#include "input.h"
#include "p3/codec.h"
#include "wire/top_k.h"

namespace {

using namespace p3;

// What has come is refused, or decoded within its slice; what leaves is sound, and it and what is kept are all of v.
int steps(Input& input, const Compression& compression, size_t elements) {
  const std::vector<char> payload = input.bytes(input.below(100));
  std::vector<float> sum(elements);
  if (can_have_bytes(Encoding::kTopK, DType::kFloat32, elements, payload.size()) &&
      problem_with_encoded(Encoding::kTopK, payload.data(), payload.size(), elements) == nullptr) {
    start_encoded_sum(compression, sum.data(), payload.data(), elements);
    add_encoded_to_sum(compression, sum.data(), payload.data(), elements);
    subtract_top_k(sum.data(), payload.data(), elements);
  }

  std::vector<float> gradient(elements), u(elements), v(elements), decoded(elements);
  input.take(gradient.data(), elements * sizeof(float));
  const Dgc options{(1 + input.below(200)) / 200.0, 0, input.below(2) == 1};
  const DgcStep step{0.5f, 1, options.masking, elements_to_send(options, 1, elements)};
  const bool is_plain = step.sent == elements;
  std::vector<char> encoded(is_plain ? elements * sizeof(float) : top_k_bytes(step.sent, elements));
  encode_step(step, gradient.data(), u.data(), v.data(), encoded.data(), elements);
  if (is_plain) return 0;
  require(can_have_bytes(Encoding::kTopK, DType::kFloat32, elements, encoded.size()));
  require(problem_with_encoded(Encoding::kTopK, encoded.data(), encoded.size(), elements) == nullptr);
  start_encoded_sum(compression, decoded.data(), encoded.data(), elements);
  bool overflows = false;
  for (float value : gradient) overflows |= !std::isfinite(value);
  for (size_t i = 0; i < elements; ++i) {
    if (overflows)
      require(u[i] == 0 && v[i] == 0 && std::isnan(decoded[i]) == (i < step.sent));
    else
      require(decoded[i] + v[i] == gradient[i]);
  }
  return 0;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace p3;
  Input input(data, size);
  const Codec& codec = *codecs()[input.below(static_cast<uint32_t>(codecs().size()))];
  Compression compression(codec.encoding);
  const float threshold = 0.25f * static_cast<float>(1 + input.below(8));
  if (compression.encoding == Encoding::kTwoBit) compression.options[0] = threshold;
  if (compression.encoding == Encoding::kLargest)
    compression.options = {(1 + input.below(100)) / 100.0, 4.0 + input.below(5)};
  const size_t elements = input.below(200);
  if (codec.makes_steps()) return steps(input, compression, elements);
  const size_t bytes = encoded_bytes(compression, DType::kFloat32, elements);

  const std::vector<char> payload = input.bytes(bytes);
  const auto is_sound = [&](const char* content) {
    return problem_with_encoded(compression, content, bytes, elements) == nullptr;
  };
  if (is_sound(payload.data())) {
    std::vector<float> sum(elements);
    start_encoded_sum(compression, sum.data(), payload.data(), elements);
    if (compression.encoding == Encoding::kTwoBit)
      for (float value : sum) require(value == 0 || std::fabs(value) == threshold || std::isnan(value));
    add_encoded_to_sum(compression, sum.data(), payload.data(), elements);
  }

  std::vector<float> gradient(elements), residual(elements), decoded(elements);
  input.take(gradient.data(), elements * sizeof(float));
  std::vector<char> encoded(bytes);
  encode(compression, gradient.data(), residual.data(), encoded.data(), elements);
  require(is_sound(encoded.data()));
  start_encoded_sum(compression, decoded.data(), encoded.data(), elements);
  if (codec.residuals() == 0) return 0;
  // Whatever comes, what is left out is finite; and it and what was sent are the gradient, or NaN was sent.
  const bool is_exact = compression.encoding == Encoding::kEightBit || compression.encoding == Encoding::kFourBit ||
                        compression.encoding == Encoding::kLargest;
  bool overflows = false;
  for (float value : gradient) overflows |= !std::isfinite(value);
  for (size_t i = 0; i < elements; ++i) {
    require(std::isfinite(residual[i]));
    if (is_exact && !overflows) require(double{decoded[i]} + residual[i] == gradient[i]);
    require(std::isnan(decoded[i]) == overflows);
    if (overflows) require(residual[i] == 0);
    if (overflows || std::fabs(gradient[i]) > 1e3f) continue;
    if (compression.encoding == Encoding::kTwoBit)
      require(decoded[i] + residual[i] == gradient[i]);
    else if (std::fabs(decoded[i]) <= 1e30f)
      require(std::fabs(decoded[i] + residual[i] - gradient[i]) <=
              1e-6f * (std::fabs(decoded[i]) + std::fabs(gradient[i])) + 1e-40f);
  }
  return 0;
}
