// One slice on its server, through a round: pushes come in, are summed in order, update the value, and the new value
// goes out. All of it where the slice is summed (always the same thread), except where a member says otherwise.
#pragma once

#include <atomic>
#include <cstdint>
#include <utility>
#include <vector>

#include "base/buffer_pool.h"
#include "p3/compression.h"
#include "p3/optimizer.h"
#include "numeric/rank_sum.h"
#include "p3/server.h"
#include "p3/slicing.h"
#include "p3/wire.h"
#include "server/shard.h"

namespace p3 {

class ServerSlice final : public ServerShard, public Lender {
 public:
  // `values` holds what stays (value, state), `gradients` what was received and not yet summed.
  ServerSlice(const ServerKey& key, uint32_t index, SumOrder order, int thread, BufferPool& values,
              BufferPool& gradients);
  ~ServerSlice() override;

  const uint32_t elements;
  const size_t bytes;         // of the value
  const size_t pushed_bytes;  // of a pushed gradient, as it comes over the wire

  // --- the receiver thread -----------------------------------------------------------------------------------------
  bool has_value = false;  // rank 0's first init has come, or is coming
  const char* problem_with(const Header& header, int worker, const Optimizer* optimizer) const override;
  size_t answer_bytes(const Header& header) const override;
  // Of the frame with that header, which was checked or is about to be.
  size_t payload_bytes(const Header& header) const;

  // --- any thread --------------------------------------------------------------------------------------------------
  // The round in progress is complete when every worker's push is in and no send borrows the value or a state any more:
  // one count for all of what is still to come, and whoever brings it to zero lets the round finish. So nothing changes
  // under a send.
  std::atomic<int> outstanding;
  bool taken_back() override { return outstanding.fetch_sub(1) == 1; }

  // --- where it is summed ------------------------------------------------------------------------------------------
  // The place of the value; rank 0's first init is received straight into it.
  void* value() const { return value_; }
  // Later ones are received elsewhere, because the value may still be on its way to a slow worker.
  void replace_value(const void* value);
  // Notes the n-th init of a worker. Returns the workers who can be answered now.
  std::vector<int> init(int worker, uint32_t n, bool waits);

  // Takes over `gradient` (from the pool of gradients, `pushed_bytes` long) of one worker, or of its machine; null if
  // there is none. `is_filled`: it might have had one, had it not been lost. Returns the rank of a worker whose scalars
  // differ from this one's, or -1.
  int add(int worker, const Header& header, void* gradient, bool is_filled);
  // All are in: value = update(value, sum), or the sum itself without an optimizer.
  void finish(const Optimizer* optimizer);
  // The value as it is sent: its payload and how that is encoded.
  Encoding value_encoding() const { return value_encoding_; }
  const void* value_payload() { return lent(value_encoding_ == Encoding::kFloat16 ? wire_value_ : value_); }
  // What the last round sends: a new value, or nothing where all workers have skipped it, and the value stays.
  Encoding round_encoding() const { return has_new_value_ ? value_encoding_ : Encoding::kAbsent; }

  // A state that the optimizer has (Header::part), made if it is not there yet.
  const void* state(const Optimizer& optimizer, uint8_t part) { return lent(state_at(optimizer, part)); }
  void replace_state(const Optimizer& optimizer, uint8_t part, const void* content);
  size_t state_bytes() const { return sum_bytes_; }
  const char* capture(std::vector<CapturedArray>& captured) const override;

 private:
  void sum(int worker, void* gradient);
  void publish_sum(void*& sum);
  DType element_type(FrameKind kind) const;
  bool may_come(const Header& header, int worker) const;
  void make_state(const Optimizer& optimizer);
  void*& state_at(const Optimizer& optimizer, uint8_t part);
  void make_writable(void*& array, size_t size);
  const void* lent(const void* array);
  void drop_replaced();

  BufferPool& values_;
  BufferPool& gradients_;
  const DType dtype_, sum_dtype_;
  const size_t sum_bytes_;

  void* value_;
  void* wire_value_ = nullptr;  // the sum as float16
  Encoding value_encoding_ = Encoding::kPlain;
  bool has_new_value_ = true;
  std::vector<std::pair<void*, size_t>> replaced_;  // former values and states that a send may still borrow
  std::vector<const void*> not_lent_;               // their successors, of which no send has borrowed anything yet

  void* master_ = nullptr;    // float32 copy of a float16 value
  std::vector<void*> state_;  // the optimizer's

  const bool in_order_;
  const int pushes_;              // of a round
  RankSum total_;                 // of the machines' sums; of all workers' gradients if they are added as they come
  std::vector<RankSum> machine_;  // by machine, if several workers of one push on their own and are added in order
  int pushed_ = 0;                // pushes that are in
  int present_ = 0;               // workers with a gradient in this round
  bool is_filled_ = false;        // for a lost worker: if nobody has a gradient, it is not the last round all the same
};

}  // namespace p3
