// How a Python thread waits for operations: what their `done` tells is kept until the thread asks.
// Threads: any. Memory: a `done` shares what it tells, so either may end first.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "p3/error.h"
#include "p3/worker.h"

namespace p3::binding {

// Of one operation.
class Completion {
 public:
  static Worker::Done done_of(std::shared_ptr<Completion> self);
  // Of an operation on rows: also keeps which rows have changed.
  static Worker::RowsDone rows_done_of(std::shared_ptr<Completion> self);
  static Worker::MoveDone move_done_of(std::shared_ptr<Completion> self);

  bool done() const;
  bool updated() const;
  const std::vector<int64_t>& changed_rows() const { return changed_rows_; }  // once it is done
  // False after timeout_s. Throws the operation's error.
  bool wait(double timeout_s);

 private:
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  bool done_ = false;
  bool updated_ = false;
  std::vector<int64_t> changed_rows_;
  std::optional<Error> error_;
};

// Of many operations: which completes next.
class Completions {
 public:
  static Worker::Done done_of(std::shared_ptr<Completions> self, int64_t token);

  // {token, updated}, or {-1, false} after timeout_s. Throws the first error of any operation.
  std::pair<int64_t, bool> next(double timeout_s);

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::pair<int64_t, bool>> done_;
  std::optional<Error> error_;
};

}  // namespace p3::binding
