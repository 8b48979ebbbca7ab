// What a server has copied for a snapshot (docs/protocol.md, kCapture): value and optimizer state of a slice or a
// partition, as they were between two rounds, in memory of their own that outlives the server. Each names its snapshot.
// Threads: a plain value.
#pragma once

#include <cstdint>
#include <memory>

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

}  // namespace p3
