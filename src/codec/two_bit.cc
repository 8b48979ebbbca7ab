// -threshold, 0 or +threshold; what that leaves out is kept and added to the next gradient (error feedback). A sixteenth of
// the bytes. The codes and their order are MXNet's: 16 elements in 4 bytes, the first in the highest bits of the first
// byte; 11 is +threshold, 10 is -threshold, 01 is NaN, 00 is 0.
// Source: MXNet's documentation of gradient compression; Seide et al., Interspeech 2014.
#include <algorithm>
#include <cstdint>

#include "base/simd.h"
#include "codec/overflow.h"
#include "p3/codec.h"

namespace p3 {
namespace {

constexpr size_t kElementsPerWord = 16;
constexpr size_t kWordBytes = 4;
constexpr size_t kElementsPerByte = kElementsPerWord / kWordBytes;
constexpr size_t kBlock = 1024;  // whole words; stays in the first-level cache

constexpr int32_t kPlus = 3, kMinus = 2, kNoNumber = 1;
constexpr uint8_t kFourOfNoNumber = kNoNumber << 6 | kNoNumber << 4 | kNoNumber << 2 | kNoNumber;

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

class TwoBit final : public Codec {
 public:
  TwoBit()
      : Codec(Encoding::kTwoBit, "2bit", "-threshold, 0 or +threshold; the difference is added to the next gradient",
              {{"threshold", 0.5, 0x1p-126, 0x1p127, false, "a plain number from 2**-126 to 2**127",
                Option::Kind::kNumber, true}}) {}

  size_t residuals() const override { return 1; }
  size_t run() const override { return kElementsPerWord; }
  size_t bytes(const Options&, size_t n) const override {
    return (n + kElementsPerWord - 1) / kElementsPerWord * kWordBytes;
  }
  void encode(const Options& with, const float* gradient, float* residual, void* payload, size_t n) const override {
    encode_two_bit(threshold(with), gradient, residual, static_cast<uint8_t*>(payload), n);
  }
  void start_sum(const Options& with, float* accumulator, const void* payload, size_t n) const override {
    decode_two_bit(threshold(with), static_cast<const uint8_t*>(payload), n,
                   [=](size_t i, float value) { accumulator[i] = value; });
  }
  void add_to_sum(const Options& with, float* accumulator, const void* payload, size_t n) const override {
    decode_two_bit(threshold(with), static_cast<const uint8_t*>(payload), n,
                   [=](size_t i, float value) { accumulator[i] += value; });
  }

 private:
  static float threshold(const Options& with) { return static_cast<float>(with[0]); }
};

}  // namespace

const Codec& two_bit() {
  static const TwoBit codec;
  return codec;
}

}  // namespace p3
