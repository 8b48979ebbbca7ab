#include "server_slice.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "p3/sum.h"

namespace p3 {

ServerSlice::ServerSlice(const ServerKey& its_key, uint32_t its_index, int num_workers, SumOrder order, int its_thread,
                         BufferPool& values, BufferPool& gradients)
    : key(its_key),
      index(its_index),
      elements(slice_at(its_key.plan, its_index).elements),
      bytes(elements * size_of(its_key.plan.dtype)),
      pushed_bytes(encoded_bytes(its_key.compression.encoding, its_key.plan.dtype, elements)),
      thread(its_thread),
      next_round(static_cast<size_t>(num_workers), 0),
      inits(static_cast<size_t>(num_workers), 0),
      outstanding(num_workers),
      num_workers_(num_workers),
      order_(order),
      values_(values),
      gradients_(gradients),
      dtype_(its_key.plan.dtype),
      sum_dtype_(sum_type(dtype_)),
      sum_bytes_(elements * size_of(sum_dtype_)),
      value_(values.take(bytes)),
      arrived_(static_cast<size_t>(num_workers)) {}

ServerSlice::~ServerSlice() {
  values_.give_back(value_, bytes);
  drop_replaced();
  if (wire_value_ != nullptr) values_.give_back(wire_value_, pushed_bytes);
  if (accumulator_ != nullptr) gradients_.give_back(accumulator_, sum_bytes_);
  if (master_ != nullptr) values_.give_back(master_, sum_bytes_);
  for (void* state : state_) values_.give_back(state, sum_bytes_);
  for (const Arrived& arrived : arrived_)
    if (arrived.gradient != nullptr) gradients_.give_back(arrived.gradient, pushed_bytes);
}

void ServerSlice::replace_value(const void* value) {
  make_writable(value_, bytes);
  std::memcpy(value_, value, bytes);
  published_encoding_ = Encoding::kPlain;
  if (master_ == nullptr) return;
  make_writable(master_, sum_bytes_);
  start_sum(dtype_, master_, value_, elements);
}

void ServerSlice::replace_state(const Optimizer& optimizer, uint8_t part, const void* content) {
  void*& state = state_at(optimizer, part);
  make_writable(state, sum_bytes_);
  std::memcpy(state, content, sum_bytes_);
}

// Leaves the contents of `array` undefined, and former ones where they are for as long as a send borrows anything.
void ServerSlice::make_writable(void*& array, size_t size) {
  const int pushes_to_come = num_workers_ - pushed_;
  if (outstanding == pushes_to_come)
    drop_replaced();
  else
    replaced_.push_back({std::exchange(array, values_.take(size)), size});
}

void ServerSlice::drop_replaced() {
  for (const auto& [array, size] : std::exchange(replaced_, {})) values_.give_back(array, size);
}

std::vector<int> ServerSlice::init(int worker, uint32_t n) {
  if (worker == 0) inits_of_rank_0_ = n;
  waiting_for_init_.push_back({worker, n});
  const auto ready = std::stable_partition(waiting_for_init_.begin(), waiting_for_init_.end(),
                                           [this](const auto& waiting) { return waiting.second > inits_of_rank_0_; });
  std::vector<int> answered;
  for (auto it = ready; it != waiting_for_init_.end(); ++it) answered.push_back(it->first);
  waiting_for_init_.erase(ready, waiting_for_init_.end());
  return answered;
}

int ServerSlice::add(int worker, const Header& header, void* gradient) {
  const RoundScalars& scalars = header.scalars;
  int contradicts = -1;
  ++pushed_;
  if (gradient != nullptr) {
    ++present_;
    if (first_worker_ < 0) {
      first_worker_ = worker;
      scalars_ = scalars;
    } else if (std::memcmp(&scalars, &scalars_, sizeof scalars) != 0) {
      contradicts = first_worker_;
    }
  }
  if (worker == 0) priority_ = header.priority;

  if (order_ == SumOrder::kArrival) {
    sum(gradient);
    return contradicts;
  }
  arrived_[static_cast<size_t>(worker)] = {true, gradient};
  while (summed_ < num_workers_ && arrived_[static_cast<size_t>(summed_)].here)
    sum(std::exchange(arrived_[static_cast<size_t>(summed_++)], {}).gradient);
  return contradicts;
}

// The first gradient becomes the accumulator itself where the types allow, so that one worker's copy is all there is.
void ServerSlice::sum(void* gradient) {
  if (gradient == nullptr) return;
  const Compression& compression = key.compression;
  const bool plain = compression.encoding == Encoding::kPlain;
  const bool first = accumulator_ == nullptr;
  if (first && plain && sum_dtype_ == dtype_) {
    accumulator_ = gradient;
    return;
  }
  if (first) accumulator_ = gradients_.take(sum_bytes_);
  if (plain)
    (first ? start_sum : add_to_sum)(dtype_, accumulator_, gradient, elements);
  else
    (first ? start_encoded_sum : add_encoded_to_sum)(compression, static_cast<float*>(accumulator_), gradient,
                                                     elements);
  gradients_.give_back(gradient, pushed_bytes);
}

void ServerSlice::finish(const Optimizer* optimizer) {
  drop_replaced();
  published_encoding_ = Encoding::kPlain;
  if (present_ == 0) {
    published_encoding_ = Encoding::kAbsent;
  } else if (optimizer == nullptr) {
    if (key.average) divide_sum(dtype_, accumulator_, present_, elements);
    publish_sum();
  } else {
    make_state(*optimizer);
    if (key.average) scalars_.rescale /= present_;
    optimizer->update(dtype_, value_, master_, state_.data(), accumulator_, elements, scalars_);
  }
  if (accumulator_ != nullptr) gradients_.give_back(std::exchange(accumulator_, nullptr), sum_bytes_);
  pushed_ = 0;
  summed_ = 0;
  present_ = 0;
  first_worker_ = -1;
}

void ServerSlice::publish_sum() {
  if (key.compression.encoding == Encoding::kFloat16) {
    if (wire_value_ == nullptr) wire_value_ = values_.take(pushed_bytes);
    finish_sum(DType::kFloat16, wire_value_, accumulator_, elements);
    published_encoding_ = Encoding::kFloat16;
  } else if (sum_dtype_ == dtype_) {
    std::swap(value_, accumulator_);
  } else {
    finish_sum(dtype_, value_, accumulator_, elements);
  }
}

void ServerSlice::make_state(const Optimizer& optimizer) {
  if (master_ == nullptr && optimizer.needs_master(dtype_)) {
    master_ = values_.take(sum_bytes_);
    start_sum(dtype_, master_, value_, elements);
  }
  if (!state_.empty()) return;
  for (int i = 0; i < optimizer.state_count(); ++i) state_.push_back(values_.take(sum_bytes_));
  optimizer.start_state(dtype_, value_, state_.data(), elements);
}

void*& ServerSlice::state_at(const Optimizer& optimizer, uint8_t part) {
  make_state(optimizer);
  return part == kMaster ? master_ : state_[part - 1];
}

}  // namespace p3
