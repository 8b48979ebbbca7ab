#include "codec/dgc.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "base/simd.h"
#include "codec/selection.h"
#include "numeric/finite.h"
#include "p3/error.h"
#include "wire/top_k.h"

namespace p3 {
namespace {

constexpr uint64_t kWarmUpStages = 4;
constexpr size_t kParts = 8;  // of a sum
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

}  // namespace

// --- a worker ------------------------------------------------------------------------------------------------------

double ratio_at(const Dgc& options, uint64_t round) {
  if (round == 0 || round > options.warmup_rounds) return options.ratio;
  const uint64_t stage = (round - 1) * kWarmUpStages / options.warmup_rounds;
  return std::max(options.ratio, std::ldexp(0.25, -2 * static_cast<int>(stage)));
}

size_t elements_to_send(const Dgc& options, uint64_t round, size_t elements) {
  const double share = std::ceil(ratio_at(options, round) * static_cast<double>(elements));
  const size_t count = std::max<size_t>(1, static_cast<size_t>(share));
  return is_worth_top_k(count, elements) ? count : elements;
}

namespace {

// A step that says that the gradient has overflowed: NaN for the first elements.
void encode_nan(size_t count, void* payload, size_t elements) {
  if (count == elements) {
    std::fill_n(static_cast<float*>(payload), elements, kNaN);
    return;
  }
  TopKWriter writer(payload, count, elements);
  for (size_t i = 0; i < count; ++i) writer.add(i, kNaN);
}

}  // namespace

void encode_step(const DgcStep& step, const float* gradient, float* u, float* v, void* payload, size_t elements) {
  const float momentum = step.momentum, rate = step.rate;
  if (!are_finite(elements, [=](size_t i) { return v[i] + (momentum * u[i] + rate * gradient[i]); }))
    return encode_nan(step.sent, payload, elements);
  loop(elements, [=](size_t i) {
    u[i] = momentum * u[i] + rate * gradient[i];
    v[i] += u[i];
  });
  if (step.sent == elements) {
    if (elements == 0) return;
    std::memcpy(payload, v, elements * sizeof(float));
    std::fill_n(v, elements, 0.0f);
    if (step.masks) std::fill_n(u, elements, 0.0f);
    return;
  }
  TopKWriter writer(payload, step.sent, elements);
  for (const uint32_t i : offsets_of_largest(v, elements, step.sent)) {
    writer.add(i, v[i]);
    v[i] = 0;
    if (step.masks) u[i] = 0;
  }
}

float rate_of(const RoundScalars& round) { return static_cast<float>(round.lr) * static_cast<float>(round.rescale); }

float clipping_of(const float* gradient, uint64_t elements, double rescale, double bound) {
  double parts[kParts] = {};
  for (uint64_t begin = 0; begin < elements; begin += kParts) {
    const size_t count = static_cast<size_t>(std::min<uint64_t>(kParts, elements - begin));
    for (size_t i = 0; i < count; ++i) {
      const double value = gradient[begin + i];
      parts[i] += value * value;
    }
  }
  for (size_t i = 1; i < kParts; ++i) parts[0] += parts[i];
  const double norm = std::fabs(rescale) * std::sqrt(parts[0]);
  return norm > bound ? static_cast<float>(bound / norm) : 1.0f;
}

namespace {
constexpr uint64_t kRadix = 1 << 24;  // whole numbers below it are exact as floats
}

void write_round(uint64_t round, float* two) {
  const uint64_t low = round % kRadix, high = round / kRadix;
  two[0] = static_cast<float>(low);
  two[1] = static_cast<float>(high);
}

uint64_t read_round(const float* two) {
  for (size_t i = 0; i < kRoundFloats; ++i)
    if (!(two[i] >= 0 && two[i] < static_cast<float>(kRadix)))
      throw Error(ErrorKind::kUsage, "what was kept of a key names no round");
  return static_cast<uint64_t>(two[1]) * kRadix + static_cast<uint64_t>(two[0]);
}

// --- servers and workers -------------------------------------------------------------------------------------------

float decay_of(const RoundScalars& round) { return static_cast<float>(round.lr) * static_cast<float>(round.wd); }

void decay_weight(float decay, float* weight, size_t elements) {
  if (decay == 0) return;
  loop(elements, [=](size_t i) { weight[i] -= decay * weight[i]; });
}

void subtract_top_k(float* weight, const void* payload, size_t elements) {
  each_of_top_k(payload, elements, [=](size_t offset, float value) { weight[offset] -= value; });
}

// --- a server ------------------------------------------------------------------------------------------------------

size_t count_nonzero(const float* sum, size_t elements) {
  size_t count = 0;
  for (size_t i = 0; i < elements; ++i) count += sum[i] != 0;
  return count;
}

void encode_nonzero(const float* sum, size_t count, void* payload, size_t elements) {
  TopKWriter writer(payload, count, elements);
  for (size_t i = 0; i < elements; ++i)
    if (sum[i] != 0) writer.add(i, sum[i]);
}

void subtract_nonzero(float* weight, const float* sum, size_t elements) {
  loop(elements, [=](size_t i) { weight[i] = sum[i] != 0 ? weight[i] - sum[i] : weight[i]; });
}

}  // namespace p3
