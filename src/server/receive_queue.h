// The server's own prioritised receive queue, and the thread that works it off, if there is one.
#pragma once

#include <pthread.h>

#include <algorithm>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <future>
#include <limits>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "transport/priority_queue.h"
#include "p3/wire.h"
#include "server/partition.h"
#include "server/slice.h"

namespace p3 {

struct Task {
  enum class Kind {
    kInit,
    kPush,
    kFinish,
    kFetch,
    kStore,
    kPushRows,
    kFetchRows,
    kStoreRows,
    kCapture,
    kWish,
    kCall
  } kind;
  ServerShard* shard;
  int worker = -1;
  Header header{};
  void* payload = nullptr;                     // from the pool of gradients; null: none
  uint32_t inits = 0;                          // kInit: of this worker, this one included
  uint32_t incarnation = 0;                    // which process of that rank sent it, counted from 1
  bool is_filled = false;                      // a push that a lost worker might have made
  uint64_t held_bytes = 0;                     // that the transport was told of
  std::packaged_task<void()>* call = nullptr;  // kCall; its owner waits for it

  // Each kind is about one kind of shard, but for kInit and kCapture.
  ServerSlice& slice() const { return static_cast<ServerSlice&>(*shard); }
  ServerPartition& partition() const { return static_cast<ServerPartition&>(*shard); }
};

// The server's own prioritised receive queue: what was received and not yet summed, most urgent slice first. Worked off
// by a thread of its own, or, one task at a time, by the receiver.
class Summer {
 public:
  template <typename Run>
  void start_thread(Run run) {
    thread_ = std::thread([this, run] {
      while (true) {
        std::unique_lock<std::mutex> lock(mutex_);
        wake_.wait(lock, [this] { return stopping_ || !queue_.empty(); });
        if (stopping_) return;
        const Task task = queue_.pop();
        lock.unlock();
        run(task);
      }
    });
    pthread_setname_np(thread_.native_handle(), "p3-summer");
  }

  // True if there was more; what comes meanwhile, its owner asks for.
  template <typename Run>
  bool run_one(Run run) {
    std::unique_lock<std::mutex> lock(mutex_);
    if (queue_.empty()) return false;
    const Task task = queue_.pop();
    const bool more = !queue_.empty();
    lock.unlock();
    run(task);
    return more;
  }

  void push(const Urgency& urgency, const Task& task) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      queue_.push(urgency, task);
      peak_ = std::max<uint64_t>(peak_, queue_.size());
    }
    if (thread_.joinable()) wake_.notify_one();
  }

  // Runs `call` before all that waits here, and returns when it is done. Needs the thread.
  void call(std::function<void()> function) {
    std::packaged_task<void()> call(std::move(function));
    Task task{Task::Kind::kCall, nullptr};
    task.call = &call;
    push({0, std::numeric_limits<int32_t>::max()}, task);
    call.get_future().get();
  }

  void stop() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      stopping_ = true;
    }
    wake_.notify_one();
    if (thread_.joinable()) thread_.join();
  }

  // How many tasks wait, and the most that ever did.
  std::pair<uint64_t, uint64_t> depth() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return {queue_.size(), peak_};
  }

  // After stop(): what was never run.
  std::vector<Task> leftover() {
    std::vector<Task> tasks;
    while (!queue_.empty()) tasks.push_back(queue_.pop());
    return tasks;
  }

 private:
  mutable std::mutex mutex_;
  std::condition_variable wake_;
  PriorityQueue<Task> queue_;
  uint64_t peak_ = 0;
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace p3
