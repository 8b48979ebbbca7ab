// Rounds of P3 as operations of MXNet's dependency engine: a push runs when its gradient is ready, and whatever reads
// the landing array waits for the round. Nothing here links to MXNet: its C API is looked up in the library that
// Python has loaded.
//
// Threads: push() and init() from one thread at a time (the engine asks this of operations on several variables);
//          they return at once. The engine calls back on its own threads, the core on its own.
// Memory:  an operation keeps both NDArrays alive by handles of its own; the worker must outlive the engine's queue.
// Errors:  MXNet's own come as std::runtime_error. What fails later is told to the worker (Worker::fail) and to
//          whatever waits for the landing array.
#pragma once

#include <cstdint>
#include <string>

#include "p3/worker.h"

namespace p3 {

using NDArrayHandle = void*;

class MXNetEngine {
 public:
  // `library` is the path of the libmxnet that this process has loaded.
  explicit MXNetEngine(const std::string& library);

  // What the operations of one key have in common.
  struct Key {
    int handle = 0;                   // Worker::declare's
    std::string name;                 // for messages
    int32_t priority = 0;             // in P3's queues
    int engine_priority = 0;          // in the engine's; distinct per key, since the engine scrambles equals
    NDArrayHandle landing = nullptr;  // in CPU memory, written by the round; disjoint from the gradient
  };

  // The key's first value, which rank 0 sends from the landing array itself: each slice has left before it comes back.
  void init(Worker* worker, const Key& key) const;
  // The key's next round. `gradient`: CPU memory, shape and type of the landing array.
  void push(Worker* worker, const Key& key, NDArrayHandle gradient, const RoundScalars& scalars) const;

  // The key's next round without a gradient, at once and past the engine: nothing queued there may use the landing array.
  void skip(Worker* worker, const Key& key, Worker::Done done) const;

  // MXNet's own copy, as engine work. It alone knows how to write an array that is held in a blocked layout.
  void copy(NDArrayHandle source, NDArrayHandle destination) const;

  // Same shape and same element type. Cheap: no wait and no allocation.
  bool alike(NDArrayHandle left, NDArrayHandle right) const;
  bool in_cpu_memory(NDArrayHandle array) const;

 private:
  struct Api;  // MXNet's functions
  struct Operation;

  void enqueue(Operation* operation, NDArrayHandle input) const;
  static void run(void* run_context, void* on_complete, void* operation);
  static void release(void* operation);

  const Api* api_;  // one per process, never freed
};

}  // namespace p3
