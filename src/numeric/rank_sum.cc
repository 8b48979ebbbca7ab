#include "numeric/rank_sum.h"

#include <utility>

#include "numeric/sum.h"

namespace p3 {

RankSum::RankSum(int places, DType type, uint32_t elements, BufferPool& buffers, bool in_order)
    : type_(type),
      elements_(elements),
      buffers_(buffers),
      in_order_(in_order),
      here_(static_cast<size_t>(places), false),
      early_(in_order ? here_.size() : 0) {}

RankSum::RankSum(RankSum&& other) noexcept
    : type_(other.type_),
      elements_(other.elements_),
      buffers_(other.buffers_),
      in_order_(other.in_order_),
      accumulator_(std::exchange(other.accumulator_, nullptr)),
      here_(std::move(other.here_)),
      early_(std::move(other.early_)),
      came_(other.came_),
      next_(other.next_) {}

RankSum::~RankSum() {
  if (accumulator_ != nullptr) buffers_.give_back(accumulator_, sum_bytes());
  for (const Early& early : early_)
    if (early.gradient != nullptr)
      buffers_.give_back(early.gradient, encoded_bytes(early.compression.encoding, type_, elements_, early.gradient));
}

void RankSum::add(int place, void* gradient, const Compression& compression) {
  ++came_;
  here_[static_cast<size_t>(place)] = true;
  if (!in_order_) return accumulate(gradient, compression);
  early_[static_cast<size_t>(place)] = {gradient, compression};
  for (; next_ < here_.size() && here_[next_]; ++next_) {
    const Early early = std::exchange(early_[next_], {});
    accumulate(early.gradient, early.compression);
  }
}

void RankSum::accumulate(void* gradient, const Compression& compression) {
  if (gradient == nullptr) return;
  const bool plain = compression.encoding == Encoding::kPlain;
  const bool first = accumulator_ == nullptr;
  if (first && plain && sum_type(type_) == type_) {
    accumulator_ = gradient;
    return;
  }
  if (first) accumulator_ = buffers_.take(sum_bytes());
  if (plain)
    (first ? start_sum : add_to_sum)(type_, accumulator_, gradient, elements_);
  else
    (first ? start_encoded_sum : add_encoded_to_sum)(compression, static_cast<float*>(accumulator_), gradient,
                                                     elements_);
  buffers_.give_back(gradient, encoded_bytes(compression.encoding, type_, elements_, gradient));
}

void* RankSum::take() {
  here_.assign(here_.size(), false);
  came_ = next_ = 0;
  return std::exchange(accumulator_, nullptr);
}

void* RankSum::take_rounded() {
  void* sum = take();
  if (sum == nullptr || sum_type(type_) == type_) return sum;
  void* rounded = buffers_.take(bytes());
  finish_sum(type_, rounded, sum, elements_);
  buffers_.give_back(sum, sum_bytes());
  return rounded;
}

}  // namespace p3
