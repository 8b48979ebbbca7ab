#include "server/discipline/stale/stale_slice.h"

#include <cstring>
#include <utility>

#include "numeric/sum.h"

namespace p3 {

StaleSlice::StaleSlice(const ServerKey& its_key, uint32_t its_index, int its_thread, ShardHost& host)
    : StaleShard(its_key, its_index, its_thread, host),
      gradient_(1, dtype_, static_cast<uint32_t>(elements_), host.transient) {}

// --- rounds, of each worker its own ----------------------------------------------------------------------------------

void StaleSlice::push(Task& task, Reply& reply) {
  const Optimizer* const its = optimizer();
  reply.problem = unanswered_.problem_with_push(task.worker);
  if (reply.problem == nullptr && task.payload) reply.problem = Unanswered::problem_with_gradient(its);
  if (reply.problem == nullptr) reply.problem = problem_with_gradient_of(task);
  if (reply.problem != nullptr) return;
  if (task.payload && !is_before_value(task.worker)) update(*its, task);
  reply.is_summed = true;
  const bool nobody_goes_on = unanswered_.add(task.worker, task.header);
  reply.published = header_of(FrameKind::kValue, Encoding::kPlain, task.header.round, task.header.priority);
  answer_waiting(nobody_goes_on, reply);
}

void StaleSlice::update(const Optimizer& optimizer, Task& task) {
  make_state(optimizer);
  const auto now = optimizer_as_of(task.fields);
  const RoundScalars scalars = next_update(*now, task.header.scalars);
  gradient_.add(0, std::move(task.payload), key.plan.codec);
  const PooledBuffer gradient = gradient_.take();
  now->update(dtype_, value_, master_, state_.data(), gradient.data(), elements_, scalars);
}

void StaleSlice::answer_waiting(bool nobody_goes_on, Reply& reply) {
  const std::vector<int> answered = unanswered_.take_answerable();
  if (answered.empty()) return;
  Frame frame = copy_of_value(answered);
  frame.header.part = nobody_goes_on;
  set_least_clock(frame.header, unanswered_.least_clock());
  for (int worker : answered) {
    frame.header.round = unanswered_.round(worker);
    frame.header.priority = unanswered_.priority(worker);
    send(worker, frame, reply);
  }
}

// To those who ask for it, between two of their pushes.
void StaleSlice::send_value(const std::vector<int>& workers, Reply& reply, bool) {
  if (workers.empty()) return;
  Frame frame = copy_of_value(workers);
  for (int worker : workers) {
    frame.header.round = unanswered_.round(worker);
    send(worker, frame, reply);
  }
}

Frame StaleSlice::copy_of_value(const std::vector<int>& workers) {
  const Header header = header_of(FrameKind::kValue, Encoding::kPlain, 0, 0);
  return copy_of(header, value_, bytes_, static_cast<int>(workers.size()));
}

Frame StaleSlice::copy_of(const Header& header, const void* array, size_t bytes, int receivers) {
  PooledBuffer copy(host_.transient, bytes);
  std::memcpy(copy.data(), array, bytes);
  return lent_.lend(header, std::move(copy), bytes, receivers);
}

// --- other contents --------------------------------------------------------------------------------------------------

void StaleSlice::replace_value(PooledBuffer value) {
  std::memcpy(value_, value.data(), bytes_);
  if (master_ != nullptr) start_sum(dtype_, master_, value_, elements_);
}

void StaleSlice::fetch(Task& task, Reply& reply) {
  Header header = task.header;
  header.kind = FrameKind::kPart;
  header.encoding = static_cast<uint8_t>(Encoding::kPlain);
  send(task.worker, copy_of(header, part_at(task.header.part), sum_bytes_, 1), reply);
}

void StaleSlice::store(Task& task, Reply& reply) {
  std::memcpy(part_at(task.header.part), task.payload.data(), sum_bytes_);
  acknowledge(task, reply);
}

}  // namespace p3
