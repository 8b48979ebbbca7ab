// How a key is cut into slices and which server owns each: pure functions of what rank 0 announced.
#pragma once

#include <cstdint>
#include <limits>

#include "p3/dtype.h"

namespace p3 {

constexpr uint64_t kUnboundedStaleness = std::numeric_limits<int64_t>::max();  // nobody waits for anybody

constexpr uint32_t kDefaultSliceElements = 50000;  // P3 (SysML'19), section 5.7: the knee of the curve

// What all nodes agree on for one key. `first_slice` counts the slices of all keys announced before,
// so that the slices of the whole job, not of each key, go round robin over the servers.
struct KeyPlan {
  uint32_t wire_key = 0;
  DType dtype = DType::kFloat32;
  uint64_t elements = 0;
  uint32_t slice_elements = kDefaultSliceElements;
  uint64_t first_slice = 0;
  // Of a key of rows (rows.h): elements of a row, and how many partitions take the place of slices. 0: a dense key.
  uint32_t row_elements = 0;
  uint32_t partitions = 0;
  // How many rounds the fastest worker may be ahead of the slowest. 0: rounds are synchronous. Else each push updates the
  // key at once, and push r of a worker is answered when all others have pushed r - staleness. Such a key needs an
  // optimizer on its servers, each worker pushes it on its own, and it keeps its plan; an average is over all workers of
  // the job.
  uint64_t staleness = 0;
  bool is_vector = false;  // the tensor has at most one dimension
  // Of a key that is gathered instead of summed (factors.h): one part of `elements` from each so many workers, one after
  // the other. Each part is cut into slices of its own. 0: the key is summed.
  uint32_t parts = 0;

  bool is_synchronous() const { return staleness == 0; }
  bool has_rows() const { return row_elements > 0; }
  bool is_gathered() const { return parts > 0; }
};

struct Slice {
  uint64_t offset = 0;    // elements from the start of the key
  uint32_t elements = 0;  // 0 only for the single slice of an empty key
};

// Whether a key can be cut like this, and a frame of it sent.
bool makes_sense(const KeyPlan& plan);

// Of a key of rows: its partitions. An empty key has one empty slice, so that its rounds complete like any other's.
uint32_t slice_count(const KeyPlan& plan);

// index < slice_count(plan); not for a key of rows: see partition_at(). Of a gathered key: in all parts together.
Slice slice_at(const KeyPlan& plan, uint32_t index);

// Of a gathered key: the worker whose part the slice belongs to.
int worker_of(const KeyPlan& plan, uint32_t index);

// The server (0 .. num_servers-1) that owns the slice.
int server_of(const KeyPlan& plan, uint32_t index, int num_servers);

}  // namespace p3
