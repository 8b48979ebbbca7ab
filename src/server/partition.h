// One partition of a key of rows on its server, through a round: the rows of each who pushes come in, are summed in order,
// update the rows that anybody touched, and those go out.
//
// Memory: the whole value, and with an optimizer its state, of every row; a slot for each row (RowSum), and one more
//         for each machine whose workers push on their own; between a push's turn and its coming, what came; and
//         copies of the rows that are on their way out, so that nothing waits for a slow worker.
#pragma once

#include <cstdint>
#include <deque>
#include <utility>
#include <vector>

#include "numeric/rank_row_sum.h"
#include "server/shard.h"
#include "wire/rows.h"

namespace p3 {

class ServerPartition final : public Shard {
 public:
  // `parts`: how many a first value has; 1: the value alone. A successor's has the optimizer's state as well.
  ServerPartition(const ServerKey& key, uint32_t index, int thread, ShardHost& host, int parts = 1);

  // --- the receiver thread -----------------------------------------------------------------------------------------
  void* place_of(const Header& header, PooledBuffer& buffer) override;
  size_t answer_bytes(const Header& header) const override;

  // --- where it is summed ------------------------------------------------------------------------------------------
  void lose(int worker, uint32_t incarnation, uint64_t pushed) override;
  LentBuffers hand_over_lent() override { return std::exchange(lent_, {}); }

 private:
  const char* problem_with_payload(const Header& header, int worker) const override;

  // --- a round -----------------------------------------------------------------------------------------------------
  void push(Task& task, Reply& reply) override;
  const char* add(Task& task, RankRowSum& sum, int place);
  const char* note_rows(const Task& task, const RowsHeader& rows, uint64_t union_of_frames);
  std::pair<RankRowSum*, int> sum_and_place(int worker);
  void finish(Reply& reply);
  // The frames of the round: all touched rows for those who want them, or what is told to the others; in either case
  // `receivers` of each.
  std::vector<Frame> frames_of(const Header& round, const std::vector<int64_t>& touched, bool wanted, int receivers);
  void update(const Optimizer& optimizer, const std::vector<int64_t>& touched);
  void send_value(const std::vector<int>& workers, Reply& reply, bool asked_for) override;

  // --- rows of the value and of the state --------------------------------------------------------------------------
  bool has_value() const override { return missing_ == 0; }
  void fetch(Task& task, Reply& reply) override;
  void store(Task& task, Reply& reply) override;
  void note_stored(uint8_t part, int64_t row);
  size_t row_bytes_of(uint8_t part) const { return key.plan.row_elements * size_of(type_of(part)); }
  // Where a row lies in an array of part `part`.
  char* row_at(void* array, uint8_t part, int64_t row) const {
    return static_cast<char*>(array) + (static_cast<uint64_t>(row) - range_.first) * row_bytes_of(part);
  }

  const RowRange range_;
  const size_t row_bytes_;  // of the value
  // Until none is missing: which rows have been stored, of each part that a first value has.
  std::vector<bool> stored_;
  uint64_t missing_;

  RankRowSum total_;                // of the machines' sums; of all who push if they are added as they come
  std::deque<RankRowSum> machine_;  // by machine, if several workers of one push on their own and are added in order
  ReceivedRows received_;
  std::vector<bool> wants_rows_;  // by rank
  // Of the round.
  uint64_t pushed_rows_ = 0;
  bool as_blocks_ = false;  // worker 0's rows came as blocks
  uint32_t next_plan_ = 0;  // that worker 0 has told of
  LentBuffers lent_;
};

}  // namespace p3
