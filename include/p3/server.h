// The server's side of the data plane: receives slices, adds them in an order given by ranks, updates, and sends each new
// value to every worker at once.
//
// Threads: every method may be called from any thread; inside, one receiver, one sender and `threads` summing threads
//          run. A slice is always summed by the same thread, so slices need no lock.
// Memory:  parameters, optimizer state, and of slices whose round is incomplete parts of the sum, at most one for two
//          workers (numeric/rank_sum.h; SumOrder::kArrival: one in all).
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "p3/captured.h"
#include "p3/codec.h"
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
  // Summing threads. 0: the receiver sums between two polls of its vans, which saves wake-ups; enough for about 10
  // Gbit/s. More if one core cannot both receive and sum.
  int threads = 0;
  // Of the job's workers; unset: each on one of its own.
  std::optional<Machines> machines;
  // The leader of a machine with several workers pushes for all of them, and gets the value for them, of keys that add
  // up there.
  bool local_aggregation = true;
  // Groups of workers, by whom this server's slices are added up and passed on in place of machines', of keys that add up
  // in groups; with the leaders that they have for this server. Needs that no machine with several workers has one.
  std::optional<Machines> groups;
  // Goes on without a worker that is lost, for good or until another process takes its place. Needs local_aggregation
  // false.
  bool outlives_workers = false;
};

class Server {
 public:
  // Throws Error(kUsage) if there is no such job.
  static std::unique_ptr<Server> make(int rank, int num_servers, int num_workers, ServerOptions options);
  virtual ~Server() = default;

  // Before start(), as Worker::add_server.
  virtual void add_worker(int worker, std::unique_ptr<Stream> stream, std::string label) = 0;
  virtual void add_watch(std::unique_ptr<Stream> stream, std::string label) = 0;
  // With outlives_workers, also before start(): this rank's place is empty, as if its worker had been dismissed before the
  // first round. admit_worker() and connect_worker() let a process in. Throws Error(kUsage) in another job.
  virtual void leave_empty(int worker, std::string label) = 0;
  // With outlives_workers, also before start(), of a server that comes back to a job that runs: this worker takes part from
  // the beginning, and its connection comes later, by connect_worker(), behind which it claims what it has. How many first
  // values it has had may differ from others, as of one that came later. Throws Error(kUsage) in another job.
  virtual void expect_worker(int worker, std::string label) = 0;
  virtual void start() = 0;
  virtual void replace_watch(std::unique_ptr<Stream> stream) = 0;

  // What rank 0 announced, before any worker is told. `store` groups the keys that share an optimizer.
  // Throws Error(kUsage) if the wire key is defined already or the plan makes no sense.
  virtual void define(const KeyPlan& plan, std::string name, int store) = 0;
  // Another plan of a key of rows that is defined already, with a wire key of its own. It gets its rows, and what the
  // optimizer keeps for them, from the workers, before the first of them is answered.
  virtual void define_successor(const KeyPlan& plan, uint32_t predecessor) = 0;
  // Another cut of a dense key that rests, with a wire key of its own: all workers have had the answers of all rounds up to
  // that one, and none begins another before this returns. What was of the former plan is dropped; of the value, which is
  // the last sum, nothing moves: until the next round the servers have zeros. Throws Error(kUsage) where they keep more of
  // the key than sums, or a round of it is under way.
  virtual void recut(const KeyPlan& plan, uint32_t predecessor, uint64_t round) = 0;
  // Drops a key that has a successor, once every worker has left it for that.
  virtual void drop(uint32_t wire_key) = 0;
  // Forgets all keys of a store, and its settings, once every worker has had all of its answers and sends no more: a
  // frame that comes later is of no key. Returns at once: true if all of its memory is free, false while a frame that it
  // has sent is borrowed by a connection still; then call it again. Afterwards the store's number may be another's.
  virtual bool drop_store(int store) = 0;
  // Gives one slice of a dense key with synchronous rounds, which this server owns, its first value (part 0) or an array
  // of the optimizer's (1, 2 ... in order, kMaster), from a snapshot: behind its define(), before any worker is told. Then
  // rank 0's first init may be absent; one that brings a value replaces it. Throws Error(kUsage) if it does not fit.
  virtual void load(uint32_t wire_key, uint32_t slice, uint8_t part, const void* content, size_t bytes) = 0;
  // The optimizer of a store's keys, once, before their first push; without one their sums are broadcast.
  virtual void set_optimizer(int store, const OptimizerSpec& spec) = 0;

  // What was copied for that snapshot at worker 0's request (Worker::capture). Copies for earlier ones are dropped.
  virtual std::vector<CapturedArray> take_captured(uint64_t snapshot) = 0;
  // Going on without a worker, with outlives_workers. Each returns when it is done; not from a thread of the core.
  //
  // The worker is gone, whether this server has noticed or not: its connection is closed, partly received frames are
  // discarded, and nothing more is sent to it. From here on each round of each key, also of one that is defined later, is
  // completed without a gradient of it, as if it skipped; a mean (Reduction::kMean) is over those who have not departed.
  // What rank 0 may do, the one may do from here on that has been there longest: of those from the beginning the lowest
  // rank. The server fails if others need what only this worker could have given.
  virtual void dismiss_worker(int worker) = 0;
  // Takes that back, for another process of that rank: connect_worker() lets it in, and from here on nothing is completed
  // without it. Between rounds: all operations of the others are complete, and none begins before this returns. Returns
  // why it cannot be, else "".
  virtual std::string admit_worker(int worker) = 0;
  // The connection of one that was admitted, or is expected. Of the former, for keys that have a value, the first frame is
  // an absent kInit of round 0: a request for that value; its next push is of the next round.
  virtual void connect_worker(int worker, std::unique_ptr<Stream> stream) = 0;

  // That server of the job is lost, and this one is its heir: it has a shard for each slice that the other one had of each
  // key, and what was of it, the workers say (Worker::inherit). Keys that are defined later it has for both. Throws
  // Error(kUsage) if servers keep more of a key than sums.
  virtual void inherit(int lost) = 0;
  // This server has come back in the place of a lost one, and has all keys that there are: what was of its own slices of
  // them, the workers say (Worker::take_back). All who are there must be expected still. Keys that are defined later begin
  // as ever. `seniority`: who is there, in the order of coming, so that the first one is what it is to other servers. Throws
  // as inherit().
  virtual void open(const std::vector<int>& seniority) = 0;
  // Whether any worker is still to say what it has of that, or could say more: who was there at inherit() or open(), and has
  // neither sent its last claim of that rank nor gone since. Nobody is admitted before, as it has nothing to say.
  virtual bool awaits_claims() = 0;
  // Another process has come back in the place of that lost server, and this one is its heir no more: it forgets what it has
  // inherited of it; copies for a snapshot stay. Between rounds: all operations of all workers are complete, and none that
  // is about it begins here. Throws Error(kUsage) if it has inherited nothing of that, or is still to hear claims of it.
  // It may inherit the same again.
  virtual void hand_over(int rank) = 0;

  // As Worker's. fail() tells every worker through its van.
  virtual void fail(const Error& error) = 0;
  virtual std::optional<Error> error() const = 0;
  // Becomes readable, and stays so, once the server has failed or every worker has said goodbye or was dismissed.
  virtual int event_fd() const = 0;
  virtual bool finished() const = 0;  // every worker has said goodbye or was dismissed

  virtual Counters counters() const = 0;
  // Workers that keep others waiting, as of a moment ago.
  virtual std::vector<Late> late() const = 0;
  // For each worker: how long after the first push of a round its own last push came, as a mean over recent rounds.
  // Workers of a machine that push as one have the same value.
  virtual std::vector<double> mean_lateness_s() const = 0;
  virtual void stop() = 0;

  // As Worker's: in the child of a fork. Nothing may be called afterwards, and the server stays: its threads and locks
  // belong to the parent.
  virtual void abandon_after_fork() = 0;
};

}  // namespace p3
