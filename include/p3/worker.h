// The worker's side of the data plane: cuts keys into slices, sends them most urgent first, and receives the
// new values straight into the caller's arrays.
//
//   Worker worker(0, 2, options);
//   worker.add_server(0, fd0, "server 0 (10.0.0.8)"); worker.add_server(1, fd1, ...); worker.start();
//   int key = worker.declare("dense0_weight", 70000, DType::kFloat32);
//   worker.agree(key, plan);                         // may come later: operations wait for it
//   worker.init(key, initial, landing, 0, done);     // round 0; only rank 0 gives a value
//   worker.push(key, gradient, landing, -3, settings, done);
//
// Threads: every method may be called from any thread and returns at once (only close() waits).
//          `done` runs on a thread of the core, or in the caller if the worker has failed already; it must not
//          block and must not call back into the worker except through another thread. It may be given an error.
//          Operations on one key run one after the other, in the order in which they were requested.
// Memory:  `value`, `gradient` and `landing` are borrowed until `done` runs. After a failure `done` runs only when
//          no thread of the core touches them any more.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "p3/codec.h"
#include "p3/dtype.h"
#include "p3/error.h"
#include "p3/factors.h"
#include "p3/groups.h"
#include "p3/lateness.h"
#include "p3/node.h"
#include "p3/optimizer.h"
#include "p3/rows.h"
#include "p3/slicing.h"
#include "p3/stream.h"

namespace p3 {

// Of one key, since start.
struct RoundCounters {
  uint64_t rounds = 0;     // completed
  double completed_s = 0;  // when the last one was, on CLOCK_MONOTONIC
  double waited_s = 0;     // from when the gradient was ready to when the last slice of the value had landed, in total
  double longest_wait_s = 0;  // of one round
};
struct RowsCounters {
  bool has_rows = false;            // it is a key of rows; else nothing else of these counts
  bool as_slices = false;           // the route of the next round
  uint64_t own_rows = 0;            // that this worker pushed in the last round completed
  uint64_t pushed_rows = 0;         // that all workers pushed in it, added up
  uint64_t touched_rows = 0;        // the union of those
  uint64_t row_bytes_sent = 0;      // of gradients, with their ids; of a leader: for its machine
  uint64_t row_bytes_received = 0;  // of the resulting rows
};
struct KeyCounters : RoundCounters, RowsCounters {};

// Of a key with staleness: its worker's last round whose answer has landed, and up to which round the pushes of all
// workers are in that.
struct LandedRound {
  uint64_t round = 0;
  uint64_t least_clock = 0;
};

class Worker {
 public:
  // Called exactly once per operation; null means success. `updated`: false if the value stays as it was because every
  // worker skipped the round.
  using Done = std::function<void(const Error* error, bool updated)>;

  Worker(int rank, int num_servers, NodeOptions options);
  ~Worker();                         // as close(0), and joins the threads
  const std::string& label() const;  // this worker's, as errors have it

  // Before start(): a stream to a server, authenticated at both ends.
  void add_server(int server, std::unique_ptr<Stream> stream, std::string label);
  // With NodeOptions::outlives_servers, behind add_server(heir): of a job that has lost that server before this worker came.
  // There is no connection to it until take_back().
  void add_heir(int lost, int heir, std::string label);
  // Before start(): a stream to the scheduler, which carries nothing but heartbeats.
  void add_watch(std::unique_ptr<Stream> stream, std::string label);
  // With NodeOptions::outlives_scheduler, after start(): a stream to the scheduler that has taken the former one's place.
  // Not from a thread of the core; throws the Error of a worker that has failed.
  void replace_watch(std::unique_ptr<Stream> stream);
  // With NodeOptions::outlives_servers, after start(). The other one serves from here on what the lost one did, which is the
  // slices of these `ranks`, whoever served those here until now, the heir itself included: this worker closes its own
  // connection to the lost one, tells the heir what has come of the slices (kClaim), and sends again what it waits for.
  // Not from a thread of the core; throws the Error of a worker that has failed, or kUsage.
  void inherit(int lost, int heir, const std::vector<int>& ranks);
  // With that: another process is that server, which was lost, and takes its own slices back; with them all goes as with an
  // heir, as with those of which inherit() has said already that it is the heir. Nothing is under way here, nor begins
  // before it returns. What else the heir serves stays there. Throws as inherit(); kUsage also if the server is not lost
  // here.
  void take_back(int server, std::unique_ptr<Stream> stream);
  // With that: servers to which this worker's own connection has ended, and for which inherit() has said nothing yet.
  std::vector<int> lost_servers() const;
  // All who were there before it have departed (Server::dismiss_worker): from here on this one is what rank 0 was.
  void become_first() noexcept;
  // It enters a job that runs, in which another one is what rank 0 was, whatever rank this one has. Before start().
  void come_later() noexcept;
  // Before start(): a stream to another worker of this machine, of rank `worker`. The worker of lowest rank leads: it
  // gets one to each of the others, and they get one to it. In rounds of keys without compression the others then push
  // to their leader, which adds up, pushes once for all, and forwards the value, or rows to those who want them: its
  // own operation on a dense key is complete when the value has left to all of them. Init, fetch, store and the move to
  // another plan stay between each worker and the servers.
  void add_local(int worker, std::unique_ptr<Stream> stream, std::string label);
  // In place of that, before start(): a stream to another worker that is in a group with this one, of rank `worker`, which
  // gets one to this one; then, behind all of these (Groups::members), the groups, the same in all workers. In rounds of keys
  // that add up in groups (KeyPlan::adds_up_in_groups) slices go through leaders, as through that of a machine; all else
  // stays between each worker and the servers. Not with NodeOptions::outlives_servers.
  void add_member(int worker, std::unique_ptr<Stream> stream, std::string label);
  void join_groups(const Groups& groups);
  // Throws Error(kUsage) if a server is missing.
  void start();

  // Declares a key; the handle is valid for this worker alone. Elements, type and codec never change, and are those of
  // the plan that is agreed on later.
  int declare(std::string name, uint64_t elements, DType dtype, const Compression& codec = {});
  // Of a key with deep gradient compression (top-k), before its first push: the momentum of the servers' SGD, which
  // this worker applies; and the largest norm of what this worker adds to the rescaled gradient, 0: any.
  void set_momentum(int key, double momentum, double clip_norm);
  // The job's plan for it. Operations requested earlier start now, in their order. `catches_up`: this worker has entered
  // a running job, which has the key already. Its first init is a request on rank 0, too, and the landing array gets the
  // value of the round after which this worker goes on.
  void agree(int key, const KeyPlan& plan, bool catches_up = false);

  // Whether nothing is under way or waits to be done with the key, nor borrowed of it. Rows whose move nobody's push has
  // begun may still be to move.
  bool is_idle(int key) const;
  // Forgets an idle key, whose handle is none from here on, and all that is kept of it; for keys of stores that all
  // workers have done with. No other call about the key may be under way. Throws Error(kUsage) if it is not idle.
  void release(int key);

  // Sets the value of a key of either kind to rank 0's, at first and whenever all workers call it again; `value` is
  // ignored (and may be null) on other ranks. It may be `landing` itself: each slice has left before it comes back.
  void init(int key, const void* value, void* landing, int32_t priority, Done done);
  // Before the key's only operation, which is an init, by all who call that: the value is for them alone. Other workers
  // may never call it. If the first worker is lost before it has given the value, the job goes on, and who asks for it
  // waits in vain; if it is lost later, nobody misses it. Of a dense key.
  void hand_over(int key);
  // Before init(), of a worker that joins a running job, to which the key's value is of no use: as a sum that all others
  // have updated by. Then it learns only which round comes next, and `landing` may stay as it is. If a server is lost
  // before that round, nobody asks this worker for what it has not. Of a dense key with synchronous rounds.
  void ask_for_round_alone(int key);
  // The key's next round: gradient out, new value (or sum) in. One round of a key at a time; further ones queue.
  // The two arrays may be one: each slice has left before its new value comes. `more`: other calls follow soon, so the
  // sender is not woken for a small gradient alone; flush() before waiting. Of a key with deep gradient compression, or with
  // a value_codec and an optimizer on the servers, the landing array must hold what landed last, and be another one than the
  // gradient: what comes may be a step or a change of that. A gradient that dgc clips cannot be gated.
  void push(int key, const void* gradient, void* landing, int32_t priority, const RoundSettings& settings, Done done,
            bool gated = false, bool more = false);
  // What was pushed with `more` leaves now, as it does with the next call of any other kind.
  void flush();
  // The next round of a key of either kind, without a gradient of this worker, which has taken its last step while others
  // go on: their new value lands as ever. Once every worker skips, the round completes with `updated` false and the
  // landing array as it is. `goes_on`: it has no gradient for this round alone. That makes a difference for two kinds of
  // keys. With staleness a worker that has taken its last step holds up nobody, and is answered when all others have come
  // as far; a worker that continues is answered as if it had pushed, so such a round is always `updated`. Of a key of
  // norms a round is `updated` if any worker continues, whatever gradients the store's other keys have had.
  void skip(int key, void* landing, int32_t priority, Done done, bool gated = false, bool goes_on = false);
  // A `gated` round of a dense key waits: each of its slices leaves once ready() has said so, and until then that part of
  // the gradient is not read, nor that of the landing array written. Thus a gradient can leave while it is still being
  // copied to where it lies. ready(): the first `elements` of both arrays are ready, of the first gated round of the key
  // that lacks some still; never fewer than before. Does nothing if there is none, as after a failure.
  void ready(int key, uint64_t elements);

  // Keys of factors (factors.h), for weights of fully connected layers. Their rounds are those of dense keys: push() with
  // this worker's factors, of shape.part_elements(), and the weight as the landing array, of shape.elements(), which must
  // hold what landed last; when it is done, this worker has updated the weight from the factors of all, as every other
  // has. Of a gated round nothing leaves before all is ready. init() only tells the servers of this worker: its arrays
  // are ignored. The first weight is another key's to bring. `workers`: of the job.
  int declare_factors(std::string name, const FactorShape& shape, int workers);
  // Before the key's first push. Without, the sum of the gradients takes the place of the weight. And of a dense key, with
  // NodeOptions::outlives_servers, where the servers have no optimizer for it: this worker updates by each sum that lands,
  // as the servers would, and so does every other one. From then on value and state are its own: what lands is the value,
  // and fetch() and store() are about this worker's state alone; fetch() also gives the value, part 0. For a snapshot,
  // which has nothing of the key from the servers, capture() copies what compression has left out. Throws Error(kUsage) of
  // any other key.
  void set_optimizer(int key, const OptimizerSpec& spec);

  // Another cut of a dense key, on which the job has agreed while it rests: nothing of the key is under way, and its next
  // round goes by that plan. What compression has left out stays. Throws Error(kUsage) if something is, or the key cannot.
  void recut(int key, const KeyPlan& plan);
  // The last round of the key that this worker has begun.
  uint64_t round(int key) const;

  // Keys of rows (rows.h), for row_sparse gradients. `rows` and `row_elements` never change. `landing` may be null in
  // init(), push_rows() and skip(): the rows stay on the servers, and this worker fetches those that it wants.
  int declare_rows(std::string name, uint64_t rows, uint64_t row_elements, DType dtype);
  // The key's next round. The new values of all rows that any worker touched are written to their places in `landing`
  // (a whole key); without an optimizer their sums, and zeros where the round before had left sums. `done` is told which
  // rows of `landing` have changed: borrowed, ascending, for the call.
  using RowsDone = std::function<void(const Error* error, const RowsView& changed)>;
  // Ids may come in any order and more than once; the values of a repeated one are added up. An id that the key does not
  // have fails the job.
  void push_rows(int key, const RowsView& gradient, void* landing, int32_t priority, const RoundSettings& settings,
                 RowsDone done);
  // How gradients travel from the next push on: as blocks of all rows with a bitmap of those touched (`as_slices`), which
  // takes fewer bytes for dense gradients, or as the rows touched. The servers answer in the same way if rank 0 does.
  // Values and updates are the same. With `pushes` that holds for one round; after each the next one takes the route that
  // would have cost fewer bytes in it (routing.h). All workers know the same about a round, so they change together.
  // `pushes`: how many reach the servers in a round: one of each worker, or of each machine if those with several workers
  // have leaders.
  void choose_route(int key, int pushes, bool as_slices = false);
  // Another plan of the key, which the job has agreed on; every worker calls this. Rank 0's next push tells all that it is
  // for the rounds after that one. Between the two rounds each worker moves its share of the rows, with the `parts` of
  // the optimizer's state: `share.count` rows from `share.first` on; the shares together are all rows. `done`: the key has
  // moved. Never called if that does not happen.
  void move_rows(int key, const KeyPlan& plan, std::vector<uint8_t> parts, const RowRange& share, Done done);
  // Rows of part 0, the value, or of a part of the optimizer's state, as they are after this worker's last round, into
  // `landing`, one after the other in the order of the ids.
  void fetch_rows(int key, uint8_t part, const int64_t* ids, uint64_t count, void* landing, int32_t priority,
                  Done done);
  // Replaces the content of rows of such a part; ids ascend, each once. Between rounds. `updates` as store().
  void store_rows(int key, uint8_t part, const RowsView& content, Done done, uint64_t updates = 0);

  // One part of the optimizer's state on the servers, of sum_type(dtype): state 1 .. Optimizer::state_count(), or kMaster.
  // As it is after this worker's last round of the key; needs an optimizer.
  void fetch(int key, uint8_t part, void* landing, Done done);
  // Replaces its content. Rank 0 only; the rounds after it use it. Of a key of factors, and where set_optimizer() has this
  // worker update, every worker has its own.
  // With staleness: `updates` that this state has had; 0: as many as the servers have counted.
  void store(int key, uint8_t part, const void* content, Done done, uint64_t updates = 0);
  // Of a key with staleness: how many updates it had had in what the servers answered last. Their shards may differ, by
  // pushes that are under way.
  uint64_t updates(int key) const;
  // The same of rounds; {0, 0} before the first.
  LandedRound landed_round(int key) const;

  // The bytes of a value (part 0), or of a part of the optimizer's state: of the whole key; and of one row.
  size_t bytes(int key, uint8_t part) const;
  size_t row_bytes(int key, uint8_t part) const;
  size_t landing_bytes(int key) const;  // of what rounds land in

  // For a snapshot: every worker calls it at the same point, of a key of either kind that has a first value. On rank 0 the
  // servers copy the key's value and state as this worker's last round left them (Server::take_captured), and `done`
  // says that all have; until then no other round can complete. On other ranks it is done as soon as its turn comes.
  // `snapshot`: its round, as the script counts, at most kLastSnapshot. `kept`: residual_floats(), which get what
  // compression has left out so far; or null, as it must be for keys that keep no residual.
  void capture(int key, uint64_t snapshot, float* kept, Done done);
  // Whether compression keeps what it leaves out: here, or on the leader of this machine, which encodes for all there.
  bool keeps_residual(int key) const;
  size_t residual_floats(int key) const;  // what restore_residual() takes; 0 once it is known that the leader keeps it
  // Resumes with what capture() gave, before the key's first push. Copied at once. Not where the leader keeps it.
  void restore_residual(int key, const float* residual);
  // For a loss scaler, of a key with a residual, between its rounds; all workers of a machine call these alike, and the
  // leader's count. What the next push begins with: if `undo`, what was kept before the last round, whose result nobody
  // has used, else what is kept now; times `factor`, as gradients are larger by it from then on, or 0. `undo` needs
  // keep_former_residual(), before that last round: 4 bytes more for each element.
  void keep_former_residual(int key);
  void change_residual(int key, bool undo, double factor);
  // The plan that the key had when it was last captured.
  std::optional<KeyPlan> captured_plan(int key) const;

  // For the trace, if there is one: the training thread waited for the value of the key's last round, from when to when
  // on CLOCK_MONOTONIC.
  void mark_stall(int key, int64_t begin_ns, int64_t end_ns);

  // The first failure wins: tells every server, completes everything pending with the error. Never throws.
  void fail(const Error& error);
  std::optional<Error> error() const;
  // Becomes readable, and stays so, once the worker has failed. Owned by the worker.
  int event_fd() const;

  Counters counters() const;
  // Workers of this machine that keep the others waiting, as of a moment ago, if this worker leads it.
  std::vector<Late> late() const;
  Traffic traffic_with(int server) const;
  // Of the link that leaves this machine, in bytes per second: LinkRate's.
  uint64_t take_full_rate();
  KeyCounters key_counters(int key) const;

  // Orderly end: waits until nothing is pending (at most timeout_s), says goodbye to the servers, stops the threads.
  // False if it had to give up; what was pending then completes with kStopped.
  bool close(double timeout_s);

  // In the child of a fork: closes the sockets without a word; no lock is taken, no thread touched. From here on error()
  // says why this worker is dead, every other call throws that, and fail(), close() and the destructor do nothing.
  void abandon_after_fork();

 private:
  class Impl;
  // Stands before the Impl in every call: there is none in the child of a fork, whose threads and locks it would need.
  class Guarded {
   public:
    explicit Guarded(std::unique_ptr<Impl> impl);
    ~Guarded();
    Impl* operator->() const;  // throws why()
    explicit operator bool() const { return impl_ != nullptr; }
    void abandon();
    Error why() const;
    const std::string& label() const { return label_; }

   private:
    std::unique_ptr<Impl> impl_;
    std::string label_;
  };
  Guarded impl_;
};

}  // namespace p3
