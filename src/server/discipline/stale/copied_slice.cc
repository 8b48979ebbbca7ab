#include "server/discipline/stale/copied_slice.h"

#include <cstring>
#include <utility>

#include "numeric/sum.h"

namespace p3 {

// To those who ask for it, between two of their pushes.
void CopiedSlice::send_value(const std::vector<int>& workers, Reply& reply, bool) {
  if (workers.empty()) return;
  Frame frame = copy_of_value(workers.size());
  for (int worker : workers) {
    frame.header.round = round_of(worker);
    send(worker, frame, reply);
  }
}

Frame CopiedSlice::copy_of_value(size_t receivers) {
  const Header header = header_of(FrameKind::kValue, Encoding::kPlain, 0, 0);
  return copy_of(header, value_, bytes_, static_cast<int>(receivers));
}

Frame CopiedSlice::copy_of(const Header& header, const void* array, size_t bytes, int receivers) {
  PooledBuffer copy(host_.transient, bytes);
  std::memcpy(copy.data(), array, bytes);
  return lent_.lend(header, std::move(copy), bytes, receivers);
}

void CopiedSlice::replace_value(PooledBuffer value) {
  std::memcpy(value_, value.data(), bytes_);
  if (master_ != nullptr) start_sum(dtype_, master_, value_, elements_);
}

void CopiedSlice::fetch(Task& task, Reply& reply) {
  Header header = task.header;
  header.kind = FrameKind::kPart;
  header.encoding = static_cast<uint8_t>(Encoding::kPlain);
  send(task.worker, copy_of(header, part_at(task.header.part), sum_bytes_, 1), reply);
}

void CopiedSlice::store(Task& task, Reply& reply) {
  std::memcpy(part_at(task.header.part), task.payload.data(), sum_bytes_);
  acknowledge(task, reply);
}

}  // namespace p3
