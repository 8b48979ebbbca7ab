#include "worker/updater.h"

#include <pthread.h>

#include <utility>

namespace p3 {

void Updater::queue(const Urgency& urgency, Computation computation) {
  {
    MutexLock lock(mutex_);
    if (stopping_) return;
    queue_.push(urgency, std::move(computation));
    if (!thread_.joinable()) {
      thread_ = std::thread([this] { run(); });
      pthread_setname_np(thread_.native_handle(), "p3-updater");
    }
  }
  wake_.notify_one();
}

void Updater::run() {
  MutexLock lock(mutex_);
  while (true) {
    while (!stopping_ && queue_.empty()) wake_.wait(lock);
    if (stopping_) return;
    const Computation computation = queue_.pop();
    lock.unlock();
    computation();
    lock.lock();
  }
}

void Updater::stop() {
  std::thread thread;
  {
    MutexLock lock(mutex_);
    stopping_ = true;
    thread = std::move(thread_);
  }
  wake_.notify_one();
  if (thread.joinable()) thread.join();
}

}  // namespace p3
