// The norm of what one server has summed of a store in a round. The shards of the store's keys report theirs, each as its
// round is complete; when all are in, the shard of the norm's own key tells the workers.
//
// A worker pushes its next round of a key only behind the norm of the round before, so reports are of one round at a time.
// Memory:  24 bytes for each shard that there has been.
// Threads: any.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
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

  // One more shard will report: its place. Before the first round, or while all rest. Parts are added up in the order of
  // places.
  size_t join() {
    MutexLock lock(mutex_);
    ++members_;
    parts_.emplace_back();
    rounds_.push_back(0);
    return parts_.size() - 1;
  }

  // The shard at that place will report no more. While all rest.
  void leave(size_t place) {
    MutexLock lock(mutex_);
    --members_;
    parts_[place] = {};
  }

  // Whether it is too late for another one.
  bool has_begun() {
    MutexLock lock(mutex_);
    return has_begun_;
  }

  // What the shard at that place has summed in that round, or a lost server whose shard it was. Who is to go on, as it was
  // the last one.
  Waiting report(size_t place, uint64_t round, const NormPart& part) {
    MutexLock lock(mutex_);
    has_begun_ = true;
    // One that is inherited may be told already of what is summed again, as the norm overtakes values.
    if (is_inherited_ && !is_open_ && round <= told_) return {};
    parts_[place] = part;
    rounds_[place] = round;
    if (is_open_) return {};
    ++reported_;
    return reported_ < members_ ? Waiting() : std::exchange(waiting_, {});
  }

  // Of a server that this one inherits from, before any report: which round is to be told, go_on_behind() says.
  void open() {
    MutexLock lock(mutex_);
    is_open_ = is_inherited_ = true;
  }
  // The norms up to that round have been told.
  void go_on_behind(uint64_t round) {
    MutexLock lock(mutex_);
    has_begun_ |= round > 0;
    is_open_ = false;
    told_ = round;
    reported_ = static_cast<size_t>(std::count(rounds_.begin(), rounds_.end(), told_ + 1));
  }

  // False: some have not reported, and the last one's report() returns `who`.
  bool is_complete(const Waiting& who) {
    MutexLock lock(mutex_);
    if (reported_ < members_) waiting_ = who;
    return waiting_.shard == nullptr;
  }

  // Of the round that is complete; the next one begins.
  NormPart take() {
    MutexLock lock(mutex_);
    ++told_;
    reported_ = 0;
    NormPart sum;
    for (const NormPart& part : parts_) sum.add(part);
    return sum;
  }

 private:
  Mutex mutex_;
  size_t members_ P3_GUARDED_BY(mutex_) = 0;            // shards that report
  std::vector<NormPart> parts_ P3_GUARDED_BY(mutex_);   // by place
  std::vector<uint64_t> rounds_ P3_GUARDED_BY(mutex_);  // of these
  bool is_open_ P3_GUARDED_BY(mutex_) = false, is_inherited_ P3_GUARDED_BY(mutex_) = false;
  uint64_t told_ P3_GUARDED_BY(mutex_) = 0;    // of one that is inherited: the last round whose norm is told
  size_t reported_ P3_GUARDED_BY(mutex_) = 0;  // parts of the round behind it
  bool has_begun_ P3_GUARDED_BY(mutex_) = false;
  Waiting waiting_ P3_GUARDED_BY(mutex_);
};

}  // namespace p3
