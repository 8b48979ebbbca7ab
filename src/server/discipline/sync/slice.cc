#include "server/discipline/sync/slice.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/simd.h"
#include "codec/dgc.h"
#include "numeric/finite.h"
#include "numeric/sum.h"
#include "wire/top_k.h"

namespace p3 {
namespace {

// For the worker whose part of a gathered key it is, or its machine: only that the round is complete.
Frame without_content(Frame frame) {
  frame.header.encoding = static_cast<uint8_t>(Encoding::kAbsent);
  frame.header.payload_bytes = 0;
  return frame;
}

}  // namespace

ServerSlice::ServerSlice(const ServerKey& its_key, uint32_t its_index, int its_thread, ShardHost& host)
    : DenseShard(its_key, its_index, its_thread, host),
      of_changes_(key.plan.value_codec.if_shorter(elements_)),
      of_sums_(key.plan.codec_of_sums().if_shorter(elements_)),
      outstanding_(key.pushes_of_round()),
      total_(key.machines->count(), dtype_, static_cast<uint32_t>(elements_), host.transient, key.plan.codec.encoding,
             host.sum_order == SumOrder::kRank) {
  const Machines& machines = *key.machines;
  if (host.sum_order != SumOrder::kRank || key.pushes_of_round() == machines.count()) return;
  for (int machine = 0; machine < machines.count(); ++machine)
    machine_.emplace_back(static_cast<int>(machines.workers(machine).size()), dtype_, static_cast<uint32_t>(elements_),
                          host.transient, key.plan.codec.encoding);
}

// --- a round -------------------------------------------------------------------------------------------------------

void ServerSlice::push(Task& task, Reply& reply) {
  reply.problem = problem_with_gradient_of(task);
  if (reply.problem != nullptr) return;
  if (task.payload || (key.plan.is_gathered() && goes_on(task.header)))
    reply.contradicts = round_.numbers.note(task.worker, task.header.scalars, task.fields);
  if (reply.contradicts >= 0) return;
  add(task);
  reply.is_summed = true;
  if (outstanding_.fetch_sub(1) == 1) resume(reply);
}

void ServerSlice::add(Task& task) {
  const int worker = task.worker, machine = key.machines->of(worker);
  ++round_.pushed;
  round_.present += !task.payload ? 0 : task.header.of_machine != 0 ? task.header.contributors : 1;
  round_.departed += task.has_departed;
  round_.goes_on |= goes_on(task.header);
  if (key.pushes_for_first(worker)) priority_ = task.header.priority;
  PooledBuffer gradient = std::move(task.payload);
  const Compression sent = key.plan.codec.in(static_cast<Encoding>(task.header.encoding));
  if (host_.sum_order != SumOrder::kRank) return total_.add(0, std::move(gradient), sent);
  if (machine_.empty() || key.machines->is_alone(worker)) return total_.add(machine, std::move(gradient), sent);
  RankSum& sum = machine_[static_cast<size_t>(machine)];
  sum.add(key.machines->place(worker), std::move(gradient), sent);
  if (sum.complete()) total_.add(machine, sum.take_rounded());
}

void ServerSlice::resume(Reply& reply) {
  update();
  if (key.reports_norm()) report_norm(published + 1, norm_of_sum());
  const std::vector<int> workers = receivers();
  outstanding_ = key.pushes_of_round() + static_cast<int>(workers.size());  // sends
  ++published;
  const Encoding encoding = has_new_value_ ? value_encoding_ : Encoding::kAbsent;
  Frame frame = step_ ? step_frame() : change_ ? change_frame() : value_frame(encoding);
  if (is_sum_of_cut_round_ && encoding == Encoding::kAbsent) frame.header.part = 1;
  reply.published = frame.header;
  for (int worker : workers) {
    frame.header.of_machine = key.is_shared(worker);
    frame.yields = key.reports_norm();
    const bool has_it = key.plan.is_gathered() && key.pusher_of(worker_of(key.plan, index)) == worker;
    send(worker, has_it ? without_content(frame) : frame, reply);
  }
}

// As the workers have it.
void ServerSlice::take_over(const Claims& its) {
  DenseShard::take_over(its);
  const Header& best = its.best();
  published_settings_ = its.settings();
  has_new_value_ = best.part == static_cast<uint8_t>(Claimed::kValue);
  is_sum_of_cut_round_ = best.part == static_cast<uint8_t>(Claimed::kSumOfNothing);
  if (key.reports_norm() && best.round > 0) report_norm(best.round, norm_of_sum());
}

void ServerSlice::answer_again(int worker, Reply& reply) {
  ++outstanding_;  // as in send_value(), before its push of the next round
  Frame frame = value_frame(has_new_value_ ? value_encoding_ : Encoding::kAbsent);
  if (is_sum_of_cut_round_ && !has_new_value_) frame.header.part = 1;
  frame.yields = key.reports_norm();
  send(worker, frame, reply);
}

// As it is sent.
NormPart ServerSlice::norm_of_sum() const {
  if (!has_new_value_) return {};
  if (value_encoding_ == Encoding::kPlain) return norm_part(dtype_, value_, elements_);
  const PooledBuffer sum(host_.transient, bytes_);
  copy_value(sum.data());
  return norm_part(dtype_, sum.data(), elements_);
}

// The value becomes update(value, sum), or the sum itself without an optimizer.
void ServerSlice::update() {
  drop_replaced();
  step_.give_back();
  change_.give_back();
  const Optimizer* const its = optimizer();
  if (key.plan.takes_steps() && its == nullptr && round_.present > 0)
    host_.refuse_call("key '" + key.name +
                      "' has deep gradient compression, which needs SGD on the servers: set an optimizer before the "
                      "first push.");
  published_settings_ = round_.numbers.settings();
  sums_go_out_ = its == nullptr;
  PooledBuffer total = total_.take();  // goes back by itself, also if numbers of the round are refused
  void* const sum = total.data();
  has_new_value_ = sum != nullptr;
  is_sum_of_cut_round_ = its == nullptr && round_.departed > 0;
  if (sum != nullptr && key.plan.takes_steps()) {
    take_step(static_cast<const float*>(sum));
  } else if (sum != nullptr && its == nullptr) {
    const bool divides = key.plan.averages() && !key.plan.is_gathered();  // a part is no gradient: its workers divide
    if (divides) divide_sum(dtype_, sum, key.divisor(round_.present, round_.departed), elements_);
    publish_sum(total);
  } else if (sum != nullptr) {
    make_state(*its);
    if (key.plan.averages()) round_.numbers.scalars.rescale /= key.divisor(round_.present, round_.departed);
    value_encoding_ = Encoding::kPlain;
    const auto now = optimizer_as_of(round_.numbers.fields);
    if (key.plan.value_codec.codec() == nullptr) {
      now->update(dtype_, value_, master_, state_.data(), sum, elements_, round_.numbers.scalars);
    } else {
      now->update(dtype_, master_, nullptr, state_.data(), sum, elements_, round_.numbers.scalars);
      publish_change(static_cast<float*>(sum));
    }
  }
  round_ = {};
}

void ServerSlice::publish_sum(PooledBuffer& total) {
  void* sum = total.data();
  make_master(nullptr);  // of each slice of the key, or of none
  if (of_sums_.codec() != nullptr) {
    if (!wire_value_) wire_value_ = PooledBuffer(host_.values, of_sums_.bytes(elements_));
    auto* const left_out = of_sums_.residuals() > 0 ? static_cast<float*>(master_) : nullptr;
    encode(of_sums_, static_cast<const float*>(sum), left_out, wire_value_.data(), elements_);
    value_encoding_ = of_sums_.encoding;
  } else if (sum_dtype_ == dtype_) {
    total.release();
    std::swap(value_, sum);
    total = PooledBuffer(host_.transient, sum, sum_bytes_);
  } else {
    finish_sum(dtype_, value_, sum, elements_);
  }
}

// Of the exact value, since what the workers have: so what an encoding leaves out is in the next change, and what a codec
// keeps of that itself is of no use. Where they would not have finite values then, they get the exact ones, whole.
void ServerSlice::publish_change(float* scratch) {
  auto* const value = static_cast<float*>(value_);
  const auto* const exact = static_cast<const float*>(master_);
  if (of_changes_.codec() != nullptr) {
    change_ = PooledBuffer(host_.transient, of_changes_.bytes(elements_));
    if (of_changes_.residuals() > 0) {  // the codec adds up both
      loop(elements_, [=](size_t i) { scratch[i] = -value[i]; });
      encode(of_changes_, exact, scratch, change_.data(), elements_);
    } else {
      loop(elements_, [=](size_t i) { scratch[i] = exact[i] - value[i]; });
      encode(of_changes_, scratch, nullptr, change_.data(), elements_);
    }
    add_encoded_to_sum(of_changes_, value, change_.data(), elements_);
    if (are_finite(elements_, [=](size_t i) { return value[i]; })) return;
    change_.give_back();
  }
  std::memcpy(value, exact, bytes_);
}

// By what is sent, so that the workers get the same bits.
void ServerSlice::take_step(const float* sum) {
  auto* const value = static_cast<float*>(value_);
  decay_weight(decay_of(published_settings_.scalars), value, elements_);
  const size_t count = count_nonzero(sum, elements_);
  if (!is_worth_top_k(count, elements_)) return subtract_nonzero(value, sum, elements_);
  step_ = PooledBuffer(host_.transient, BufferPool::roomy(top_k_bytes(count, elements_)));
  encode_nonzero(sum, count, step_.data(), elements_);
  subtract_top_k(value, step_.data(), elements_);
}

Frame ServerSlice::step_frame() {
  Frame frame;
  frame.header = header_of(FrameKind::kValue, Encoding::kTopK, published, priority_);
  frame.header.payload_bytes = static_cast<uint32_t>(top_k_bytes(top_k_count(step_.data()), elements_));
  frame.header.scalars.lr = published_settings_.scalars.lr;
  frame.header.scalars.wd = published_settings_.scalars.wd;
  frame.payload = step_.data();
  frame.context = static_cast<Lender*>(this);
  return frame;
}

Frame ServerSlice::change_frame() {
  Frame frame;
  frame.header = header_of(FrameKind::kChange, of_changes_.encoding, published, priority_);
  frame.header.payload_bytes = static_cast<uint32_t>(change_.bytes());
  frame.payload = change_.data();
  frame.context = static_cast<Lender*>(this);
  return frame;
}

Frame ServerSlice::value_frame(Encoding encoding) {
  Frame frame;
  frame.header = header_of(FrameKind::kValue, encoding, published, priority_);
  if (encoding != Encoding::kAbsent) {
    const size_t payload_bytes = value_encoding_ == Encoding::kPlain ? bytes_ : wire_value_.bytes();
    frame.header.payload_bytes = static_cast<uint32_t>(payload_bytes);
  }
  if (sums_go_out_) {  // a worker that has pushed nothing may update by them, too
    frame.header.scalars = published_settings_.scalars;
    frame.goes_by_fields = true;
    frame.fields = published_settings_.fields;
  }
  frame.payload = lent(value_encoding_ == Encoding::kPlain ? value_ : wire_value_.data());  // of kAbsent none is sent
  frame.context = static_cast<Lender*>(this);
  return frame;
}

// Who waits has not pushed yet, so that `outstanding_` cannot be zero. What was asked for can be asked for again: it counts
// as kept for who asks.
void ServerSlice::send_value(const std::vector<int>& workers, Reply& reply, bool asked_for) {
  if (workers.empty()) return;
  outstanding_ += static_cast<int>(workers.size());
  Frame frame = value_frame(key.plan.is_gathered() ? Encoding::kAbsent : value_encoding_);
  if (asked_for) frame.copied_bytes = frame.header.payload_bytes;
  for (int worker : workers) send(worker, frame, reply);
}

void ServerSlice::taken_back() {
  if (outstanding_.fetch_sub(1) == 1) host_.resume(*this, {published + 1, priority_});
}

// --- other contents ------------------------------------------------------------------------------------------------

void ServerSlice::replace_value(PooledBuffer value) {
  make_writable(value_, bytes_);
  std::memcpy(value_, value.data(), bytes_);
  value_encoding_ = Encoding::kPlain;
  if (master_ == nullptr || part_of_master(optimizer()) != kMaster) return;
  make_writable(master_, sum_bytes_);
  start_sum(dtype_, master_, value_, elements_);
}

void ServerSlice::fetch(Task& task, Reply& reply) {
  Frame frame;
  frame.header = task.header;
  frame.header.kind = FrameKind::kPart;
  frame.header.encoding = static_cast<uint8_t>(Encoding::kPlain);
  frame.header.payload_bytes = static_cast<uint32_t>(sum_bytes_);
  frame.payload = lent(part_at(task.header.part));
  frame.copied_bytes = frame.header.payload_bytes;
  frame.context = static_cast<Lender*>(this);
  ++outstanding_;  // before it can be zero, as in send_value()
  send(task.worker, frame, reply);
}

void ServerSlice::store(Task& task, Reply& reply) {
  void*& state = part_at(task.header.part);
  make_writable(state, sum_bytes_);
  std::memcpy(state, task.payload.data(), sum_bytes_);
  if (!is_lost(task)) acknowledge(task, reply);
}

// A sum that went out encoded is nowhere else: it is captured as its receivers have it.
void ServerSlice::copy_value(void* to) const {
  if (value_encoding_ == Encoding::kPlain) return Shard::copy_value(to);
  start_encoded_sum(of_sums_, static_cast<float*>(to), wire_value_.data(), elements_);
}

// Leaves the contents of `array` undefined, and former ones where they are for as long as a send borrows anything.
void ServerSlice::make_writable(void*& array, size_t size) {
  const int pushes_to_come = key.pushes_of_round() - round_.pushed;
  if (outstanding_ == pushes_to_come) return drop_replaced();
  if (std::find(not_lent_.begin(), not_lent_.end(), array) != not_lent_.end()) return;
  replaced_.emplace_back(host_.values, std::exchange(array, host_.values.take(size)), size);
  not_lent_.push_back(array);
}

const void* ServerSlice::lent(const void* array) {
  not_lent_.erase(std::remove(not_lent_.begin(), not_lent_.end(), array), not_lent_.end());
  return array;
}

void ServerSlice::drop_replaced() {
  not_lent_.clear();
  replaced_.clear();
}

}  // namespace p3
