// What a server has copied for a snapshot (docs/protocol.md, kCapture): value and optimizer state of a slice or a
// partition, as they were between two rounds, in memory of their own that outlives the server. Each says for which snapshot.
// Threads: any.
#pragma once

#include <cstdint>
#include <iterator>
#include <map>
#include <memory>
#include <tuple>
#include <utility>
#include <vector>

#include "base/thread_annotations.h"
#include "p3/dtype.h"

namespace p3 {

// Not zeroed. Throws std::bad_alloc.
inline std::shared_ptr<char> new_bytes(size_t count) { return {new char[count], std::default_delete<char[]>()}; }

struct CapturedArray {
  uint32_t wire_key = 0;
  uint32_t slice = 0;  // or partition
  uint8_t part = 0;    // 0: the value; else as Header::part
  DType dtype = DType::kFloat32;
  uint64_t elements = 0;
  std::shared_ptr<char> data;
  uint64_t snapshot = 0;  // the round of the snapshot, as the script counts

  size_t bytes() const { return elements * size_of(dtype); }
};

class Captured {
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
