// Rounds of P3 as operations of MXNet's dependency engine: a push runs when its gradient is ready, and whatever reads
// the landing array waits for the round. Dense keys' here, those of keys of rows in rows.h.
//
// Threads: every method from one thread at a time (the engine asks this of operations on several variables);
//          they return at once. The engine calls back on its own threads, the core on its own.
// Memory:  an operation keeps both NDArrays alive by handles of its own; the worker must outlive the engine's queue.
// Errors:  MXNet's own come as std::runtime_error. What fails later is told to the worker (Worker::fail) and to
//          whatever waits for the output.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "api.h"
#include "p3/worker.h"

namespace p3 {

// How soon an operation goes, wherever some wait.
struct Priority {
  int32_t in_queues = 0;  // P3's
  int in_engine = 0;      // MXNet's; distinct per key, since the engine scrambles equals
};

class MXNetEngine {
 public:
  // `library` is the path of the libmxnet that this process has loaded.
  explicit MXNetEngine(const std::string& library) : api_(MXNetApi::find(library)) {}

  // What the operations of one key have in common.
  struct Key {
    int handle = 0;                   // Worker::declare's
    std::string name;                 // for messages
    NDArrayHandle landing = nullptr;  // in CPU memory, written by the round; disjoint from the gradient
  };

  // The key's first value, which rank 0 sends from the landing array itself: each slice has left before it comes back.
  void init(Worker* worker, const Key& key, Priority priority) const;
  // The key's next round. `gradient`: CPU memory, shape and type of the landing array; it may be held in a blocked layout.
  void push(Worker* worker, const Key& key, NDArrayHandle gradient, const RoundScalars& scalars,
            Priority priority) const;

  // Worker::capture after the rounds queued so far and before the next one, which does not wait for it. `done` is called in
  // any case; `residual`, which may be null, is kept until then.
  void capture(Worker* worker, const Key& key, uint64_t snapshot, const std::shared_ptr<char>& residual,
               Priority priority, Worker::Done done) const;

  // The key's next round without a gradient, at once and past the engine: nothing queued there may use the landing array.
  void skip(Worker* worker, const Key& key, Priority priority, Worker::Done done) const;

  // MXNet's own copy, as engine work: also to another device, storage type or element type, and to an array that is held in
  // a blocked layout, which is in the plain one afterwards.
  void copy(NDArrayHandle source, NDArrayHandle destination) const;

  // Cheap: no wait and no allocation.
  bool same_shape(NDArrayHandle left, NDArrayHandle right) const;
  bool same_type(NDArrayHandle left, NDArrayHandle right) const;
  bool in_cpu_memory(NDArrayHandle array) const;

  // For rows.cc: one operation, from enqueue() to the engine's deleter.
  class Operation;
  // What it does when it runs, on a thread of the engine: hands work to the core and returns. It ends with exactly one
  // completion() or fail(), here or on another thread, after which the operation may be gone.
  using Work = std::function<void(const Operation&)>;
  // `work` runs when `input` is ready and nobody uses `output`; one of them may be null.
  void enqueue(Worker* worker, const Key& key, Priority priority, const char* input_word, NDArrayHandle input,
               NDArrayHandle output, Work work) const;
  const MXNetApi& api() const { return *api_; }

 private:
  explicit MXNetEngine(const MXNetApi* api) : api_(api) {}

  const MXNetApi* api_;
};

class MXNetEngine::Operation {
 public:
  Operation(const MXNetApi* api, Worker* worker, const Key& key, const char* input_word, Work work)
      : api_(api), worker_(worker), key_(key), input_word_(input_word), work_(std::move(work)) {}
  ~Operation();

  NDArrayHandle input() const { return input_; }
  NDArrayHandle output() const { return output_; }
  // Of dense arrays. Throw Error(kUsage) if they are held in a blocked layout.
  const void* input_address() const;
  void* output_address() const;

  // To be called once, with null or what went wrong. May be kept after the operation is gone.
  using Completion = std::function<void(const Error* error)>;
  Completion completion() const;
  // Calls `use`, now or on another thread of the engine, with the address of the dense input, which holds until the
  // completion is called. A oneDNN operator may have left the input in a blocked layout, which only MXNet can read: then
  // with the address of MXNet's copy.
  void with_input(Priority priority, std::function<void(const void* input, Completion completion)> use) const;
  // As completion(), of an error that the whole job must hear of.
  void fail(const Error& error) const;

 private:
  friend class MXNetEngine;

  // Copied by value: the one that the engine hands out is gone when the callback returns.
  struct OnComplete {
    void (*call)(void* engine, void* param, const std::runtime_error* error);
    void* engine;
    void* param;
  };

  static void run(void* run_context, void* on_complete, void* operation);
  static void release(void* operation);

  const MXNetApi* api_;
  Worker* worker_;
  Key key_;                 // its landing array is not the operation's own
  const char* input_word_;  // for messages
  Work work_;
  NDArrayHandle input_ = nullptr;
  NDArrayHandle output_ = nullptr;
  OnComplete on_complete_{};
  bool has_run_ = false;
};

}  // namespace p3
