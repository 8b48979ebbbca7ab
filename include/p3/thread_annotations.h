// Locks that the compiler checks: with -Wthread-safety, Clang refuses code that touches what a lock guards without it.
//
//   Mutex mutex_;
//   int count_ P3_GUARDED_BY(mutex_) = 0;
//   void add() P3_EXCLUDES(mutex_) { MutexLock lock(mutex_); ++count_; changed_.notify_one(); }
//   void wait() P3_EXCLUDES(mutex_) { MutexLock lock(mutex_); while (count_ == 0) changed_.wait(lock); }
//   void reset() P3_REQUIRES(mutex_) { count_ = 0; }  // by who holds the lock
//
// A condition is a loop and not a lambda: the analysis does not see inside one that it is called with the lock held.
// Cost: none. Each class is the one of the standard library, which the analysis does not know.
#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>

#if defined(__clang__)
#define P3_THREAD_ATTRIBUTE(x) __attribute__((x))
#else
#define P3_THREAD_ATTRIBUTE(x)
#endif

#define P3_CAPABILITY(name) P3_THREAD_ATTRIBUTE(capability(name))
#define P3_SCOPED_CAPABILITY P3_THREAD_ATTRIBUTE(scoped_lockable)
#define P3_GUARDED_BY(...) P3_THREAD_ATTRIBUTE(guarded_by(__VA_ARGS__))
#define P3_REQUIRES(...) P3_THREAD_ATTRIBUTE(requires_capability(__VA_ARGS__))
#define P3_EXCLUDES(...) P3_THREAD_ATTRIBUTE(locks_excluded(__VA_ARGS__))
#define P3_ACQUIRE(...) P3_THREAD_ATTRIBUTE(acquire_capability(__VA_ARGS__))
#define P3_RELEASE(...) P3_THREAD_ATTRIBUTE(release_capability(__VA_ARGS__))

namespace p3 {

class P3_CAPABILITY("mutex") Mutex {
  friend class MutexLock;
  std::mutex mutex_;
};

// Holds the lock to the end of its scope, but for what lies between unlock() and lock().
class P3_SCOPED_CAPABILITY MutexLock {
 public:
  explicit MutexLock(Mutex& mutex) P3_ACQUIRE(mutex) : lock_(mutex.mutex_) {}
  ~MutexLock() P3_RELEASE() {}

  void unlock() P3_RELEASE() { lock_.unlock(); }
  void lock() P3_ACQUIRE() { lock_.lock(); }

 private:
  friend class CondVar;
  std::unique_lock<std::mutex> lock_;
};

// Waits let go of the lock meanwhile and may end for no reason: ask for the condition again.
class CondVar {
 public:
  void wait(MutexLock& lock) { changed_.wait(lock.lock_); }
  // False: the deadline has passed.
  template <typename Clock, typename Duration>
  bool wait_until(MutexLock& lock, const std::chrono::time_point<Clock, Duration>& deadline) {
    return changed_.wait_until(lock.lock_, deadline) == std::cv_status::no_timeout;
  }
  void notify_one() { changed_.notify_one(); }
  void notify_all() { changed_.notify_all(); }

 private:
  std::condition_variable changed_;
};

}  // namespace p3
