// How the operations of one key go: the transfers that they are made of, and what this worker keeps of the key for them.
// It is made once, where the key is declared (ways/), and lives as long as the key.
//
// Threads: sum_on(), begin_to_move(), follow_leader() and report() with the Worker's lock held; all else, where an
//          operation is asked for.
//          Each throws Error(kUsage) if the key has no such operation, or not with these arguments.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "p3/worker.h"
#include "plan/frames.h"
#include "worker/machine/sum.h"
#include "worker/operation.h"
#include "worker/progress.h"
#include "worker/transfer.h"

namespace p3 {

struct Key;

// What a worker is to the ways of its keys. Threads: any.
class WayHost {
 public:
  WayHost(int its_rank, bool outlives) : rank(its_rank), outlives_servers(outlives), is_first(its_rank == 0) {}

  const int rank;
  const bool outlives_servers;
  std::atomic<bool> is_first;  // see Worker::become_first()
  virtual const std::string& label() const = 0;
  virtual void fail(const Error& error) = 0;                    // the job
  [[noreturn]] void refuse_call(const std::string& why) const;  // throws Error(kUsage)

 protected:
  ~WayHost() = default;
};

class Way {
 public:
  // Both outlive it.
  Way(Key& its_key, WayHost& host, const FrameKinds& its_frames) : key(its_key), frames(its_frames), host_(host) {}
  virtual ~Way() = default;

  Key& key;
  const FrameKinds& frames;  // of its operations
  Progress progress;

  // Of the value (part 0), or of a part of the optimizer's state; and of what rounds land in.
  virtual size_t bytes(uint8_t part) const;
  virtual size_t landing_bytes() const { return bytes(0); }

  // As Worker's methods of the same names. `asks`: the servers are to copy the key.
  virtual std::vector<Operation> init(const void* value, void* landing, int32_t priority, Worker::Done done) = 0;
  virtual std::shared_ptr<Transfer> push(const void* gradient, void* landing, bool gated) = 0;
  virtual std::shared_ptr<Transfer> skip(void* landing, bool gated, bool goes_on) = 0;
  virtual std::shared_ptr<Transfer> fetch(uint8_t part, void* landing) = 0;
  virtual std::shared_ptr<Transfer> store(uint8_t part, const void* content) = 0;
  virtual std::shared_ptr<Transfer> capture(bool asks, float* kept);

  // Of the rounds of this machine's workers under that plan, the first of which is `next_round`.
  virtual std::shared_ptr<MachineSum> sum_on(const Machine& machine, const KeyPlan& plan, uint64_t next_round) = 0;
  // Of a key that moves: what takes it over to the other plan, of which the last one is an init. None while that plan is
  // not known here yet.
  virtual std::vector<Operation> begin_to_move() { return {}; }
  // The key's rounds go through the leader of this machine, another worker.
  virtual void follow_leader() {}
  virtual void report(KeyCounters&) const {}
  // As Worker's, with the Worker's lock held, before the key's first round.
  virtual void set_optimizer(const OptimizerSpec&) { refuse("is updated by its servers alone"); }
  // What has come of a shard, for the heir of its server; on the receiver thread. The payload, of few bytes, is borrowed
  // until the next answer. Of a key that keeps none, nothing.
  virtual Frame claim(uint32_t /*shard*/) { return {nothing_claimed()}; }
  // The same with its payload, if that was claimed without, once; and else nothing.
  virtual Frame owed(uint32_t /*shard*/) { return {nothing_claimed()}; }

 protected:
  [[noreturn]] void refuse(const std::string& why) const;

  WayHost& host_;
};

}  // namespace p3
