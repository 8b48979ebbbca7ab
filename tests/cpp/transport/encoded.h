// Values as a node encodes them that has left nothing out yet, and what they stand for.
#pragma once

#include <vector>

#include "p3/codec.h"

namespace p3 {

inline std::vector<char> encoded(const Compression& how, const std::vector<float>& values) {
  std::vector<char> payload(encoded_bytes(how, DType::kFloat32, values.size()));
  std::vector<float> residual(values.size() * how.residuals());
  encode(how, values.data(), residual.data(), payload.data(), values.size());
  return payload;
}

inline std::vector<float> decoded(const Compression& how, const std::vector<char>& payload, size_t elements) {
  std::vector<float> values(elements);
  start_encoded_sum(how, values.data(), payload.data(), elements);
  return values;
}

}  // namespace p3
