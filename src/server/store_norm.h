// The norm of what one server has summed of a store in a round. The shards of the store's keys report theirs, each as its
// round is complete; when all are in, the shard of the norm's own key tells the workers.
//
// A worker pushes its next round of a key only behind the norm of the round before, so reports are of one round at a time.
// Memory:  16 bytes for each shard.
// Threads: any.
#pragma once

#include <cstddef>
#include <utility>
#include <vector>

#include "numeric/norm.h"
#include "p3/thread_annotations.h"
#include "wire/urgency.h"

namespace p3 {

class Shard;

class StoreNorm {
 public:
  // Who tells the norm, and how urgent that is.
  struct Waiting {
    Shard* shard = nullptr;
    Urgency urgency{};
  };

  // One more shard will report: its place. Before the first round. Parts are added up in the order of places.
  size_t join() {
    MutexLock lock(mutex_);
    parts_.emplace_back();
    return parts_.size() - 1;
  }

  // Whether it is too late for another one.
  bool has_begun() {
    MutexLock lock(mutex_);
    return has_begun_;
  }

  // What the shard at that place has summed in the round. Who is to go on, as it was the last one.
  Waiting report(size_t place, const NormPart& part) {
    MutexLock lock(mutex_);
    has_begun_ = true;
    parts_[place] = part;
    if (++reported_ < parts_.size()) return {};
    return std::exchange(waiting_, {});
  }

  // False: some have not reported, and the last one's report() returns `who`.
  bool is_complete(const Waiting& who) {
    MutexLock lock(mutex_);
    if (reported_ < parts_.size()) waiting_ = who;
    return waiting_.shard == nullptr;
  }

  // Of the round that is complete; the next one begins.
  NormPart take() {
    MutexLock lock(mutex_);
    reported_ = 0;
    NormPart sum;
    for (const NormPart& part : parts_) sum.add(part);
    return sum;
  }

 private:
  Mutex mutex_;
  std::vector<NormPart> parts_ P3_GUARDED_BY(mutex_);  // by place
  size_t reported_ P3_GUARDED_BY(mutex_) = 0;
  bool has_begun_ P3_GUARDED_BY(mutex_) = false;
  Waiting waiting_ P3_GUARDED_BY(mutex_);
};

}  // namespace p3
