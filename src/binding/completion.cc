#include "binding/completion.h"

#include <chrono>

namespace p3::binding {
namespace {

std::chrono::steady_clock::time_point in(double seconds) {
  const std::chrono::duration<double> wait(seconds);
  return std::chrono::steady_clock::now() + std::chrono::ceil<std::chrono::steady_clock::duration>(wait);
}

}  // namespace

Worker::Done Completion::done_of(const std::shared_ptr<Completion>& self) {
  return [self](const Error* error, bool updated) {
    {
      MutexLock lock(self->mutex_);
      self->done_ = true;
      self->updated_ = updated;
      if (error != nullptr) self->error_ = *error;
    }
    self->changed_.notify_all();
  };
}

Worker::RowsDone Completion::rows_done_of(const std::shared_ptr<Completion>& self) {
  return [self](const Error* error, const RowsView& changed) {
    self->changed_rows_.assign(changed.ids, changed.ids + changed.count);  // before anybody may look
    done_of(self)(error, true);
  };
}

Worker::MoveDone Completion::move_done_of(const std::shared_ptr<Completion>& self) {
  return [done = done_of(self)](uint32_t) { done(nullptr, true); };
}

bool Completion::done() const {
  MutexLock lock(mutex_);
  return done_;
}

bool Completion::updated() const {
  MutexLock lock(mutex_);
  return updated_;
}

bool Completion::wait(double timeout_s) {
  const auto deadline = in(timeout_s);
  MutexLock lock(mutex_);
  while (!done_ && changed_.wait_until(lock, deadline)) continue;
  if (error_) throw *error_;
  return done_;
}

Worker::Done Completions::done_of(const std::shared_ptr<Completions>& self, int64_t token) {
  return [self, token](const Error* error, bool updated) {
    {
      MutexLock lock(self->mutex_);
      self->done_.emplace_back(token, updated);
      if (error != nullptr && !self->error_) self->error_ = *error;
    }
    self->changed_.notify_all();
  };
}

std::pair<int64_t, bool> Completions::next(double timeout_s) {
  const auto deadline = in(timeout_s);
  MutexLock lock(mutex_);
  while (done_.empty() && changed_.wait_until(lock, deadline)) continue;
  if (error_) throw *error_;
  if (done_.empty()) return {-1, false};
  const auto result = done_.front();
  done_.pop_front();
  return result;
}

}  // namespace p3::binding
