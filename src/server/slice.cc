#include "server/slice.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "numeric/sum.h"

namespace p3 {

namespace {

bool is_about_state(FrameKind kind) { return kind == FrameKind::kFetch || kind == FrameKind::kStore; }

}  // namespace

ServerSlice::ServerSlice(const ServerKey& its_key, uint32_t its_index, SumOrder order, int its_thread,
                         BufferPool& values, BufferPool& gradients)
    : ServerShard(its_key, its_index, its_thread),
      elements(slice_at(its_key.plan, its_index).elements),
      bytes(elements * size_of(its_key.plan.dtype)),
      pushed_bytes(encoded_bytes(its_key.compression.encoding, its_key.plan.dtype, elements)),
      outstanding(its_key.pushes()),
      values_(values),
      gradients_(gradients),
      dtype_(its_key.plan.dtype),
      sum_dtype_(sum_type(dtype_)),
      sum_bytes_(elements * size_of(sum_dtype_)),
      value_(values.take(bytes)),
      in_order_(order == SumOrder::kRank),
      pushes_(its_key.pushes()),
      total_(key.machines->count(), dtype_, elements, gradients, in_order_) {
  const Machines& machines = *key.machines;
  if (!in_order_ || pushes_ == machines.count()) return;
  for (int machine = 0; machine < machines.count(); ++machine)
    machine_.emplace_back(static_cast<int>(machines.workers(machine).size()), dtype_, elements, gradients);
}

ServerSlice::~ServerSlice() {
  values_.give_back(value_, bytes);
  drop_replaced();
  if (wire_value_ != nullptr) values_.give_back(wire_value_, pushed_bytes);
  if (master_ != nullptr) values_.give_back(master_, sum_bytes_);
  for (void* state : state_) values_.give_back(state, sum_bytes_);
}

const char* ServerSlice::problem_with(const Header& header, int worker, const Optimizer* optimizer) const {
  const bool is_rank_0s = header.kind == FrameKind::kStore || header.kind == FrameKind::kCapture;
  const bool is_known = header.kind == FrameKind::kPush || header.kind == FrameKind::kInit ||
                        header.kind == FrameKind::kCapture || is_about_state(header.kind);
  if (!is_known || (is_rank_0s && worker != 0)) return "unexpected";
  if (static_cast<DType>(header.dtype) != element_type(header.kind)) return "of another element type than agreed";
  if (is_about_state(header.kind) && !has_state(header.part, optimizer))
    return "of a state that its key's optimizer does not have";
  if (!may_come(header, worker)) return "in another encoding than agreed";
  if (header.payload_bytes != payload_bytes(header)) return "of another size than agreed";
  if (!is_its_to_send(header, worker)) return "another worker's to send";
  return in_turn(header, worker) ? nullptr : "out of turn";
}

size_t ServerSlice::answer_bytes(const Header& header) const {
  return header.kind == FrameKind::kInit ? bytes : header.kind == FrameKind::kFetch ? sum_bytes_ : 0;
}

DType ServerSlice::element_type(FrameKind kind) const { return is_about_state(kind) ? sum_dtype_ : dtype_; }

size_t ServerSlice::payload_bytes(const Header& header) const {
  return encoded_bytes(static_cast<Encoding>(header.encoding), element_type(header.kind), elements);
}

bool ServerSlice::may_come(const Header& header, int worker) const {
  const auto encoding = static_cast<Encoding>(header.encoding);
  switch (header.kind) {
    case FrameKind::kInit:
      return encoding == (worker == 0 && !catches_up[0] ? Encoding::kPlain : Encoding::kAbsent);
    case FrameKind::kPush:
      return encoding == Encoding::kAbsent || encoding == key.compression.encoding;
    case FrameKind::kFetch:
    case FrameKind::kCapture:
      return encoding == Encoding::kAbsent;
    default:
      return encoding == Encoding::kPlain;
  }
}

void ServerSlice::replace_value(const void* value) {
  make_writable(value_, bytes);
  std::memcpy(value_, value, bytes);
  value_encoding_ = Encoding::kPlain;
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
  const int pushes_to_come = pushes_ - pushed_;
  if (outstanding == pushes_to_come) return drop_replaced();
  if (std::find(not_lent_.begin(), not_lent_.end(), array) != not_lent_.end()) return;
  replaced_.push_back({std::exchange(array, values_.take(size)), size});
  not_lent_.push_back(array);
}

const void* ServerSlice::lent(const void* array) {
  not_lent_.erase(std::remove(not_lent_.begin(), not_lent_.end(), array), not_lent_.end());
  return array;
}

void ServerSlice::drop_replaced() {
  not_lent_.clear();
  for (const auto& [array, size] : std::exchange(replaced_, {})) values_.give_back(array, size);
}

std::vector<int> ServerSlice::init(int worker, uint32_t n, bool waits) {
  note_init(worker, n, waits);
  return take_answerable();
}

int ServerSlice::add(int worker, const Header& header, void* gradient, bool is_filled) {
  ++pushed_;
  present_ += gradient == nullptr ? 0 : header.of_machine != 0 ? header.contributors : 1;
  is_filled_ |= is_filled;
  const int contradicts = gradient == nullptr ? -1 : numbers_.note(worker, header.scalars);
  if (worker == 0) priority_ = header.priority;
  sum(worker, gradient);
  return contradicts;
}

void ServerSlice::sum(int worker, void* gradient) {
  const int machine = key.machines->of(worker);
  if (!in_order_) return total_.add(0, gradient, key.compression);
  if (machine_.empty() || key.machines->is_alone(worker)) return total_.add(machine, gradient, key.compression);
  RankSum& sum = machine_[static_cast<size_t>(machine)];
  sum.add(key.machines->place(worker), gradient, key.compression);
  if (sum.complete()) total_.add(machine, sum.take_rounded());
}

void ServerSlice::finish(const Optimizer* optimizer) {
  drop_replaced();
  void* sum = total_.take();
  has_new_value_ = sum != nullptr || (is_filled_ && optimizer != nullptr);
  if (sum != nullptr && optimizer == nullptr) {
    if (key.average) divide_sum(dtype_, sum, present_, elements);
    publish_sum(sum);
  } else if (sum != nullptr) {
    make_state(*optimizer);
    if (key.average) numbers_.scalars.rescale /= present_;
    value_encoding_ = Encoding::kPlain;
    optimizer->update(dtype_, value_, master_, state_.data(), sum, elements, numbers_.scalars);
  }
  if (sum != nullptr) gradients_.give_back(sum, sum_bytes_);
  pushed_ = 0;
  present_ = 0;
  is_filled_ = false;
  numbers_.first = -1;
}

void ServerSlice::publish_sum(void*& sum) {
  if (key.compression.encoding == Encoding::kFloat16) {
    if (wire_value_ == nullptr) wire_value_ = values_.take(pushed_bytes);
    finish_sum(DType::kFloat16, wire_value_, sum, elements);
    value_encoding_ = Encoding::kFloat16;
  } else if (sum_dtype_ == dtype_) {
    std::swap(value_, sum);
  } else {
    finish_sum(dtype_, value_, sum, elements);
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

// A sum that went out as float16 is nowhere else: it is captured as its receivers have it.
const char* ServerSlice::capture(std::vector<CapturedArray>& captured) const {
  CapturedArray value = captured_array(0, dtype_, elements);
  if (value_encoding_ == Encoding::kFloat16) {
    std::memcpy(value.data.get() + pushed_bytes, wire_value_, pushed_bytes);
    widen_in_place(reinterpret_cast<float*>(value.data.get()), elements);
  } else {
    std::memcpy(value.data.get(), value_, bytes);
  }
  captured.push_back(std::move(value));
  capture_state(state_, master_, elements, captured);
  return nullptr;
}

void*& ServerSlice::state_at(const Optimizer& optimizer, uint8_t part) {
  make_state(optimizer);
  return part == kMaster ? master_ : state_[part - 1];
}

}  // namespace p3
