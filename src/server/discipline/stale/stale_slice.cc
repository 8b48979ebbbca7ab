#include "server/discipline/stale/stale_slice.h"

#include <utility>
#include <vector>

namespace p3 {

StaleSlice::StaleSlice(const ServerKey& its_key, uint32_t its_index, int its_thread, ShardHost& host)
    : CopiedSlice(its_key, its_index, its_thread, host),
      unanswered_(workers(), its_key.plan.staleness),
      gradient_(1, dtype_, static_cast<uint32_t>(elements_), host.transient) {}

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
  Frame frame = copy_of_value(answered.size());
  frame.header.part = nobody_goes_on;
  set_least_clock(frame.header, unanswered_.least_clock());
  for (int worker : answered) {
    frame.header.round = unanswered_.round(worker);
    frame.header.priority = unanswered_.priority(worker);
    send(worker, frame, reply);
  }
}

}  // namespace p3
