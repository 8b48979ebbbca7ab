// How a key is cut into slices and which server owns each: pure functions of what rank 0 announced.
#pragma once

#include <cstdint>

#include "p3/key_plan.h"

namespace p3 {

struct Slice {
  uint64_t offset = 0;    // elements from the start of the key
  uint32_t elements = 0;  // 0 only for the single slice of an empty key
};

// Of a key of rows: its partitions. An empty key has one empty slice, so that its rounds complete like any other's.
uint32_t slice_count(const KeyPlan& plan);

// index < slice_count(plan); not for a key of rows: see partition_at(). Of a gathered key: in all parts together.
Slice slice_at(const KeyPlan& plan, uint32_t index);

// Of a gathered key: the worker whose part the slice belongs to.
int worker_of(const KeyPlan& plan, uint32_t index);

// The server (0 .. num_servers-1) that owns the slice.
int server_of(const KeyPlan& plan, uint32_t index, int num_servers);

}  // namespace p3
