// One partition of a key of rows on its server, through a round: each worker's rows come in, or each machine's, are
// summed in order, update the rows that anybody touched, and those go out. All of it where the partition is summed,
// except where a member says otherwise.
//
// Memory: the whole value, and with an optimizer its state, of every row; a slot for each row (RowSum), and one more
//         for each machine whose workers push on their own; between a push's turn and its coming, what came; and
//         copies of the rows that are on their way out, so that nothing waits for a slow worker.
#pragma once

#include <cstdint>
#include <deque>
#include <utility>
#include <vector>

#include "base/buffer_pool.h"
#include "p3/optimizer.h"
#include "wire/rows.h"
#include "p3/server.h"
#include "transport/van.h"
#include "numeric/rank_row_sum.h"
#include "server/shard.h"

namespace p3 {

class ServerPartition final : public ServerShard {
 public:
  // `values` holds what stays (value, state), `transient` what was received or goes out. `parts`: how many a first value
  // has; 1: the value alone.
  // `whole_pushes`: see RankRowSum.
  ServerPartition(const ServerKey& key, uint32_t index, SumOrder order, int thread, BufferPool& values,
                  BufferPool& transient, int parts = 1, bool whole_pushes = false);
  ~ServerPartition() override;

  const RowRange range;

  // --- the receiver thread -----------------------------------------------------------------------------------------
  const char* problem_with(const Header& header, int worker, const Optimizer* optimizer) const override;
  size_t answer_bytes(const Header& header) const override;

  // --- where it is summed ------------------------------------------------------------------------------------------
  // As ServerSlice's, but nobody is answered before each row has been stored once; a successor's with its state.
  std::vector<int> init(int worker, uint32_t n, bool waits);
  void lose(int worker, uint32_t incarnation, uint64_t pushed) override;

  // What a frame brought. `problem`: what is wrong with it; null if nothing. `contradicts`: a worker whose scalars differ
  // from this one's, or -1.
  struct Outcome {
    const char* problem = nullptr;
    int contradicts = -1;
    bool complete = false;  // all of this round are in
  };
  // `payload`: from the transient pool, of roomy(header.payload_bytes); empty if the worker has none.
  // `is_filled`: as ServerSlice::add.
  Outcome push(int worker, const Header& header, PooledBuffer payload, bool is_filled);
  // The rows of one part (0: the value) get another content. Returns what is wrong with the payload, or null. `last`: of
  // this worker's frames.
  const char* store(const Header& header, const void* payload, const Optimizer* optimizer, bool& last);
  // The frame that answers a wish for rows, or what is wrong with the wish.
  const char* fetch(const Header& header, const void* payload, const Optimizer* optimizer, Frame& answer);
  const char* capture(std::vector<CapturedArray>& captured) const override;
  // After a store: the workers who can be answered now.
  std::vector<int> newly_answerable() { return missing_ == 0 ? take_answerable() : std::vector<int>(); }

  // All are in, and `published` counts the round: updates what was touched, and tells it.
  struct Published {
    std::vector<Frame> rows;     // in this order, for each who pushes and wants the rows
    std::vector<Frame> nothing;  // for each of the others who push
  };
  Published finish(const Optimizer* optimizer);
  // The end of this partition, of which something may still be on its way.
  LentBuffers hand_over_lent() { return std::exchange(lent_, {}); }
  uint32_t next_plan() const { return next_plan_; }  // that worker 0 has told of in this round
  bool wants_rows(int worker) const { return wants_rows_[static_cast<size_t>(worker)]; }

 private:
  const char* note_rows(int worker, const Header& header, const RowsHeader& rows, uint64_t union_of_frames);
  std::pair<RankRowSum*, int> sum_and_place(int worker);
  void note_stored(uint8_t part, int64_t row);
  void update(const Optimizer& optimizer, const std::vector<int64_t>& touched);
  void make_state(const Optimizer& optimizer);
  char* part_at(uint8_t part, const Optimizer* optimizer);
  DType type_of(uint8_t part) const { return part == 0 ? dtype_ : sum_dtype_; }
  size_t offset_of(int64_t row) const { return (static_cast<uint64_t>(row) - range.first) * key.plan.row_elements; }

  const int pushes_;  // of a round
  const bool in_order_;
  BufferPool& values_;
  BufferPool& transient_;
  const DType dtype_, sum_dtype_;
  const size_t row_bytes_, bytes_, sum_bytes_;

  char* value_;
  char* master_ = nullptr;    // float32 copy of a float16 value
  std::vector<void*> state_;  // the optimizer's
  // Until none is missing: which rows have been stored, of each part that a first value has.
  std::vector<bool> stored_;
  uint64_t missing_;

  RankRowSum total_;                // of the machines' sums; of all who push if they are added as they come
  std::deque<RankRowSum> machine_;  // by machine, if several workers of one push on their own and are added in order
  ReceivedRows received_;
  std::vector<bool> wants_rows_;  // by rank
  int pushed_ = 0;                // pushes all of whose frames are in
  int present_ = 0;               // workers with a gradient in this round
  bool is_filled_ = false;        // as ServerSlice's
  uint64_t pushed_rows_ = 0;
  bool as_blocks_ = false;  // worker 0's rows came as blocks
  uint32_t next_plan_ = 0;  // that worker 0 has told of
  LentBuffers lent_;
};

}  // namespace p3
