// The server's side of the data plane: receives slices, adds them in rank order, updates, and sends each new
// value to every worker at once.
//
// Threads: every method may be called from any thread; inside run one receiver, one sender and `threads` summing ones.
//          A slice is always summed by the same thread, so slices need no lock.
// Memory:  parameters, optimizer state, and at most one received copy per worker of slices whose round is incomplete
//          (SumOrder::kArrival: one accumulator instead).
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "p3/captured.h"
#include "p3/compression.h"
#include "p3/error.h"
#include "p3/lateness.h"
#include "p3/machines.h"
#include "p3/node.h"
#include "p3/optimizer.h"
#include "p3/slicing.h"
#include "p3/stream.h"

namespace p3 {

enum class SumOrder {
  kRank,     // reproducible to the bit
  kArrival,  // less memory, order left to the network
};

struct ServerOptions {
  NodeOptions node;
  SumOrder sum_order = SumOrder::kRank;
  // Summing threads. 0: the receiver sums between two looks at its vans, which saves wake-ups; good for some
  // 10 Gbit/s. More where one core cannot both receive and sum.
  int threads = 0;
  // Of the job's workers; unset: each on one of its own.
  std::optional<Machines> machines;
  // The leader of a machine with several workers pushes for all of them, and gets the value for them; but of compressed
  // keys, whose residuals are each worker's own.
  bool local_aggregation = true;
  // Goes on without a worker that is lost, until another process takes its place. Needs local_aggregation false.
  bool outlives_workers = false;
};

// What a server knows of a worker that is lost.
struct LostWorker {
  std::string problem;  // why no other process can take its place; empty: one can
  struct Pushed {
    uint32_t wire_key;
    uint64_t round;  // the last one that it has pushed, of a slice or partition at least; 0: none
  };
  std::vector<Pushed> pushed;
};

class Server {
 public:
  Server(int rank, int num_servers, int num_workers, ServerOptions options);
  ~Server();

  // Before start(), as Worker::add_server.
  void add_worker(int worker, std::unique_ptr<Stream> stream, std::string label);
  void add_watch(std::unique_ptr<Stream> stream, std::string label);
  void start();

  // What rank 0 announced, before any worker is told. `store` groups the keys that share an optimizer.
  // Throws Error(kUsage) if the wire key is defined already or the plan makes no sense.
  void define(const KeyPlan& plan, std::string name, int store);
  // Another plan of a key of rows that is defined already, with a wire key of its own. It gets its rows, and what the
  // optimizer keeps for them, from the workers, before the first of them is answered.
  void define_successor(const KeyPlan& plan, uint32_t predecessor);
  // A key that has a successor, and that every worker has left for it.
  void drop(uint32_t wire_key);
  // The optimizer of a store's keys, once, before their first push; without one their sums are broadcast.
  void set_optimizer(int store, const OptimizerSpec& spec);
  // Before the store's first define(): how its float32 gradients come, and whether they are averaged over the workers
  // that took part in the round (default: summed; of floating types only).
  void set_compression(int store, const Compression& compression);
  void set_average(int store, bool average);

  // What worker 0 has had copied for that snapshot (Worker::capture). What was copied for earlier ones is given up.
  std::vector<CapturedArray> take_captured(uint64_t snapshot);
  // Replacing a worker, with outlives_workers. Each returns when it is done; not from a thread of the core.
  //
  // It is gone, whether this server has noticed or not: its connection is closed, half received frames are thrown away,
  // and nothing more is sent to it.
  LostWorker lose_worker(int worker);
  // Of each of these keys, completes the rounds up to that one for the lost worker, as they begin: it had nothing to add.
  // May be called again, for more. `skips`: it would have skipped them, so if all others do, a round was the last; else its
  // successor goes on, and such a round counts as one that leaves the value as it is.
  void fill(int worker, const std::vector<LostWorker::Pushed>& rounds, bool skips = false);
  // Another process of that rank. Of keys that its predecessor had, its first frame is an absent kInit of round 0: the
  // wish for the value of the last round that its predecessor pushed, or that is filled; its next push follows that.
  void replace_worker(int worker, std::unique_ptr<Stream> stream);

  // As Worker's. fail() tells every worker through its van.
  void fail(const Error& error);
  std::optional<Error> error() const;
  // Becomes readable, and stays so, once the server has failed or every worker has said goodbye.
  int event_fd() const;
  bool finished() const;  // every worker has said goodbye

  Counters counters() const;
  // Who keeps others waiting, as of a moment ago.
  std::vector<Late> late() const;
  // Of each worker: how long after the first push of a round its last one came, in the mean of the last rounds. Those of
  // a machine who push as one are equally late.
  std::vector<double> mean_lateness_s() const;
  void stop();

  // As Worker's: in the child of a fork. Only the destructor may be called afterwards.
  void abandon_after_fork();

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace p3
