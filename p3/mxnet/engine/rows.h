// Keys of rows (p3/rows.h) as operations of MXNet's engine: their gradients are row_sparse arrays, of which nobody
// knows the number of rows before they are computed.
//
// A key whose weight is dense has a landing array of all its rows. A round changes few of them, and only those are
// copied on to the weight. A key whose weight is row_sparse lands nowhere: its anchor, an empty array, orders pushes
// (which write it) and fetches (which read it).
//
// Threads, memory, errors: as in engine.h.
#pragma once

#include <cstdint>
#include <deque>
#include <utility>
#include <vector>

#include "engine.h"
#include "p3/thread_annotations.h"

namespace p3 {

// Which rows of a landing array each of the last rounds has changed. From any thread.
class ChangedRows {
 public:
  explicit ChangedRows(uint64_t rows) : rows_(rows) {}

  void note(uint64_t round, const int64_t* ids, uint64_t count);
  void note_all(uint64_t round);
  // Those of the rounds after `from` up to `to`, perhaps with repetitions. False: not known any more, so perhaps all.
  bool between(uint64_t from, uint64_t to, std::vector<int64_t>* ids) const;

 private:
  const uint64_t rows_;
  mutable Mutex mutex_;
  std::deque<std::pair<uint64_t, std::vector<int64_t>>> rounds_ P3_GUARDED_BY(mutex_);
  // Ids in rounds_: at most the key's rows, beyond which a whole copy is cheaper.
  uint64_t noted_ P3_GUARDED_BY(mutex_) = 0;
  uint64_t forgotten_ P3_GUARDED_BY(mutex_) = 0;  // the last round that rounds_ does not tell of
};

// The operations of one key of rows.
class MXNetRowsKey : public MXNetKey {
 public:
  // `landing`: of all rows; or, if not `lands`, an array that orders its operations: the anchor.
  MXNetRowsKey(const MXNetApi* api, Worker* worker, int handle, std::string name, NDArrayHandle landing, uint64_t rows,
               uint64_t row_bytes, bool lands)
      : MXNetKey(api, worker, handle, std::move(name), landing),
        rows_(rows),
        row_bytes_(row_bytes),
        lands_(lands),
        changed_(rows) {}

  void init(NDArrayHandle value, Priority priority) override;
  // `gradient`: in CPU memory; row_sparse, and nobody will write it again; or dense: all rows.
  void push(NDArrayHandle gradient, const RoundSettings& settings, Priority priority) override;

  // Of the landing array so far: each init, push and skip is one.
  uint64_t rounds() const { return rounds_; }
  // Brings `weight`, which is as the landing array was after round `since`, up to date: dense and in CPU memory.
  void copy_changed(NDArrayHandle weight, uint64_t since, Priority priority);
  // As gather(), as the servers have them after the last round.
  void fetch(std::vector<int64_t> ids, NDArrayHandle destination, Priority priority);

 private:
  std::function<void()> note_skip() override;
  void* landing_address(NDArrayHandle landing) const override;

  const uint64_t rows_, row_bytes_;
  const bool lands_;
  uint64_t rounds_ = 0;
  ChangedRows changed_;
};

}  // namespace p3
