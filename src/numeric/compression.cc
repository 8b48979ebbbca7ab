#include "p3/compression.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>

#include "base/simd.h"
#include "numeric/finite.h"
#include "numeric/sum.h"
#include "p3/error.h"
#include "wire/top_k.h"

namespace p3 {
namespace {

constexpr size_t kElementsPerWord = 16;
constexpr size_t kWordBytes = 4;
constexpr size_t kElementsPerByte = kElementsPerWord / kWordBytes;
constexpr size_t kBlock = 1024;  // whole words; stays in the first-level cache

constexpr int32_t kPlus = 3, kMinus = 2, kNoNumber = 1;
constexpr uint8_t kFourOfNoNumber = kNoNumber << 6 | kNoNumber << 4 | kNoNumber << 2 | kNoNumber;
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

// Whether what is left out and the gradient add up to a finite number everywhere.
bool adds_up(const float* gradient, const float* residual, size_t n) {
  return are_finite(n, [=](size_t i) { return residual[i] + gradient[i]; });
}

// A slice of NaN, padded with zeros.
void encode_two_bit_nan(uint8_t* payload, size_t n) {
  const size_t whole = n / kElementsPerByte, bytes = (n + kElementsPerWord - 1) / kElementsPerWord * kWordBytes;
  std::fill_n(payload, whole, kFourOfNoNumber);
  std::fill(payload + whole, payload + bytes, static_cast<uint8_t>(0));
  for (size_t i = whole * kElementsPerByte; i < n; ++i)
    payload[whole] = static_cast<uint8_t>(payload[whole] | kNoNumber << (6 - 2 * (i % kElementsPerByte)));
}

void encode_two_bit(float threshold, const float* gradient, float* residual, uint8_t* payload, size_t n) {
  if (!adds_up(gradient, residual, n)) return encode_two_bit_nan(payload, n);
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

float decoded(int32_t code, float threshold) {
  return code == kPlus ? threshold : code == kMinus ? -threshold : code == kNoNumber ? kNaN : 0.0f;
}

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

constexpr size_t kBitsPerByte = 8;
constexpr size_t kParts = 8;  // of a sum

struct Means {
  float plus = 0, minus = 0;  // of the elements at or above zero, and of the others; as they are sent
};

Means means_of(const float* values, size_t n) {
  double plus[kParts] = {}, minus[kParts] = {};
  size_t count = 0;
  for (size_t begin = 0; begin < n; begin += kParts) {
    const size_t parts = std::min(kParts, n - begin);
    for (size_t i = 0; i < parts; ++i) {
      const double value = values[begin + i];
      const bool is_plus = value >= 0;
      plus[i] += is_plus ? value : 0.0;
      minus[i] += is_plus ? 0.0 : value;
      count += is_plus;
    }
  }
  for (size_t i = 1; i < kParts; ++i) {
    plus[0] += plus[i];
    minus[0] += minus[i];
  }
  Means means;
  if (count > 0) means.plus = static_cast<float>(plus[0] / static_cast<double>(count));
  if (count < n) means.minus = static_cast<float>(minus[0] / static_cast<double>(n - count));
  return means;
}

void encode_one_bit(const float* gradient, float* residual, uint8_t* payload, size_t n) {
  if (n == 0) return;
  if (!adds_up(gradient, residual, n)) {
    const Means none{kNaN, kNaN};
    std::memcpy(payload, &none, sizeof none);
    std::fill_n(payload + sizeof none, (n + kBitsPerByte - 1) / kBitsPerByte, static_cast<uint8_t>(0));
    return;
  }
  loop(n, [=](size_t i) { residual[i] += gradient[i]; });
  const Means means = means_of(residual, n);
  std::memcpy(payload, &means, sizeof means);
  int32_t bits[kBlock];
  for (size_t begin = 0; begin < n; begin += kBlock) {
    const size_t count = std::min(kBlock, n - begin);
    const size_t bytes = (count + kBitsPerByte - 1) / kBitsPerByte;
    std::fill(bits + count, bits + bytes * kBitsPerByte, 0);
    float* left = residual + begin;
    int32_t* out = bits;
    loop(count, [=](size_t i) {
      const bool is_plus = left[i] >= 0;
      left[i] -= is_plus ? means.plus : means.minus;
      out[i] = is_plus;
    });
    uint8_t* packed = payload + sizeof means + begin / kBitsPerByte;
    for (size_t i = 0; i < bytes; ++i) {
      int32_t byte = 0;
      for (size_t j = 0; j < kBitsPerByte; ++j) byte = byte << 1 | bits[i * kBitsPerByte + j];
      packed[i] = static_cast<uint8_t>(byte);
    }
  }
}

template <typename Put>
void decode_one_bit(const uint8_t* payload, size_t n, Put put) {
  if (n == 0) return;
  Means means;
  std::memcpy(&means, payload, sizeof means);
  const uint8_t* const bits = payload + sizeof means;
  for (size_t i = 0; i < n; ++i)
    put(i, bits[i / kBitsPerByte] >> (kBitsPerByte - 1 - i % kBitsPerByte) & 1 ? means.plus : means.minus);
}

// accumulator += the elements that are there.
void add_top_k(float* accumulator, const void* payload, size_t n) {
  each_of_top_k(payload, n, [=](size_t offset, float value) { accumulator[offset] += value; });
}

template <typename Put>
void decode_bits(const Compression& compression, const void* payload, size_t n, Put put) {
  const auto* bytes = static_cast<const uint8_t*>(payload);
  if (compression.encoding == Encoding::kOneBit) return decode_one_bit(bytes, n, put);
  decode_two_bit(compression.threshold, bytes, n, put);
}

}  // namespace

void check(const Compression& compression) {
  if (compression.encoding == Encoding::kTwoBit && !(compression.threshold > 0 && std::isfinite(compression.threshold)))
    throw Error(ErrorKind::kUsage, "compression: threshold is " + std::to_string(compression.threshold) +
                                       "; it must be finite and above 0");
  if (compression.encoding == Encoding::kTopK && !(compression.dgc.ratio > 0 && compression.dgc.ratio <= 1))
    throw Error(ErrorKind::kUsage, "compression: ratio is " + std::to_string(compression.dgc.ratio) +
                                       "; it must be above 0, and at most 1");
}

size_t encoded_bytes(Encoding encoding, DType type, size_t elements) {
  switch (encoding) {
    case Encoding::kPlain:
      return elements * size_of(type);
    case Encoding::kFloat16:
      return elements * size_of(DType::kFloat16);
    case Encoding::kTwoBit:
      return (elements + kElementsPerWord - 1) / kElementsPerWord * kWordBytes;
    case Encoding::kOneBit:
      return elements == 0 ? 0 : sizeof(Means) + (elements + kBitsPerByte - 1) / kBitsPerByte;
    case Encoding::kTopK:
    case Encoding::kAbsent:
      break;
  }
  return 0;
}

bool can_have_bytes(Encoding encoding, DType type, size_t elements, size_t bytes) {
  return encoding == Encoding::kTopK ? can_be_top_k(bytes, elements) : encoded_bytes(encoding, type, elements) == bytes;
}

const char* problem_with_encoded(Encoding encoding, const void* payload, size_t bytes, size_t elements) {
  return encoding == Encoding::kTopK ? problem_with_top_k(payload, bytes, elements) : nullptr;
}

void encode(const Compression& compression, const float* gradient, float* residual, void* payload, size_t elements) {
  if (compression.encoding == Encoding::kFloat16)
    finish_sum(DType::kFloat16, payload, gradient, elements);
  else if (compression.encoding == Encoding::kOneBit)
    encode_one_bit(gradient, residual, static_cast<uint8_t*>(payload), elements);
  else
    encode_two_bit(compression.threshold, gradient, residual, static_cast<uint8_t*>(payload), elements);
}

void start_encoded_sum(const Compression& compression, float* accumulator, const void* payload, size_t elements) {
  if (compression.encoding == Encoding::kFloat16) return start_sum(DType::kFloat16, accumulator, payload, elements);
  if (compression.encoding == Encoding::kTopK) {
    std::fill_n(accumulator, elements, 0.0f);
    return add_top_k(accumulator, payload, elements);
  }
  decode_bits(compression, payload, elements, [=](size_t i, float value) { accumulator[i] = value; });
}

void add_encoded_to_sum(const Compression& compression, float* accumulator, const void* payload, size_t elements) {
  if (compression.encoding == Encoding::kFloat16) return add_to_sum(DType::kFloat16, accumulator, payload, elements);
  if (compression.encoding == Encoding::kTopK) return add_top_k(accumulator, payload, elements);
  decode_bits(compression, payload, elements, [=](size_t i, float value) { accumulator[i] += value; });
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
