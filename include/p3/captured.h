// What a server has copied for a snapshot (docs/protocol.md, kCapture): value and optimizer state of a slice or a
// partition, as they were between two rounds, in memory of their own that outlives the server.
// Threads: any.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <tuple>
#include <utility>
#include <vector>

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

  size_t bytes() const { return elements * size_of(dtype); }
};

class Captured {
 public:
  // A shard captured again replaces its former copy, so this never holds more than one copy of all that there is.
  void add(CapturedArray array) {
    const std::lock_guard<std::mutex> lock(mutex_);
    arrays_[{array.wire_key, array.slice, array.part}] = std::move(array);
  }

  // All so far, ordered by key, slice and part; afterwards there are none.
  std::vector<CapturedArray> take() {
    std::vector<CapturedArray> taken;
    const std::lock_guard<std::mutex> lock(mutex_);
    for (auto& [place, array] : std::exchange(arrays_, {})) taken.push_back(std::move(array));
    return taken;
  }

 private:
  std::mutex mutex_;
  std::map<std::tuple<uint32_t, uint32_t, uint8_t>, CapturedArray> arrays_;
};

}  // namespace p3
