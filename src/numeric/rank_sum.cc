#include "numeric/rank_sum.h"

#include <algorithm>
#include <utility>

#include "numeric/sum.h"

namespace p3 {

RankSum::RankSum(int places, DType type, uint32_t elements, BufferPool& buffers, Encoding encoding, bool in_order)
    : type_(type),
      elements_(elements),
      buffers_(buffers),
      run_(codec_of(encoding) == nullptr ? 1 : codec_of(encoding)->run()),
      in_order_(in_order),
      here_(static_cast<size_t>(places), false) {}

void RankSum::add(int place, PooledBuffer gradient, const Compression& compression) {
  const auto begin = static_cast<size_t>(place);
  ++came_;
  here_[begin] = true;
  const bool is_sum = compression.encoding == Encoding::kPlain && sum_type(type_) == type_;
  Part came{begin, begin + 1, std::move(gradient), compression, is_sum};
  size_t i = 0;  // where it is among the parts
  while (i < parts_.size() && parts_[i].begin < begin) ++i;
  parts_.insert(parts_.begin() + static_cast<ptrdiff_t>(i), std::move(came));
  while (true) {
    if (i > 0 && joins(parts_[i - 1], parts_[i]))
      --i;
    else if (i + 1 == parts_.size() || !joins(parts_[i], parts_[i + 1]))
      return;
    join(parts_[i], std::move(parts_[i + 1]));
    parts_.erase(parts_.begin() + static_cast<ptrdiff_t>(i) + 1);
  }
}

// Neighbours in `parts_`, between whose places others may be missing.
bool RankSum::joins(const Part& left, const Part& right) const {
  if (!in_order_) return true;
  if (left.end != right.begin) return false;
  const size_t size = left.end - left.begin;
  if (size < run_) return left.begin % run_ == 0 && right.end == right.begin + 1;
  return left.begin % (2 * size) == 0 && right.end == std::min(left.begin + 2 * size, here_.size());
}

void RankSum::join(Part& left, Part right) {
  left.end = right.end;
  if (!right.data) return;
  if (!left.data) {
    left.data = std::move(right.data);
    left.compression = right.compression;
    left.is_sum = right.is_sum;
    return;
  }
  make_sum(left);
  if (right.is_sum)
    add_to_sum(sum_type(type_), left.data.data(), right.data.data(), elements_);
  else if (right.compression.encoding == Encoding::kPlain)
    add_to_sum(type_, left.data.data(), right.data.data(), elements_);
  else
    add_encoded_to_sum(right.compression, static_cast<float*>(left.data.data()), right.data.data(), elements_);
}

void RankSum::make_sum(Part& part) {
  if (part.is_sum) return;
  PooledBuffer sum(buffers_, sum_bytes());
  if (part.compression.encoding == Encoding::kPlain)
    start_sum(type_, sum.data(), part.data.data(), elements_);
  else
    start_encoded_sum(part.compression, static_cast<float*>(sum.data()), part.data.data(), elements_);
  part.data = std::move(sum);
  part.is_sum = true;
}

PooledBuffer RankSum::take() {
  here_.assign(here_.size(), false);
  came_ = 0;
  if (parts_.empty()) return {};
  Part all = std::move(parts_.front());
  parts_.clear();
  if (all.data) make_sum(all);
  return std::move(all.data);
}

PooledBuffer RankSum::take_rounded() {
  PooledBuffer sum = take();
  if (!sum || sum_type(type_) == type_) return sum;
  PooledBuffer rounded(buffers_, bytes());
  finish_sum(type_, rounded.data(), sum.data(), elements_);
  return rounded;
}

}  // namespace p3
