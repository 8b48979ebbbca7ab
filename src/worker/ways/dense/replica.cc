#include "worker/ways/dense/replica.h"

#include <array>
#include <cstring>

#include "numeric/sum.h"
#include "p3/wire.h"

namespace p3 {

Replica::Replica(const LiveOptimizer& optimizer, DType dtype, uint64_t elements, const void* value)
    : optimizer_(optimizer), dtype_(dtype), elements_(elements), value_(elements * size_of(dtype)) {
  const Optimizer& its = optimizer.announced();
  state_.assign(static_cast<size_t>(its.state_count()), std::vector<char>(state_bytes()));
  if (its.needs_master(dtype)) master_.resize(state_bytes());
  if (elements == 0) return;
  std::memcpy(value_.data(), value, value_.size());
  if (!master_.empty()) start_sum(dtype, master_.data(), value, elements);
  std::array<void*, Optimizer::kMostStates> state{};
  for (size_t i = 0; i < state_.size(); ++i) state[i] = state_[i].data();
  its.start_state(dtype, value_.data(), state.data(), elements);
}

const void* Replica::replace(const Slice& slice, const void* value) {
  void* const its = at(value_, dtype_, slice);
  std::memcpy(its, value, slice.elements * size_of(dtype_));
  if (!master_.empty()) start_sum(dtype_, at(master_, sum_type(dtype_), slice), value, slice.elements);
  return its;
}

const void* Replica::update(const Slice& slice, const void* sum, const RoundSettings& settings) {
  const DType sum_dtype = sum_type(dtype_);
  std::array<void*, Optimizer::kMostStates> state{};
  for (size_t i = 0; i < state_.size(); ++i) state[i] = at(state_[i], sum_dtype, slice);
  if (sum_dtype != dtype_) {
    sum_.resize(slice.elements * size_of(sum_dtype));
    start_sum(dtype_, sum_.data(), sum, slice.elements);
    sum = sum_.data();
  }
  void* const value = at(value_, dtype_, slice);
  optimizer_.as_of(settings.fields)
      ->update(dtype_, value, at(master_, sum_dtype, slice), state.data(), sum, slice.elements, settings.scalars);
  return value;
}

bool Replica::has_state(const LiveOptimizer& optimizer, DType dtype, uint8_t part) {
  const Optimizer& its = optimizer.announced();
  return part == kMaster ? its.needs_master(dtype) : part >= 1 && part <= its.state_count();
}

std::vector<char>& Replica::array(uint8_t part) {
  return part == 0 ? value_ : part == kMaster ? master_ : state_[static_cast<size_t>(part) - 1];
}

}  // namespace p3
