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
#include <memory>
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

// A row_sparse array in CPU memory with these rows, ascending, each once; their values are to be written. At least one.
NDArrayHandle make_rows(const MXNetApi& api, int dtype, const std::vector<int64_t>& shape, const int64_t* ids,
                        uint64_t count);

// The operations of one key of rows. The caller numbers the rounds of a landing array from 1.
class MXNetRows {
 public:
  MXNetRows(const MXNetEngine* engine, Worker* worker, uint64_t rows, uint64_t row_bytes, bool lands)
      : engine_(engine),
        worker_(worker),
        rows_(rows),
        row_bytes_(row_bytes),
        lands_(lands),
        changed_(new ChangedRows(rows)) {}

  MXNetEngine::Key key;  // its landing array, or the anchor

  // The first value, on rank 0 that of the landing array, or without one `value`: dense, in CPU memory, of all rows.
  void init(NDArrayHandle value, uint64_t round, Priority priority);
  // The next round. `gradient`: row_sparse, in CPU memory, and nobody will write it again. Or dense: all rows.
  void push(NDArrayHandle gradient, bool is_sparse, uint64_t round, const RoundScalars& scalars, Priority priority);
  // As MXNetEngine::skip.
  void skip(uint64_t round, Priority priority, Worker::Done done);

  // As MXNetEngine::capture, which has no residual for keys of rows.
  void capture(uint64_t snapshot, Priority priority, Worker::Done done) const {
    engine_->capture(worker_, key, snapshot, nullptr, priority, std::move(done));
  }

  // Brings `weight`, which is as the landing array was after round `from`, up to round `to`: dense and in CPU memory.
  void copy_changed(NDArrayHandle weight, uint64_t from, uint64_t to, Priority priority);
  // Writes the values of `destination`, which has just these rows (make_rows), as the servers have them.
  void fetch(std::vector<int64_t> ids, NDArrayHandle destination, Priority priority);

 private:
  void* landing_address() const;

  const MXNetEngine* engine_;
  Worker* worker_;
  uint64_t rows_, row_bytes_;
  bool lands_;
  std::shared_ptr<ChangedRows> changed_;  // operations under way use it too
};

// As fetch(), from a dense array in CPU memory.
void gather_rows(const MXNetEngine& engine, Worker* worker, const MXNetEngine::Key& key, uint64_t row_bytes,
                 std::vector<int64_t> ids, NDArrayHandle source, NDArrayHandle destination, Priority priority);

}  // namespace p3
