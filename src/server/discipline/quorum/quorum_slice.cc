#include "server/discipline/quorum/quorum_slice.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

#include "base/epoll.h"
#include "numeric/sum.h"
#include "server/discipline/stale/unanswered.h"

namespace p3 {

QuorumSlice::QuorumSlice(const ServerKey& its_key, uint32_t its_index, int its_thread, ShardHost& host)
    : CopiedSlice(its_key, its_index, its_thread, host),
      quorum_(workers(), its_key.plan.quorum, seconds(its_key.plan.grace_s)),
      pushes_(workers()),
      on_time_(static_cast<int>(workers()), dtype_, static_cast<uint32_t>(elements_), host.transient,
               key.plan.codec.encoding),
      late_(1, dtype_, static_cast<uint32_t>(elements_), host.transient, key.plan.codec.encoding, /*in_order=*/false),
      weights_(workers()) {}

void QuorumSlice::push(Task& task, Reply& reply) {
  reply.problem = problem_with_push(task);
  if (reply.problem != nullptr) return;
  reply.is_summed = true;
  pushes_[static_cast<size_t>(task.worker)] = {task.header.round, task.header.priority};
  if (task.has_departed)
    quorum_.leave(task.worker);
  else if (is_last_step(task.header))
    quorum_.stand_aside(task.worker);
  else
    add(task, /*is_late=*/quorum_.push(task.worker, Quorum::Clock::now()));
  resume(reply);
}

const char* QuorumSlice::problem_with_push(const Task& task) const {
  if (quorum_.waits(task.worker) && !task.has_departed) return "before its last push was answered";
  if (!task.payload) return nullptr;
  if (const char* missing = Unanswered::problem_with_gradient(optimizer())) return missing;
  const double weight = task.header.scalars.rescale;
  return std::isfinite(weight) && weight >= 0 ? problem_with_gradient_of(task) : "of a weight that is none";
}

void QuorumSlice::add(Task& task, bool is_late) {
  if (!task.payload) return;
  settings_ = {task.header.scalars, task.fields};
  const Compression sent = key.plan.codec.in(static_cast<Encoding>(task.header.encoding));
  if (is_late) {
    late_weight_ += task.header.scalars.rescale;
    late_.add(0, std::move(task.payload), sent);
  } else {
    weights_[static_cast<size_t>(task.worker)] = task.header.scalars.rescale;
    on_time_.add(task.worker, std::move(task.payload), sent);
  }
}

void QuorumSlice::resume(Reply& reply) {
  const Quorum::Settled settled = quorum_.settle(Quorum::Clock::now());
  if (settled.closes) {
    update();
    reply.published = header_of(FrameKind::kValue, Encoding::kPlain, ++closed_, 0);
  }
  host_.resume_at(*this, quorum_.is_over_at());
  answer(settled, reply);
}

void QuorumSlice::answer(const Quorum::Settled& settled, Reply& reply) {
  if (settled.answers.empty()) return;
  Frame frame = copy_of_value(settled.answers.size());
  frame.header.part = settled.have_met;
  for (const auto [worker, is_in_value] : settled.answers) {
    const Push& its = pushes_[static_cast<size_t>(worker)];
    frame.header.round = its.round;
    frame.header.priority = its.priority;
    set_least_clock(frame.header, is_in_value ? its.round : its.round - 1);
    send(worker, frame, reply);
  }
}

void QuorumSlice::update() {
  const PooledBuffer sum = take_sum();
  RoundScalars scalars = settings_.scalars;
  const double weight = std::accumulate(weights_.begin(), weights_.end(), 0.0) + std::exchange(late_weight_, 0);
  weights_.assign(weights_.size(), 0);
  scalars.rescale = weight > 0 ? 1 / weight : 0;
  if (!sum) return;  // nobody had anything to add
  const Optimizer& its = *optimizer();
  make_state(its);
  const auto now = optimizer_as_of(settings_.fields);
  now->update(dtype_, value_, master_, state_.data(), sum.data(), elements_, next_update(*now, scalars));
}

// Of the on-time pushes in the order of ranks, so that without late ones two runs have the same bits.
PooledBuffer QuorumSlice::take_sum() {
  for (int worker = 0; worker < static_cast<int>(pushes_.size()); ++worker)
    if (!on_time_.has(worker)) on_time_.add(worker, {});
  PooledBuffer sum = on_time_.take();
  PooledBuffer late = late_.take();
  if (!sum) return late;
  if (late) add_to_sum(sum_dtype_, sum.data(), late.data(), elements_);
  return sum;
}

}  // namespace p3
