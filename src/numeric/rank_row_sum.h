// One sum of rows in the order of their senders' places, in whatever order the frames come: to rows what RankSum is to
// slices, but one place after the other, as few rows are worth no tree.
//
// A machine's sum has a place for each of its workers, the total a place for each machine: the canonical order.
// Memory:  holds the frames of those whose turn has not come, and gives them back: of n places, if the first is late, the
//          rows that n - 1 touched.
// Threads: none of its own.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/buffer_pool.h"
#include "numeric/row_sum.h"
#include "plan/rows.h"

namespace p3 {

class RankRowSum {
 public:
  struct Frame {
    PooledBuffer payload;
    ReceivedRows rows;
  };

  // `in_order` false: added as they come. `whole_pushes`: a place's frames not before its last one is there, so that
  // they can be forgotten until then.
  RankRowSum(int places, const KeyPlan& plan, const RowRange& range, BufferPool& pool, bool in_order = true,
             bool whole_pushes = false);

  // Reads the payload of a place's next frame, of so many bytes. Returns what is wrong with it, or null.
  const char* read(int place, PooledBuffer payload, size_t bytes, Frame& frame);
  // Then adds it when its turn has come: all frames of one place before the next one's first.
  void add(int place, Frame frame);
  // This place has none in this round.
  void add_nothing(int place) { came_all(place); }

  // Unless all frames of this place have come: as if none had. Needs whole_pushes.
  void forget_part_of(int place);

  bool has_all_of(int place) const { return senders_[static_cast<size_t>(place)].last; }
  bool complete() const { return complete_ == senders_.size(); }
  // That have come from a place.
  uint64_t rows_of(int place) const { return senders_[static_cast<size_t>(place)].rows; }

  RowSum& sum() { return sum_; }
  // The sum in the key's own type, as one frame: half precision is rounded, as it is wherever a sum leaves its machine. The
  // next sum begins.
  Frame take_rounded();
  // The next sum begins.
  void clear();

 private:
  struct Sender {
    std::vector<Frame> early;  // came before its turn
    uint64_t rows = 0;
    uint64_t next_row = 0;  // the first that may come
    bool last = false;      // all have come
  };

  void came_all(int place);
  void take_turns();

  const KeyPlan plan_;
  const RowRange range_;
  const size_t row_bytes_;
  BufferPool& pool_;
  const bool in_order_, whole_pushes_;
  RowSum sum_;
  std::vector<Sender> senders_;
  size_t complete_ = 0;  // senders all of whose frames are in
  size_t next_ = 0;      // places below this one are in the sum
};

}  // namespace p3
