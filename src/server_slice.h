// One slice on its server, through a round: pushes come in, are summed in order, update the value, and the new value
// goes out. All of it where the slice is summed (always the same thread), except where a member says otherwise.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "p3/buffer_pool.h"
#include "p3/optimizer.h"
#include "p3/server.h"
#include "p3/slicing.h"
#include "p3/wire.h"

namespace p3 {

// What the slices of one key share. Immutable after define(), but for the optimizer (set before the first push).
struct ServerKey {
  KeyPlan plan;
  std::string name;
  int store = 0;
};

class ServerSlice {
 public:
  // `values` holds what stays (value, state), `gradients` what was received and not yet summed.
  ServerSlice(const ServerKey& key, uint32_t index, int num_workers, SumOrder order, int thread, BufferPool& values,
              BufferPool& gradients);
  ~ServerSlice();

  const ServerKey& key;
  const uint32_t index;
  const uint32_t elements;
  const size_t bytes;  // of the value, and of a pushed gradient
  const int thread;    // which of the summing threads, if there are any

  // --- the receiver thread -----------------------------------------------------------------------------------------
  // The round that each worker pushes next; 0: its init is still to come.
  std::vector<uint64_t> next_round;

  // --- any thread --------------------------------------------------------------------------------------------------
  // The round of the value that was broadcast last.
  std::atomic<uint64_t> published{0};
  // The round in progress is complete when every worker's push is in and no send borrows the last value any more:
  // one count for both, and whoever brings it to zero lets the round finish. So no value changes under a send.
  std::atomic<int> outstanding;

  // --- where it is summed ------------------------------------------------------------------------------------------
  // The place of the value; rank 0's init is received straight into it.
  void* value() const { return value_; }
  bool initialised = false;
  std::vector<int> waiting_for_init;  // workers that asked for the value before it was there

  // Takes over `gradient` (from the pool of gradients, `bytes` long) of one worker. Returns the rank of a worker whose
  // scalars differ from this one's, or -1.
  int add(int worker, const Header& header, void* gradient);
  // All are in: value = update(value, sum), or the sum itself without an optimizer.
  void finish(const Optimizer* optimizer);
  // Of this round, as its first push brought them.
  const RoundScalars& scalars() const { return scalars_; }
  // Of this round, as rank 0 pushed it.
  int32_t priority() const { return priority_; }

 private:
  void sum(void* gradient);

  const int num_workers_;
  const SumOrder order_;
  BufferPool& values_;
  BufferPool& gradients_;
  const DType dtype_, sum_dtype_;
  const size_t sum_bytes_;

  void* value_;
  void* master_ = nullptr;    // float32 copy of a float16 value
  std::vector<void*> state_;  // the optimizer's

  void* accumulator_ = nullptr;
  std::vector<void*> arrived_;  // received and not yet summed, by rank
  int summed_ = 0;              // ranks below this one are in the accumulator (SumOrder::kRank)
  int first_worker_ = -1;       // whose scalars the others are compared with
  RoundScalars scalars_;
  int32_t priority_ = 0;
};

}  // namespace p3
