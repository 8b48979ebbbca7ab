// How a Python thread waits for operations: what they tell when they are done is kept until the thread asks.
// Threads: any. Memory: copies share what they are told, so a worker may keep one longer than who waits.
// In the child of a fork nothing is ever told to what was made before, and a thread that is not there may have its lock:
// it is never done, and waiting for it throws Error(kStopped) at once.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "p3/error.h"
#include "p3/thread_annotations.h"
#include "p3/worker.h"

namespace p3::binding {

// Which process this is: that of before the last fork, or its child.
class Lineage {
 public:
  bool is_of_parent() const;
  void check() const;  // throws Error(kStopped) if it is

 private:
  static unsigned forks();
  const unsigned forks_ = forks();
};

// Of one operation, which is given this as its `done`.
class Completion {
 public:
  void operator()(const Error* error, bool updated) const;
  void operator()(const Error* error, const RowsView& changed) const;
  // Called behind that, on the same thread. Before the operation begins.
  void also(Worker::Done done) const { state_->also = std::move(done); }

  bool done() const;
  bool updated() const;
  const std::vector<int64_t>& changed_rows() const { return state_->changed_rows; }  // once it is done
  // False after timeout_s. Throws the operation's error.
  bool wait(double timeout_s) const;

 private:
  struct State {
    const Lineage lineage{};
    Mutex mutex;
    CondVar changed;
    bool done P3_GUARDED_BY(mutex) = false;
    bool updated P3_GUARDED_BY(mutex) = false;
    std::optional<Error> error P3_GUARDED_BY(mutex);
    std::vector<int64_t> changed_rows;  // written before `done` is set
    Worker::Done also;                  // written before the operation begins
  };
  std::shared_ptr<State> state_ = std::make_shared<State>();
};

// Of many operations: which completes next.
class Completions {
 public:
  Worker::Done done_of(int64_t token) const;

  // {token, updated}, or {-1, false} after timeout_s. Throws the first error of any operation.
  std::pair<int64_t, bool> next(double timeout_s) const;

 private:
  struct State {
    const Lineage lineage{};
    Mutex mutex;
    CondVar changed;
    std::deque<std::pair<int64_t, bool>> done P3_GUARDED_BY(mutex);
    std::optional<Error> error P3_GUARDED_BY(mutex);
  };
  std::shared_ptr<State> state_ = std::make_shared<State>();
};

}  // namespace p3::binding
