// The worker's side of the data plane: cuts keys into slices, sends them most urgent first, and receives the
// new values straight into the caller's arrays.
//
//   Worker worker(0, 2, options);
//   worker.add_server(0, fd0, "server 0 (10.0.0.8)"); worker.add_server(1, fd1, ...); worker.start();
//   int key = worker.declare("dense0_weight", 70000, DType::kFloat32);
//   worker.agree(key, plan);                         // may come later: operations wait for it
//   worker.init(key, initial, landing, 0, done);     // round 0; only rank 0 gives a value
//   worker.push(key, gradient, landing, -3, scalars, done);
//
// Threads: every method may be called from any thread and returns at once (close() alone waits).
//          `done` runs on a thread of the core, or in the caller if the worker has failed already; it must not
//          block and must not call back into the worker except through another thread. It may be given an error.
//          Operations on one key run one after the other, in the order in which they were asked for.
// Memory:  `value`, `gradient` and `landing` are borrowed until `done` runs. After a failure `done` runs only when
//          no thread of the core touches them any more.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "p3/compression.h"
#include "p3/dtype.h"
#include "p3/error.h"
#include "p3/node.h"
#include "p3/optimizer.h"
#include "p3/slicing.h"
#include "p3/stream.h"

namespace p3 {

// Of one key, since start.
struct KeyCounters {
  uint64_t rounds = 0;  // completed
  double waited_s = 0;  // from when the gradient was ready to when the last slice of the value had landed, added up
  double longest_wait_s = 0;  // of one round
};

class Worker {
 public:
  // Called exactly once per operation; null means success. `updated`: false if the value stays as it was because every
  // worker skipped the round.
  using Done = std::function<void(const Error* error, bool updated)>;

  Worker(int rank, int num_servers, NodeOptions options);
  ~Worker();  // as close(0), and joins the threads

  // Before start(): a stream to a server, proved at both ends.
  void add_server(int server, std::unique_ptr<Stream> stream, std::string label);
  // Before start(): a stream to the scheduler, which carries nothing but signs of life.
  void add_watch(std::unique_ptr<Stream> stream, std::string label);
  // Throws Error(kUsage) if a server is missing.
  void start();

  // A key of this worker; the handle is this worker's alone. Elements and type never change.
  // The servers must know the same compression for its store.
  int declare(std::string name, uint64_t elements, DType dtype, const Compression& compression = {});
  // The job's plan for it. Operations asked for earlier start now, in their order.
  void agree(int key, const KeyPlan& plan);

  // The value of the key, which is rank 0's, at first and whenever all workers call it again; `value` is ignored (and may
  // be null) on other ranks. It may be `landing` itself: each slice has left before it comes back.
  void init(int key, const void* value, void* landing, int32_t priority, Done done);
  // The key's next round: gradient out, new value (or sum) in. One round of a key at a time; further ones queue.
  void push(int key, const void* gradient, void* landing, int32_t priority, const RoundScalars& scalars, Done done);
  // The key's next round without a gradient of this worker, which has taken its last step while others go on: their new
  // value lands as ever. Once every worker skips, the round completes with `updated` false and the landing array as it is.
  void skip(int key, void* landing, int32_t priority, Done done);

  // One part of the optimizer's state on the servers, of sum_type(dtype): state 1 .. Optimizer::state_count(), or kMaster.
  // As it is after this worker's last round of the key; needs an optimizer.
  void fetch(int key, uint8_t part, void* landing, Done done);
  // Gives it another content. Rank 0 only; the rounds after it use it.
  void store(int key, uint8_t part, const void* content, Done done);

  // For the trace, if there is one: the training thread waited for the value of the key's last round, from when to when
  // on CLOCK_MONOTONIC.
  void mark_stall(int key, int64_t begin_ns, int64_t end_ns);

  // The first failure wins: tells every server, completes everything pending with the error. Never throws.
  void fail(const Error& error);
  std::optional<Error> error() const;
  // Becomes readable, and stays so, once the worker has failed. Owned by the worker.
  int event_fd() const;

  Counters counters() const;
  Traffic traffic_with(int server) const;
  KeyCounters key_counters(int key) const;

  // Orderly end: waits until nothing is pending (at most timeout_s), says goodbye to the servers, stops the threads.
  // False if it had to give up; what was pending then completes with kStopped.
  bool close(double timeout_s);

  // In the child of a fork: closes the sockets without a word; no lock is taken, no thread touched.
  void abandon_after_fork();

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace p3
