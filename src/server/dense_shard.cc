#include "server/dense_shard.h"

#include <utility>

namespace p3 {

DenseShard::DenseShard(const ServerKey& its_key, uint32_t its_index, int its_thread, ShardHost& host)
    : Shard(its_key, its_index, its_thread, host, slice_at(its_key.plan, its_index).elements) {}

const char* DenseShard::problem_with_payload(const Header& header, int worker) const {
  const FrameKind kind = header.kind;
  const auto encoding = static_cast<Encoding>(header.encoding);
  const bool is_gathered = key.plan.is_gathered();
  const bool only_asks = kind == FrameKind::kFetch || kind == FrameKind::kCapture ||
                         (kind == FrameKind::kInit && (worker != 0 || turns.catches_up(0) || is_gathered));
  const bool as_agreed = kind == FrameKind::kPush
                             ? encoding == Encoding::kAbsent || encoding == key.compression.encoding ||
                                   (encoding == Encoding::kPlain && key.takes_steps())
                             : encoding == (only_asks ? Encoding::kAbsent : Encoding::kPlain);
  if (!as_agreed) return "in another encoding than agreed";
  if (is_gathered && encoding == Encoding::kPlain && worker != worker_of(key.plan, index))
    return "another worker's to send";
  const bool fits = can_have_bytes(encoding, static_cast<DType>(header.dtype), elements_, header.payload_bytes);
  return fits ? nullptr : "of another size than agreed";
}

void* DenseShard::place_of(const Header& header, PooledBuffer& buffer) {
  if (static_cast<Encoding>(header.encoding) == Encoding::kAbsent) return nullptr;
  if (header.kind == FrameKind::kInit && !std::exchange(has_first_value_, true)) return value_;
  buffer = PooledBuffer(host_.transient, header.payload_bytes);
  return buffer.data();
}

size_t DenseShard::answer_bytes(const Header& header) const {
  return header.kind == FrameKind::kInit ? bytes_ : header.kind == FrameKind::kFetch ? sum_bytes_ : 0;
}

}  // namespace p3
