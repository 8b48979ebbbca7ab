// What can be asked of a key, as operations: Worker's methods of the same names describe them.
// Threads: any; they read of the key what never changes.
#pragma once

#include <cstdint>
#include <vector>

#include "worker/key.h"

namespace p3 {

// `value`: null on other ranks than 0.
Operation init(Key& key, const void* value, void* landing, int32_t priority, Worker::Done done);
Operation push(Key& key, const void* gradient, void* landing, int32_t priority, const RoundScalars& scalars,
               Worker::Done done);
Operation skip(Key& key, void* landing, int32_t priority, Worker::Done done);
Operation fetch(Key& key, uint8_t part, void* landing, Worker::Done done);
Operation store(Key& key, uint8_t part, const void* content, Worker::Done done);
// Of a key of either kind. `asks`: the servers are to copy it, as they are on rank 0.
Operation capture(Key& key, bool asks, uint64_t snapshot, float* residual, Worker::Done done);

// Of keys of rows. The first value is several: rank 0's rows go to the servers; all learn that they are there; who lacks
// them fetches them.
std::vector<Operation> init_rows(Key& key, bool is_rank_0, const void* value, void* landing, int32_t priority,
                                 Worker::Done done);
Operation push_rows(Key& key, const RowsView& gradient, void* landing, int32_t priority, const RoundScalars& scalars,
                    Worker::RowsDone done);
Operation skip_rows(Key& key, void* landing, int32_t priority, Worker::Done done);
Operation fetch_rows(Key& key, uint8_t part, const RowsView& wanted, void* landing, int32_t priority,
                     Worker::Done done);
Operation store_rows(Key& key, uint8_t part, const RowsView& content, Worker::Done done);
// A worker's share of a move to another plan: the rows are fetched with the first and stored with the second, part by
// part; once all workers' are there, the servers answer the init of the second.
std::vector<Operation> move_rows(Key& key, const Successor& successor);

}  // namespace p3
