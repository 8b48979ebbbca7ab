#include "p3/compression.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <string>

#include "base/simd.h"
#include "numeric/sum.h"
#include "p3/error.h"

namespace p3 {
namespace {

constexpr size_t kElementsPerWord = 16;
constexpr size_t kWordBytes = 4;
constexpr size_t kElementsPerByte = kElementsPerWord / kWordBytes;
constexpr size_t kBlock = 1024;  // whole words; stays in the first-level cache

constexpr int32_t kPlus = 3, kMinus = 2;

void encode_two_bit(float threshold, const float* gradient, float* residual, uint8_t* payload, size_t n) {
  int32_t codes[kBlock];  // as wide as the elements: so the loop is vectorised, which must have no branch either
  for (size_t begin = 0; begin < n; begin += kBlock) {
    const size_t count = std::min(kBlock, n - begin);
    const size_t words = (count + kElementsPerWord - 1) / kElementsPerWord;
    std::fill(codes + count, codes + words * kElementsPerWord, 0);
    const float* in = gradient + begin;
    float* left = residual + begin;
    int32_t* out = codes;
    loop(count, [=](size_t i) {
      const float value = left[i] + in[i];
      const int32_t plus = value >= threshold, minus = value <= -threshold;
      left[i] = value - static_cast<float>(plus - minus) * threshold;
      out[i] = plus * kPlus + minus * kMinus;
    });
    uint8_t* packed = payload + begin / kElementsPerByte;
    for (size_t i = 0; i < words * kWordBytes; ++i) {
      const int32_t* four = codes + i * kElementsPerByte;
      packed[i] = static_cast<uint8_t>(four[0] << 6 | four[1] << 4 | four[2] << 2 | four[3]);
    }
  }
}

float decoded(int32_t code, float threshold) { return code == kPlus ? threshold : code == kMinus ? -threshold : 0.0f; }

// What each byte stands for. 4 KiB, made for each slice in about the time of its first 256 bytes.
class TwoBitTable {
 public:
  explicit TwoBitTable(float threshold) {
    for (unsigned byte = 0; byte < 256; ++byte)
      for (unsigned i = 0; i < kElementsPerByte; ++i) values_[byte][i] = decoded(byte >> (6 - 2 * i) & 3, threshold);
  }
  const float* operator[](uint8_t byte) const { return values_[byte]; }

 private:
  float values_[256][kElementsPerByte];
};

// put(element, value) for each.
template <typename Put>
void decode_two_bit(float threshold, const uint8_t* payload, size_t n, Put put) {
  const TwoBitTable table(threshold);
  for (size_t i = 0; i < n; i += kElementsPerByte) {
    const float* four = table[payload[i / kElementsPerByte]];
    const size_t count = std::min(kElementsPerByte, n - i);
    for (size_t j = 0; j < count; ++j) put(i + j, four[j]);
  }
}

}  // namespace

void check(const Compression& compression) {
  if (compression.encoding == Encoding::kTwoBit && !(compression.threshold > 0 && std::isfinite(compression.threshold)))
    throw Error(ErrorKind::kUsage, "compression: threshold is " + std::to_string(compression.threshold) +
                                       "; it must be finite and above 0");
}

size_t encoded_bytes(Encoding encoding, DType type, size_t elements) {
  switch (encoding) {
    case Encoding::kPlain:
      return elements * size_of(type);
    case Encoding::kFloat16:
      return elements * size_of(DType::kFloat16);
    case Encoding::kTwoBit:
      return (elements + kElementsPerWord - 1) / kElementsPerWord * kWordBytes;
    case Encoding::kAbsent:
      break;
  }
  return 0;
}

void encode(const Compression& compression, const float* gradient, float* residual, void* payload, size_t elements) {
  if (compression.encoding == Encoding::kFloat16)
    finish_sum(DType::kFloat16, payload, gradient, elements);
  else
    encode_two_bit(compression.threshold, gradient, residual, static_cast<uint8_t*>(payload), elements);
}

void start_encoded_sum(const Compression& compression, float* accumulator, const void* payload, size_t elements) {
  if (compression.encoding == Encoding::kFloat16) return start_sum(DType::kFloat16, accumulator, payload, elements);
  decode_two_bit(compression.threshold, static_cast<const uint8_t*>(payload), elements,
                 [=](size_t i, float value) { accumulator[i] = value; });
}

void add_encoded_to_sum(const Compression& compression, float* accumulator, const void* payload, size_t elements) {
  if (compression.encoding == Encoding::kFloat16) return add_to_sum(DType::kFloat16, accumulator, payload, elements);
  decode_two_bit(compression.threshold, static_cast<const uint8_t*>(payload), elements,
                 [=](size_t i, float value) { accumulator[i] += value; });
}

// Front to back in blocks: a block's floats end where its own halves end at the latest, and those have been copied.
void widen_in_place(float* values, size_t elements) {
  uint16_t halves[kBlock];
  const char* source = reinterpret_cast<const char*>(values) + elements * sizeof(uint16_t);
  for (size_t begin = 0; begin < elements; begin += kBlock) {
    const size_t count = std::min(kBlock, elements - begin);
    std::memcpy(halves, source + begin * sizeof(uint16_t), count * sizeof(uint16_t));
    start_sum(DType::kFloat16, values + begin, halves, count);
  }
}

}  // namespace p3
