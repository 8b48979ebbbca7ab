#include "binding/completion.h"

#include <chrono>

namespace p3::binding {

Worker::Done Completion::done_of(std::shared_ptr<Completion> self) {
  return [self](const Error* error, bool updated) {
    {
      const std::lock_guard<std::mutex> lock(self->mutex_);
      self->done_ = true;
      self->updated_ = updated;
      if (error != nullptr) self->error_ = *error;
    }
    self->changed_.notify_all();
  };
}

Worker::RowsDone Completion::rows_done_of(std::shared_ptr<Completion> self) {
  return [self](const Error* error, const RowsView& changed) {
    self->changed_rows_.assign(changed.ids, changed.ids + changed.count);  // before anybody may look
    done_of(self)(error, true);
  };
}

Worker::MoveDone Completion::move_done_of(std::shared_ptr<Completion> self) {
  return [done = done_of(std::move(self))](uint32_t) { done(nullptr, true); };
}

bool Completion::done() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return done_;
}

bool Completion::updated() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return updated_;
}

bool Completion::wait(double timeout_s) {
  std::unique_lock<std::mutex> lock(mutex_);
  const bool in_time = changed_.wait_for(lock, std::chrono::duration<double>(timeout_s), [this] { return done_; });
  if (error_) throw *error_;
  return in_time;
}

Worker::Done Completions::done_of(std::shared_ptr<Completions> self, int64_t token) {
  return [self, token](const Error* error, bool updated) {
    {
      const std::lock_guard<std::mutex> lock(self->mutex_);
      self->done_.emplace_back(token, updated);
      if (error != nullptr && !self->error_) self->error_ = *error;
    }
    self->changed_.notify_all();
  };
}

std::pair<int64_t, bool> Completions::next(double timeout_s) {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait_for(lock, std::chrono::duration<double>(timeout_s), [this] { return !done_.empty(); });
  if (error_) throw *error_;
  if (done_.empty()) return {-1, false};
  const auto result = done_.front();
  done_.pop_front();
  return result;
}

}  // namespace p3::binding
