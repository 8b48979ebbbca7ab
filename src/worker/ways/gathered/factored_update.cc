#include "worker/ways/gathered/factored_update.h"

#include <algorithm>

#include "numeric/sum.h"

namespace p3 {

FactoredUpdate::FactoredUpdate(const FactorShape& shape, int workers)
    : shape_(shape),
      gathered_(shape.part_elements() * static_cast<size_t>(workers)),
      present_(static_cast<size_t>(workers)),
      sum_(shape) {}

std::vector<void*> FactoredUpdate::make_state() {
  std::vector<void*> arrays;
  const int count = optimizer_->announced().state_count();
  arrays.reserve(static_cast<size_t>(count));
  for (int i = 0; i < count; ++i) arrays.push_back(state_.emplace_back(shape_.elements()).data());
  return arrays;
}

float* FactoredUpdate::state(uint8_t part) {
  if (state_.empty()) make_state();
  return state_[part - 1u].data();
}

bool FactoredUpdate::update(float* weight, int rank, const float* own, const RoundSettings& settings,
                            Reduction reduction) {
  std::vector<const float*> parts;
  for (size_t worker = 0; worker < present_.size(); ++worker) {
    const bool is_own = worker == static_cast<size_t>(rank);
    if (is_own && own != nullptr) parts.push_back(own);
    if (!is_own && present_[worker]) parts.push_back(gathered_.data() + worker * shape_.part_elements());
    present_[worker] = false;
  }
  if (parts.empty()) return false;
  const bool divides = reduction != Reduction::kSum;
  const int divisor = static_cast<int>(reduction == Reduction::kMean ? present_.size() : parts.size());
  if (optimizer_ && state_.empty())
    optimizer_->announced().start_state(DType::kFloat32, weight, make_state().data(), shape_.elements());
  RoundScalars round = settings.scalars;
  if (divides) round.rescale /= divisor;
  const auto optimizer = optimizer_ ? optimizer_->as_of(settings.fields) : nullptr;
  block_.resize(FactorSum::kBlock * shape_.inputs);
  std::vector<void*> state(state_.size());
  for (size_t first = 0; first < shape_.outputs; first += FactorSum::kBlock) {
    const size_t rows = std::min<size_t>(FactorSum::kBlock, shape_.outputs - first);
    const size_t offset = first * shape_.inputs, elements = rows * shape_.inputs;
    float* const sum = optimizer != nullptr ? block_.data() : weight + offset;
    sum_.rows(parts, first, rows, sum);
    if (optimizer == nullptr) {
      if (divides) divide_sum(DType::kFloat32, sum, divisor, elements);
      continue;
    }
    for (size_t i = 0; i < state.size(); ++i) state[i] = state_[i].data() + offset;
    optimizer->update(DType::kFloat32, weight + offset, nullptr, state.data(), sum, elements, round);
  }
  return true;
}

}  // namespace p3
