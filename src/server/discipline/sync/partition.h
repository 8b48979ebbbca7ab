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
#include "server/ways/rows_shard.h"

namespace p3 {

class ServerPartition final : public RowsShard {
 public:
  ServerPartition(const ServerKey& key, uint32_t index, int thread, ShardHost& host);

  // --- where it is summed ------------------------------------------------------------------------------------------
  void lose(int worker, uint32_t incarnation, uint64_t pushed) override;

 private:
  void push(Task& task, Reply& reply) override;
  const char* add(Task& task, RankRowSum& sum, int place);
  const char* note_rows(const Task& task, const RowsHeader& rows, uint64_t union_of_frames);
  std::pair<RankRowSum*, int> sum_and_place(int worker);
  void finish(Reply& reply);
  NormPart norm_of_sums(const std::vector<int64_t>& touched);
  // All touched rows for those who want them, or what is told to the others; in either case `receivers` of each.
  std::vector<Frame> frames_of_round(const Header& round, const std::vector<int64_t>& touched, bool wanted,
                                     int receivers);
  void send_value(const std::vector<int>& workers, Reply& reply, bool asked_for) override;

  RankRowSum total_;                // of the machines' sums; of all who push if they are added as they come
  std::deque<RankRowSum> machine_;  // by machine, if several workers of one push on their own and are added in order
  std::vector<bool> wants_rows_;    // by rank
  // Of the round.
  uint64_t pushed_rows_ = 0;
  bool as_blocks_ = false;  // worker 0's rows came as blocks
  uint32_t next_plan_ = 0;  // that worker 0 has told of
};

}  // namespace p3
