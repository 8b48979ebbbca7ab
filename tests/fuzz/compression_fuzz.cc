// Compressed payloads of any content: decoding stays within both arrays, and gives what encoding meant.
#include <cmath>

#include "base/half.h"
#include "input.h"
#include "p3/compression.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace p3;
  Input input(data, size);
  Compression compression;
  constexpr Encoding kEncodings[] = {Encoding::kFloat16, Encoding::kTwoBit, Encoding::kOneBit};
  compression.encoding = kEncodings[input.below(3)];
  compression.threshold = 0.25f * static_cast<float>(1 + input.below(8));
  const size_t elements = input.below(200);
  const size_t bytes = encoded_bytes(compression.encoding, DType::kFloat32, elements);

  const std::vector<char> payload = input.bytes(bytes);
  std::vector<float> sum(elements);
  start_encoded_sum(compression, sum.data(), payload.data(), elements);
  if (compression.encoding == Encoding::kTwoBit)
    for (float value : sum) require(value == 0 || std::fabs(value) == compression.threshold);
  add_encoded_to_sum(compression, sum.data(), payload.data(), elements);

  // As a worker receives a sum of float16: in the second half of the place of its float32.
  std::vector<float> landing(elements);
  input.take(reinterpret_cast<char*>(landing.data()) + elements * sizeof(half), elements * sizeof(half));
  widen_in_place(landing.data(), elements);

  std::vector<float> gradient(elements), residual(elements), decoded(elements);
  input.take(gradient.data(), elements * sizeof(float));
  std::vector<char> encoded(bytes);
  encode(compression, gradient.data(), residual.data(), encoded.data(), elements);
  start_encoded_sum(compression, decoded.data(), encoded.data(), elements);
  for (size_t i = 0; i < elements && compression.encoding == Encoding::kTwoBit; ++i)
    if (std::isfinite(gradient[i])) require(decoded[i] + residual[i] == gradient[i] || std::fabs(gradient[i]) > 1e3);
  for (size_t i = 0; i < elements && compression.encoding == Encoding::kOneBit; ++i)
    if (std::isfinite(decoded[i]) && std::fabs(gradient[i]) <= 1e30f)
      require(std::fabs(decoded[i] + residual[i] - gradient[i]) <=
              1e-6f * (std::fabs(decoded[i]) + std::fabs(gradient[i])) + 1e-40f);
  return 0;
}
