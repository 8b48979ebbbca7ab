// One partition of a key of rows with staleness on its server: each push updates its rows at once, and its answer waits
// for those who are too far behind (clocks.h). The answer to a worker that holds the whole value tells the rows that
// anybody has changed since the answer before; others are told none, and ask for the rows that they want.
//
// Memory: the value and the optimizer's state, of every row; a bit for each row and worker that holds the whole value;
//         and copies of the rows that are on their way out. One push of each worker at a time, so at most one copy of the
//         partition for each.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "server/discipline/stale/row_set.h"
#include "server/discipline/stale/stale_shard.h"
#include "server/discipline/stale/unanswered.h"
#include "server/ways/rows_shard.h"

namespace p3 {

class StalePartition final : public StaleShard<RowsShard> {
 public:
  StalePartition(const ServerKey& key, uint32_t index, int thread, ShardHost& host);

 private:
  void push(Task& task, Reply& reply) override;
  // The rows of one frame. Returns what is wrong with it, or null.
  const char* update(const Optimizer* optimizer, Task& task);
  void answer(int worker, bool nobody_goes_on, Reply& reply);
  void send_value(const std::vector<int>& workers, Reply& reply, bool asked_for) override;

  // Of each worker its own: what it lacks, and the push that comes in or was the last.
  struct Its {
    explicit Its(const RowRange& range) : changed(range), next_row(range.first) {}

    std::optional<RowSet> changed;  // since it was answered last; none: it wants no rows
    uint64_t next_row;              // the first that may come
    uint64_t pushed_rows = 0;       // so far
    RoundScalars scalars{};         // of its update
    bool is_counted = false;        // as one
    bool as_blocks = false;
    bool is_whole = true;  // the next frame begins another
  };

  Unanswered unanswered_;     // of the pushes that have updated the value
  std::vector<Its> workers_;  // by rank
};

}  // namespace p3
