// The thread on which a worker computes what is too much for the one that receives: updates of its own, the most urgent
// first. It starts with the first of them.
// Threads: any, but stop() neither from a computation nor with a lock held that one takes.
#pragma once

#include <functional>
#include <thread>

#include "p3/thread_annotations.h"
#include "transport/priority_queue.h"

namespace p3 {

class Updater {
 public:
  using Computation = std::function<void()>;

  ~Updater() { stop(); }
  // It must not throw. Dropped after stop().
  void queue(const Urgency& urgency, Computation computation);
  // Returns when none is running any more; none begins afterwards.
  void stop();

 private:
  void run();

  Mutex mutex_;
  CondVar wake_;
  PriorityQueue<Computation> queue_ P3_GUARDED_BY(mutex_);
  bool stopping_ P3_GUARDED_BY(mutex_) = false;
  std::thread thread_ P3_GUARDED_BY(mutex_);
};

}  // namespace p3
