// Rounds of P3 as operations of MXNet's dependency engine: a push runs when its gradient is ready, and whatever reads
// the landing array waits for the round. Dense keys' here, those of keys of rows in rows.h.
//
// Threads: every method from one thread at a time (the engine asks this of operations on several variables);
//          they return at once. The engine calls back on its own threads, the core on its own.
// Memory:  an operation keeps its key and both NDArrays alive; the worker must outlive the engine's queue.
// Errors:  MXNet's own come as std::runtime_error. What fails later is told to the worker (Worker::fail) and to
//          whatever waits for the output.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "api.h"
#include "completion.h"
#include "p3/thread_annotations.h"
#include "p3/worker.h"

namespace p3 {

// How soon an operation goes, wherever some wait.
struct Priority {
  int32_t in_queues = 0;  // P3's
  int in_engine = 0;      // MXNet's; distinct per key, since the engine scrambles equals
};

// The operations of one key, which a std::shared_ptr must hold.
class MXNetKey : public std::enable_shared_from_this<MXNetKey> {
 public:
  // `handle`: Worker::declare's. `landing`: in CPU memory, written by the round; disjoint from the gradient. The caller
  // keeps it for as long as it calls these methods.
  MXNetKey(const MXNetApi* api, Worker* worker, int handle, std::string name, NDArrayHandle landing)
      : api_(*api), worker_(*worker), handle_(handle), name_(std::move(name)), landing_(landing) {}
  virtual ~MXNetKey() = default;
  MXNetKey(const MXNetKey&) = delete;
  MXNetKey& operator=(const MXNetKey&) = delete;

  // The key's first value, on rank 0 that of `value`: dense, in CPU memory. Or if that is null, what the landing array
  // holds: each slice has left before it comes back.
  virtual void init(NDArrayHandle value, Priority priority);
  // The key's next round. `gradient`: CPU memory, shape and type of the landing array; perhaps in a blocked layout.
  virtual void push(NDArrayHandle gradient, const RoundSettings& settings, Priority priority);
  // The same, of a gradient that MXNet copies to `buffer` afterwards, piece by piece: new CPU memory of that shape and
  // type, of which nobody has queued anything yet. When a piece has been queued, call arrived() with its end; at last
  // with the key's elements. The round's slices leave as pieces arrive.
  class Arrival;
  std::shared_ptr<Arrival> push_arriving(NDArrayHandle buffer, const RoundSettings& settings, Priority priority);
  void arrived(std::shared_ptr<Arrival> arrival, NDArrayHandle buffer, uint64_t elements, Priority priority);
  // The key's next round without a gradient, at once and past the engine: nothing queued there may use the landing
  // array.
  void skip(Priority priority, Worker::Done done);
  // The same for this round alone, in the engine's order, as push(). The landing array stays as it is, for no worker
  // may push in this round: the job fails if one does.
  void leave_out(Priority priority);
  // What is queued of this key from here on waits until `array` is ready.
  void wait_for(NDArrayHandle array, Priority priority);
  // Worker::capture after the rounds queued so far and before the next one, which does not wait for it. `done` is
  // called in any case; `residual`, which may be null, is kept until then.
  void capture(uint64_t snapshot, std::shared_ptr<char> residual, Priority priority, Worker::Done done);
  // Writes the values of `destination`, a row_sparse array of just these rows, as `source` has them, which is dense.
  // Both are in CPU memory.
  void gather(std::vector<int64_t> ids, NDArrayHandle source, NDArrayHandle destination, uint64_t row_bytes,
              Priority priority);

 protected:
  class Operation;
  // What an operation does when it runs, on a thread of the engine: hands work to the core and returns. It ends with
  // exactly one done() or fail(), here or on another thread, after which the operation, and the key, may be gone.
  using Work = std::function<void(const Operation&)>;
  // `work` runs when `input` is ready and nobody uses `output`; one of them may be null. `input_word`: for messages.
  void enqueue(Priority priority, const char* input_word, NDArrayHandle input, NDArrayHandle output, Work work);
  // A round that this worker skips is queued. Returns what is to be called when its result is in the landing array.
  virtual std::function<void()> note_skip();
  // Where rounds write: of the landing array, or the running operation's handle of it.
  virtual void* landing_address(NDArrayHandle landing) const;
  // Names this worker, for those who hear of it elsewhere.
  Error misuse(const std::string& what) const;

  const MXNetApi& api_;
  Worker& worker_;
  const int handle_;
  const std::string name_;
  const NDArrayHandle landing_;
};

// How much of a gradient has come to CPU memory. The round may begin before that or behind it: as its landing array is
// free. Threads: the engine's.
class MXNetKey::Arrival {
 public:
  void begin(const std::function<void()>& push, const std::function<void(uint64_t)>& ready) {
    MutexLock lock(mutex_);
    push();
    has_begun_ = true;
    ready(elements_);
  }
  void note(uint64_t elements, const std::function<void(uint64_t)>& ready) {
    MutexLock lock(mutex_);
    elements_ = elements;
    if (has_begun_) ready(elements);
  }

 private:
  Mutex mutex_;
  uint64_t elements_ P3_GUARDED_BY(mutex_) = 0;
  bool has_begun_ P3_GUARDED_BY(mutex_) = false;
};

// From enqueue() to the engine's deleter.
class MXNetKey::Operation {
 public:
  Operation(std::shared_ptr<MXNetKey> key, Priority priority, const char* input_word, NDArrayHandle input,
            NDArrayHandle output, Work work);

  NDArrayHandle input() const { return input_.get(); }
  NDArrayHandle output() const { return output_.get(); }
  // Of a dense input. Throws Error(kUsage) if it is held in a blocked layout.
  const void* input_address() const;

  // To be called once. May be kept after the operation is gone.
  Worker::Done done() const;
  // As done(), of an error that the whole job must hear of.
  void fail(const Error& error) const;
  // Calls `use`, now or on another thread of the engine, with the address of the dense input, which holds until `done`
  // is called. A oneDNN operator may have left the input in a blocked layout, which only MXNet can read: then with the
  // address of MXNet's copy.
  void with_input(std::function<void(const void* input, Worker::Done done)> use) const;

 private:
  friend class MXNetKey;

  std::string input_name() const { return std::string(input_word_) + " of key '" + key_->name_ + "'"; }
  static void run(void* run_context, void* on_complete, void* operation);
  static void release(void* operation);

  const std::shared_ptr<MXNetKey> key_;
  const Priority priority_;
  const char* const input_word_;
  const std::shared_ptr<void> input_, output_;
  Work work_;
  OnComplete on_complete_{};
  bool has_run_ = false;
};

}  // namespace p3
