#include "p3/optimizer.h"

#include <algorithm>
#include <array>

#include "numeric/sum.h"
#include "p3/error.h"

namespace p3 {

void Optimizer::start_state(DType weight_type, const void* weight, void* const* state, size_t elements) const {
  for (size_t s = 0; s < states_.size(); ++s) {
    if (states_[s].is_weight)
      start_sum(weight_type, state[s], weight, elements);
    else if (weight_type == DType::kFloat64)
      std::fill_n(static_cast<double*>(state[s]), elements, states_[s].initial);
    else
      std::fill_n(static_cast<float*>(state[s]), elements, static_cast<float>(states_[s].initial));
  }
}

void Optimizer::update(DType weight_type, void* weight, void* master, void* const* state, const void* gradient,
                       size_t elements, const RoundScalars& round) const {
  if (weight_type == DType::kFloat64) {
    std::array<double*, kMostStates> states{};
    for (size_t s = 0; s < states_.size(); ++s) states[s] = static_cast<double*>(state[place_of(s)]);
    return step(static_cast<double*>(weight), states.data(), static_cast<const double*>(gradient), elements, round);
  }
  if (!is_float(weight_type))
    throw Error(ErrorKind::kUsage, std::string("optimizer: weights of type ") + name_of(weight_type) +
                                       " cannot be updated on the server; use float32, float64, float16 or bfloat16");

  std::array<float*, kMostStates> states{};
  for (size_t s = 0; s < states_.size(); ++s) states[s] = static_cast<float*>(state[place_of(s)]);
  const float* gradients = static_cast<const float*>(gradient);
  if (weight_type == DType::kFloat32)
    return step(static_cast<float*>(weight), states.data(), gradients, elements, round);

  // Half precision in blocks that stay in the first-level cache, so that memory is still passed over once.
  constexpr size_t kBlock = 1024;
  float widened[kBlock];
  for (size_t begin = 0; begin < elements; begin += kBlock) {
    const size_t n = std::min(kBlock, elements - begin);
    void* halves = static_cast<char*>(weight) + begin * size_of(weight_type);
    float* block = master != nullptr ? static_cast<float*>(master) + begin : widened;
    if (master == nullptr) start_sum(weight_type, block, halves, n);
    step(block, states.data(), gradients + begin, n, round);
    finish_sum(weight_type, halves, block, n);
    for (int s = 0; s < state_count(); ++s) states[static_cast<size_t>(s)] += n;
  }
}

}  // namespace p3
