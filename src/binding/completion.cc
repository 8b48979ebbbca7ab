#include "binding/completion.h"

#include <pthread.h>

#include <chrono>

#include "base/epoll.h"

namespace p3::binding {
namespace {

unsigned forks_behind = 0;  // of this process and its ancestors; changes where only one thread is left
[[maybe_unused]] const int is_counting = pthread_atfork(nullptr, nullptr, [] { ++forks_behind; });

std::chrono::steady_clock::time_point in(double timeout_s) {
  return std::chrono::steady_clock::now() + seconds(timeout_s);
}

}  // namespace

unsigned Lineage::forks() { return forks_behind; }

bool Lineage::is_of_parent() const { return forks_ != forks_behind; }

void Lineage::check() const {
  if (is_of_parent())
    throw Error(ErrorKind::kStopped,
                "this process was forked from a worker and is no part of the job; use P3 in the parent only");
}

void Completion::operator()(const Error* error, bool updated) const {
  {
    MutexLock lock(state_->mutex);
    state_->done = true;
    state_->updated = updated;
    if (error != nullptr) state_->error = *error;
  }
  state_->changed.notify_all();
  if (state_->also) state_->also(error, updated);
}

void Completion::operator()(const Error* error, const RowsView& changed) const {
  state_->changed_rows.assign(changed.ids, changed.ids + changed.count);
  (*this)(error, true);
}

bool Completion::done() const {
  if (state_->lineage.is_of_parent()) return false;
  MutexLock lock(state_->mutex);
  return state_->done;
}

bool Completion::updated() const {
  if (state_->lineage.is_of_parent()) return false;
  MutexLock lock(state_->mutex);
  return state_->updated;
}

bool Completion::wait(double timeout_s) const {
  state_->lineage.check();
  const auto deadline = in(timeout_s);
  MutexLock lock(state_->mutex);
  while (!state_->done && state_->changed.wait_until(lock, deadline)) continue;
  if (state_->error) throw *state_->error;
  return state_->done;
}

Worker::Done Completions::done_of(int64_t token) const {
  return [state = state_, token](const Error* error, bool updated) {
    {
      MutexLock lock(state->mutex);
      state->done.emplace_back(token, updated);
      if (error != nullptr && !state->error) state->error = *error;
    }
    state->changed.notify_all();
  };
}

std::pair<int64_t, bool> Completions::next(double timeout_s) const {
  state_->lineage.check();
  const auto deadline = in(timeout_s);
  MutexLock lock(state_->mutex);
  while (state_->done.empty() && state_->changed.wait_until(lock, deadline)) continue;
  if (state_->error) throw *state_->error;
  if (state_->done.empty()) return {-1, false};
  const auto result = state_->done.front();
  state_->done.pop_front();
  return result;
}

}  // namespace p3::binding
