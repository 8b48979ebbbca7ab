// The copies for snapshots that a server holds until they are taken.
// Threads: any.
#pragma once

#include <cstdint>
#include <iterator>
#include <map>
#include <tuple>
#include <utility>
#include <vector>

#include "p3/captured.h"
#include "p3/thread_annotations.h"

namespace p3 {

class Captures {
 public:
  // A shard captured again replaces its former copy, so this never holds more than one copy of all that there is.
  void add(std::vector<CapturedArray> of_shard, uint64_t snapshot) {
    MutexLock lock(mutex_);
    for (CapturedArray& array : of_shard) {
      array.snapshot = snapshot;
      arrays_[{array.wire_key, array.slice, array.part}] = std::move(array);
    }
  }

  // Those of a snapshot, ordered by key, slice and part. Afterwards there are only those of later ones: a snapshot that was
  // given up may be asked for while the copies of the next one come in.
  std::vector<CapturedArray> take(uint64_t snapshot) {
    std::vector<CapturedArray> taken;
    MutexLock lock(mutex_);
    for (auto it = arrays_.begin(); it != arrays_.end();) {
      const uint64_t its = it->second.snapshot;
      if (its == snapshot) taken.push_back(std::move(it->second));
      it = its > snapshot ? std::next(it) : arrays_.erase(it);
    }
    return taken;
  }

 private:
  Mutex mutex_;
  std::map<std::tuple<uint32_t, uint32_t, uint8_t>, CapturedArray> arrays_ P3_GUARDED_BY(mutex_);
};

}  // namespace p3
