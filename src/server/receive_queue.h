// The server's own prioritised receive queue: what was received and not yet worked on, the most urgent first. Worked off
// by a thread of its own, or, one task at a time, by the receiver.
// Threads: any; start_thread() before all else.
// Memory:  the tasks that are left with it go with their buffers, so it must go before the pools of these.
#pragma once

#include <pthread.h>

#include <cstdint>
#include <deque>
#include <functional>
#include <future>
#include <thread>
#include <utility>

#include "p3/thread_annotations.h"
#include "server/task.h"
#include "transport/priority_queue.h"

namespace p3 {

class ReceiveQueue {
 public:
  template <typename Run>
  void start_thread(Run run) {
    has_thread_ = true;
    thread_ = std::thread([this, run] {
      MutexLock lock(mutex_);
      while (true) {
        while (!stopping_ && calls_.empty() && queue_.empty()) wake_.wait(lock);
        if (stopping_) return;
        if (!calls_.empty()) {
          std::packaged_task<void()> call = std::move(calls_.front());
          calls_.pop_front();
          lock.unlock();
          call();
        } else {
          Task task = queue_.pop();
          lock.unlock();
          run(task);
        }
        lock.lock();
      }
    });
    pthread_setname_np(thread_.native_handle(), "p3-summer");
  }

  // True if there was more; what comes meanwhile, its owner asks for.
  template <typename Run>
  bool run_one(Run run) {
    MutexLock lock(mutex_);
    if (queue_.empty()) return false;
    Task task = queue_.pop();
    const bool more = !queue_.empty();
    lock.unlock();
    run(task);
    return more;
  }

  void push(const Urgency& urgency, Task task) {
    {
      MutexLock lock(mutex_);
      queue_.push(urgency, std::move(task));
    }
    if (has_thread_) wake_.notify_one();
  }

  // Runs it before all that waits here, and returns when it is done. Needs the thread.
  void call(std::function<void()> function) {
    std::packaged_task<void()> call(std::move(function));
    std::future<void> done = call.get_future();
    {
      MutexLock lock(mutex_);
      calls_.push_back(std::move(call));
    }
    wake_.notify_one();
    done.get();
  }

  void stop() {
    {
      MutexLock lock(mutex_);
      stopping_ = true;
    }
    wake_.notify_one();
    if (thread_.joinable()) thread_.join();
  }

  // How many tasks wait.
  uint64_t depth() const {
    MutexLock lock(mutex_);
    return queue_.size();
  }

 private:
  mutable Mutex mutex_;
  CondVar wake_;
  PriorityQueue<Task> queue_ P3_GUARDED_BY(mutex_);
  std::deque<std::packaged_task<void()>> calls_ P3_GUARDED_BY(mutex_);
  bool stopping_ P3_GUARDED_BY(mutex_) = false;
  bool has_thread_ = false;  // from start_thread() on: of `thread_` itself only who joins it may ask
  std::thread thread_;
};

}  // namespace p3
