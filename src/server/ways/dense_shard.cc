#include "server/ways/dense_shard.h"

#include <cstring>
#include <utility>

namespace p3 {

DenseShard::DenseShard(const ServerKey& its_key, uint32_t its_index, int its_thread, ShardHost& host)
    : Shard(its_key, its_index, its_thread, host, kSliceFrames, slice_at(its_key.plan, its_index).elements) {}

const char* DenseShard::problem_with_payload(const Header& header, int worker) const {
  const FrameKind kind = header.kind;
  const auto encoding = static_cast<Encoding>(header.encoding);
  const bool is_gathered = key.plan.is_gathered();
  const bool gives = worker == key.first() && !turns.catches_up(worker) && !is_gathered;
  const bool only_asks =
      kind == FrameKind::kFetch || kind == FrameKind::kCapture || (kind == FrameKind::kInit && !gives);
  // A worker that has become the first may not have known yet; then the value stays.
  const bool has_it_already = is_loaded_ || (turns.has_value() && host_.has_new_first) || claims != nullptr;
  const bool may_ask = kind == FrameKind::kInit && has_it_already && encoding == Encoding::kAbsent;
  const bool as_agreed = kind == FrameKind::kPush
                             ? encoding == Encoding::kAbsent || encoding == key.plan.codec.encoding ||
                                   (encoding == Encoding::kPlain && key.plan.takes_steps())
                             : may_ask || encoding == (only_asks ? Encoding::kAbsent : Encoding::kPlain);
  if (!as_agreed) return "in another encoding than agreed";
  if (is_gathered && encoding == Encoding::kPlain && worker != key.pusher_of(worker_of(key.plan, index)))
    return "another worker's to send";
  const Compression how = key.plan.codec.in(encoding);
  const bool fits = can_have_bytes(how, static_cast<DType>(header.dtype), elements_, header.payload_bytes);
  return fits ? nullptr : "of another size than agreed";
}

const char* DenseShard::problem_with_gradient_of(const Task& task) const {
  if (!task.payload) return nullptr;
  const Compression sent = key.plan.codec.in(static_cast<Encoding>(task.header.encoding));
  return problem_with_encoded(sent, task.payload.data(), task.header.payload_bytes, elements_);
}

void* DenseShard::place_of(const Header& header, PooledBuffer& buffer) {
  if (static_cast<Encoding>(header.encoding) == Encoding::kAbsent) return nullptr;
  const bool is_first_value = header.kind == FrameKind::kInit && !std::exchange(has_first_value_, true);
  if (is_first_value && claims == nullptr) return value_;  // else what is claimed comes there before
  const Compression how = key.plan.codec.in(static_cast<Encoding>(header.encoding));
  const bool has_any_size = how.codec() != nullptr && encoded_bytes(how, DType::kFloat32, elements_) == 0;
  buffer = PooledBuffer(host_.transient, has_any_size ? BufferPool::roomy(header.payload_bytes) : header.payload_bytes);
  return buffer.data();
}

bool DenseShard::load(uint8_t part, const void* content, size_t bytes) {
  if (!key.plan.is_synchronous() || key.plan.is_gathered() || bytes != (part == 0 ? bytes_ : sum_bytes_)) return false;
  if (part == 0) {
    std::memcpy(value_, content, bytes);
    has_first_value_ = is_loaded_ = true;
    return true;
  }
  const bool is_beside = part == kMaster || part == kLeftOut;
  if (is_beside ? master_ != nullptr : part != state_.size() + 1) return false;
  if (is_beside && sum_dtype_ == dtype_ && key.plan.value_codec.codec() == nullptr) {  // nothing is encoded any more
    if (part == kMaster) std::memcpy(value_, content, bytes);
    return true;
  }
  if (is_beside) master_part_ = part;
  void*& place = is_beside ? master_ : state_.emplace_back(nullptr);
  place = host_.values.take(bytes);
  std::memcpy(place, content, bytes);
  return true;
}

void DenseShard::take_over(const Claims& its) {
  Shard::take_over(its);
  if (inits_of(its.best()) == 0) return;
  if (its.lacks_value())
    std::memset(value_, 0, bytes_);
  else
    std::memcpy(value_, its.value(), bytes_);
  has_first_value_ = true;
}

void DenseShard::begin_behind(uint64_t round) {
  Shard::begin_behind(round);
  has_first_value_ = true;
}

uint8_t DenseShard::part_of_master(const Optimizer* its) const {
  const Compression& back = key.plan.value_codec;
  if (back.codec() == nullptr) return Shard::part_of_master(its);
  return its != nullptr ? kMaster : back.residuals() > 0 ? kLeftOut : 0;
}

size_t DenseShard::answer_bytes(const Header& header) const {
  return header.kind == FrameKind::kInit ? bytes_ : header.kind == FrameKind::kFetch ? sum_bytes_ : 0;
}

}  // namespace p3
