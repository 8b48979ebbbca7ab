// How a Python thread waits for operations: what their `done` tells is kept until the thread asks.
// Threads: any. Memory: a `done` shares what it tells, so either may end first.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "base/thread_annotations.h"
#include "p3/error.h"
#include "p3/worker.h"

namespace p3::binding {

// Of one operation.
class Completion {
 public:
  static Worker::Done done_of(const std::shared_ptr<Completion>& self);
  // Of an operation on rows: also keeps which rows have changed.
  static Worker::RowsDone rows_done_of(const std::shared_ptr<Completion>& self);
  static Worker::MoveDone move_done_of(const std::shared_ptr<Completion>& self);

  bool done() const;
  bool updated() const;
  const std::vector<int64_t>& changed_rows() const { return changed_rows_; }  // once it is done
  // False after timeout_s. Throws the operation's error.
  bool wait(double timeout_s);

 private:
  mutable Mutex mutex_;
  CondVar changed_;
  bool done_ P3_GUARDED_BY(mutex_) = false;
  bool updated_ P3_GUARDED_BY(mutex_) = false;
  std::vector<int64_t> changed_rows_;  // written before done_ is set
  std::optional<Error> error_ P3_GUARDED_BY(mutex_);
};

// Of many operations: which completes next.
class Completions {
 public:
  static Worker::Done done_of(const std::shared_ptr<Completions>& self, int64_t token);

  // {token, updated}, or {-1, false} after timeout_s. Throws the first error of any operation.
  std::pair<int64_t, bool> next(double timeout_s);

 private:
  Mutex mutex_;
  CondVar changed_;
  std::deque<std::pair<int64_t, bool>> done_ P3_GUARDED_BY(mutex_);
  std::optional<Error> error_ P3_GUARDED_BY(mutex_);
};

}  // namespace p3::binding
