// One slice on its server, through a round: pushes come in, are summed in order, update the value, and the new value
// goes out. All of it where the slice is summed (always the same thread), except where a member says otherwise.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "p3/buffer_pool.h"
#include "p3/compression.h"
#include "p3/optimizer.h"
#include "p3/server.h"
#include "p3/slicing.h"
#include "p3/wire.h"

namespace p3 {

// What the slices of one key share. Immutable after define().
struct ServerKey {
  KeyPlan plan;
  std::string name;
  int store = 0;
  Compression compression;  // of what is pushed; and float16 sums are sent as such
  bool average = false;     // of the gradients of those that took part, instead of their sum
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
  const size_t bytes;         // of the value
  const size_t pushed_bytes;  // of a pushed gradient, as it comes over the wire
  const int thread;           // which of the summing threads, if there are any

  // --- the receiver thread -----------------------------------------------------------------------------------------
  // The round that each worker pushes next; 0: its first init is still to come.
  std::vector<uint64_t> next_round;
  bool has_value = false;       // rank 0's first init has come, or is coming
  std::vector<uint32_t> inits;  // received from each worker

  // --- any thread --------------------------------------------------------------------------------------------------
  // The round of the value that was broadcast last.
  std::atomic<uint64_t> published{0};
  // The round in progress is complete when every worker's push is in and no send borrows the value or a state any more:
  // one count for all of what is still to come, and whoever brings it to zero lets the round finish. So nothing changes
  // under a send.
  std::atomic<int> outstanding;

  // --- where it is summed ------------------------------------------------------------------------------------------
  // The place of the value; rank 0's first init is received straight into it.
  void* value() const { return value_; }
  // Later ones are received elsewhere, because the value may still be on its way to a slow worker.
  void replace_value(const void* value);
  // Notes the n-th init of a worker. Returns the workers who can be answered now: the n-th of each gets what rank 0's
  // n-th brought, or a later one.
  std::vector<int> init(int worker, uint32_t n);

  // Takes over `gradient` (from the pool of gradients, `pushed_bytes` long) of one worker; null if it has none. Returns
  // the rank of a worker whose scalars differ from this one's, or -1.
  int add(int worker, const Header& header, void* gradient);
  // All are in: value = update(value, sum), or the sum itself without an optimizer.
  void finish(const Optimizer* optimizer);
  // What the last round left to be sent: the payload and its encoding.
  Encoding published_encoding() const { return published_encoding_; }
  const void* published_payload() const { return published_encoding_ == Encoding::kFloat16 ? wire_value_ : value_; }

  // A state that the optimizer has (Header::part), made if it is not there yet.
  const void* state(const Optimizer& optimizer, uint8_t part) { return state_at(optimizer, part); }
  void replace_state(const Optimizer& optimizer, uint8_t part, const void* content);
  size_t state_bytes() const { return sum_bytes_; }
  // Of this round, as its first push brought them.
  const RoundScalars& scalars() const { return scalars_; }
  // Of this round, as rank 0 pushed it.
  int32_t priority() const { return priority_; }

 private:
  struct Arrived {
    bool here = false;
    void* gradient = nullptr;  // null: the worker has none
  };

  void sum(void* gradient);
  void publish_sum();
  void make_state(const Optimizer& optimizer);
  void*& state_at(const Optimizer& optimizer, uint8_t part);
  void make_writable(void*& array, size_t size);
  void drop_replaced();

  const int num_workers_;
  const SumOrder order_;
  BufferPool& values_;
  BufferPool& gradients_;
  const DType dtype_, sum_dtype_;
  const size_t sum_bytes_;

  void* value_;
  void* wire_value_ = nullptr;  // the sum as float16
  Encoding published_encoding_ = Encoding::kPlain;
  std::vector<std::pair<void*, size_t>> replaced_;  // former values and states that a send may still borrow
  uint32_t inits_of_rank_0_ = 0;
  std::vector<std::pair<int, uint32_t>> waiting_for_init_;  // worker, and the how manieth init of its

  void* master_ = nullptr;    // float32 copy of a float16 value
  std::vector<void*> state_;  // the optimizer's

  void* accumulator_ = nullptr;
  std::vector<Arrived> arrived_;  // received and not yet summed, by rank
  int pushed_ = 0;                // workers whose push is in
  int summed_ = 0;                // ranks below this one are in the accumulator (SumOrder::kRank)
  int present_ = 0;               // workers with a gradient in this round
  int first_worker_ = -1;         // whose scalars the others are compared with
  RoundScalars scalars_;
  int32_t priority_ = 0;
};

}  // namespace p3
