#include "server_slice.h"

#include <cstring>

#include "p3/sum.h"

namespace p3 {

ServerSlice::ServerSlice(const ServerKey& its_key, uint32_t its_index, int num_workers, SumOrder order, int its_thread,
                         BufferPool& values, BufferPool& gradients)
    : key(its_key),
      index(its_index),
      elements(slice_at(its_key.plan, its_index).elements),
      bytes(elements * size_of(its_key.plan.dtype)),
      thread(its_thread),
      next_round(static_cast<size_t>(num_workers), 0),
      outstanding(2 * num_workers),
      num_workers_(num_workers),
      order_(order),
      values_(values),
      gradients_(gradients),
      dtype_(its_key.plan.dtype),
      sum_dtype_(sum_type(dtype_)),
      sum_bytes_(elements * size_of(sum_dtype_)),
      value_(values.take(bytes)),
      arrived_(static_cast<size_t>(num_workers), nullptr) {}

ServerSlice::~ServerSlice() {
  values_.give_back(value_, bytes);
  if (accumulator_ != nullptr) gradients_.give_back(accumulator_, sum_bytes_);
  if (master_ != nullptr) values_.give_back(master_, sum_bytes_);
  for (void* state : state_) values_.give_back(state, sum_bytes_);
  for (void* gradient : arrived_)
    if (gradient != nullptr) gradients_.give_back(gradient, bytes);
}

int ServerSlice::add(int worker, const Header& header, void* gradient) {
  const RoundScalars scalars{header.lr, header.wd, header.rescale};
  int contradicts = -1;
  if (first_worker_ < 0) {
    first_worker_ = worker;
    scalars_ = scalars;
  } else if (std::memcmp(&scalars, &scalars_, sizeof scalars) != 0) {
    contradicts = first_worker_;
  }
  if (worker == 0) priority_ = header.priority;

  if (order_ == SumOrder::kArrival) {
    sum(gradient);
    return contradicts;
  }
  arrived_[static_cast<size_t>(worker)] = gradient;
  while (summed_ < num_workers_ && arrived_[static_cast<size_t>(summed_)] != nullptr) {
    sum(arrived_[static_cast<size_t>(summed_)]);
    arrived_[static_cast<size_t>(summed_++)] = nullptr;
  }
  return contradicts;
}

// The first gradient becomes the accumulator itself where the types allow, so that one worker's copy is all there is.
void ServerSlice::sum(void* gradient) {
  if (accumulator_ == nullptr && sum_dtype_ == dtype_) {
    accumulator_ = gradient;
    return;
  }
  if (accumulator_ == nullptr) {
    accumulator_ = gradients_.take(sum_bytes_);
    start_sum(dtype_, accumulator_, gradient, elements);
  } else {
    add_to_sum(dtype_, accumulator_, gradient, elements);
  }
  gradients_.give_back(gradient, bytes);
}

void ServerSlice::finish(const Optimizer* optimizer) {
  if (optimizer == nullptr) {
    if (sum_dtype_ == dtype_)
      std::swap(value_, accumulator_);
    else
      finish_sum(dtype_, value_, accumulator_, elements);
  } else {
    while (state_.size() < static_cast<size_t>(optimizer->state_count())) {
      state_.push_back(values_.take(sum_bytes_));
      std::memset(state_.back(), 0, sum_bytes_);
    }
    if (master_ == nullptr && optimizer->needs_master(dtype_)) {
      master_ = values_.take(sum_bytes_);
      start_sum(dtype_, master_, value_, elements);
    }
    optimizer->update(dtype_, value_, master_, state_.data(), accumulator_, elements, scalars_);
  }
  gradients_.give_back(accumulator_, sum_bytes_);
  accumulator_ = nullptr;
  summed_ = 0;
  first_worker_ = -1;
}

}  // namespace p3
