// What one server owns of a key and works on by itself. Frames are checked and placed by the receiver; then each is a Task,
// which handle() turns into what is to be sent.
//
// Here is what all have in common: value and state, who is answered, and who waits for a value. What a key consists of, its
// way says (ways/), and what a push does to it, its discipline (discipline/).
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/buffer_pool.h"
#include "p3/error.h"
#include "p3/optimizer.h"
#include "p3/server.h"
#include "p3/wire.h"
#include "plan/frames.h"
#include "server/claims.h"
#include "server/discipline/turns.h"
#include "server/key.h"
#include "server/presence.h"
#include "server/store_norm.h"
#include "server/task.h"
#include "wire/failures.h"

namespace p3 {

// What a server gives its shards. Threads: any.
class ShardHost {
 public:
  ShardHost(std::string its_label, SumOrder order, bool outlives)
      : label(std::move(its_label)), sum_order(order), outlives_workers(outlives) {}

  const std::string label;
  const SumOrder sum_order;
  const bool outlives_workers;
  std::atomic<int> first_worker{0};        // ServerKey::first()
  std::atomic<bool> has_new_first{false};  // not the one of the beginning, though the rank may be that
  BufferPool values{/*reuses=*/false};     // what stays: values and states
  BufferPool transient;                    // what was received and not yet summed, and copies that go out

  // A call that breaks the contract of p3/server.h: throws Error(kUsage).
  [[noreturn]] void refuse_call(const std::string& why) const { throw Error(ErrorKind::kUsage, label + ": " + why); }
  // Of the key's store; null: sums go out. Throws Error(kUsage) if it cannot update elements of the key's type.
  virtual const Optimizer* optimizer_of(const ServerKey& key) const = 0;
  // The same, if it has one, with those values of its fields. Throws Error(kUsage) if it cannot have them.
  virtual std::shared_ptr<const Optimizer> optimizer_of(const ServerKey& key, const SharedFields& fields) const = 0;
  // Whether the key can go over to the plan of that wire key.
  virtual bool can_move(const ServerKey& key, uint32_t plan) const = 0;
  virtual int van_of(int worker) const = 0;
  // Has the shard handle a Task::kResume.
  virtual void resume(Shard& shard, const Urgency& urgency) = 0;
  // And at that time, or soon after it, whatever was asked for before; none: not at all, as before the shard goes.
  virtual void resume_at(Shard& shard, std::optional<std::chrono::steady_clock::time_point> when) = 0;

 protected:
  ~ShardHost() = default;
};

class Shard {
 public:
  // `thread`: which of the summing threads handles it, if there are any. `host` outlives it.
  Shard(const ServerKey& key, uint32_t index, int thread, ShardHost& host, const FrameKinds& frames, uint64_t elements);
  virtual ~Shard();

  const ServerKey& key;
  const uint32_t index;
  const int thread;

  // --- the receiver thread -----------------------------------------------------------------------------------------
  Turns turns;
  // Of one that is inherited, until all workers have claimed what they have of it.
  std::unique_ptr<Claims> claims{};
  bool has_settled = false;  // and it goes on
  // Of a value that it needs no more: it has settled since. Or of one that it was asked for when it was open before: of a
  // claim that would come first, now.
  bool is_too_late(const Header& claim, int worker) const {
    if (claim.payload_bytes != bytes_) return false;
    return has_settled || (claims != nullptr && !claims->has(worker) && bytes_ > kClaimedAtOnce);
  }
  const char* problem_with_claim(const Header& claim, int worker) const;
  // What is wrong with a frame of this worker, regardless of its payload; null if nothing.
  const char* problem_with(const Header& header, int worker) const;
  // Where its payload goes: into the value, or into `buffer`, which is made to fit. Null: there is none.
  virtual void* place_of(const Header& header, PooledBuffer& buffer) = 0;
  // Of what a frame asks for, for its sender alone, at most.
  virtual size_t answer_bytes(const Header& header) const = 0;
  // The push without a gradient that completes a round for a worker that is lost.
  Header absent_push(uint64_t round) const { return header_of(frames_.push, Encoding::kAbsent, round, 0); }

  // --- any thread --------------------------------------------------------------------------------------------------
  // The round of the value that was sent last; of a successor at first: that its predecessor sent last.
  std::atomic<uint64_t> published{0};
  // Frames that are being received for it, and tasks of it that are not done.
  std::atomic<int> uses{0};

  // --- before any frame is for it ----------------------------------------------------------------------------------
  // Of a key that was cut anew behind that round, of whose value nobody needs anything: Server::recut().
  virtual void begin_behind(uint64_t round);
  // What a snapshot has of it, as Server::load() says. False: it does not fit.
  virtual bool load(uint8_t, const void*, size_t) { return false; }

  // --- where it is summed ------------------------------------------------------------------------------------------
  Reply handle(Task& task);
  // The processes of this rank up to number `incarnation` are gone; the last one has pushed up to this round. Forgets what
  // it waits for, and its push if that is not whole.
  virtual void lose(int worker, uint32_t incarnation, uint64_t pushed);
  // Another process of this rank takes part from here on: no value has come yet that it would ask for.
  void let_in(int worker) { presence_.let_in(worker); }
  // Whether the workers have all that there is of it.
  virtual bool can_be_inherited() const { return false; }
  // All have claimed: it goes on from there.
  virtual void take_over(const Claims& its);
  // Of this round, as its first push brought them.
  RoundSettings settings() const { return round_.numbers.settings(); }

  // It will report no more to its store's norm. Between two rounds.
  void leave_norm() {
    if (key.reports_norm()) key.norm->leave(norm_place_);
  }

  // In the receiver thread: nothing is worked on, and all that it lent has come back. Whatever comes for it must be
  // refused from here on, and then it may go.
  bool is_idle() { return uses == 0 && has_all_back(); }

 protected:
  size_t workers() const { return static_cast<size_t>(key.machines->num_workers()); }

  // Receiver thread.
  virtual const char* problem_with_payload(const Header& header, int worker) const = 0;
  bool has_state(uint8_t part) const;

  // Where it is summed. Each answers in `reply`.
  virtual void replace_value(PooledBuffer) {}      // by that of an init, where it was not received into the value
  virtual bool has_value() const { return true; }  // else nobody's init is answered yet
  virtual void send_value(const std::vector<int>& workers, Reply& reply, bool asked_for) = 0;
  virtual void push(Task& task, Reply& reply) = 0;
  virtual void resume(Reply&) {}
  virtual void answer_again(int /*worker*/, Reply&) {}                          // with the last round's value
  virtual void fetch(Task& task, Reply& reply) = 0;                             // one part of it
  virtual void store(Task& task, Reply& reply) = 0;                             // another content of one part
  virtual void copy_value(void* to) const { std::memcpy(to, value_, bytes_); }  // for a snapshot
  virtual const char* note_store(const Header&) { return nullptr; }             // or what is wrong with it
  virtual void value_is_replaced() {}                                           // by the init of first() that is in now

  // As announced: its states are those that there are. Null: none.
  const Optimizer* optimizer() const { return host_.optimizer_of(key); }
  std::shared_ptr<const Optimizer> optimizer_as_of(const SharedFields& fields) const {
    return host_.optimizer_of(key, fields);
  }
  // Whose inits can be answered now, to `reply`: the n-th of each gets what first()'s n-th brought, or a later one, once
  // its leader's n-th is in as well.
  void answer_inits(Reply& reply);
  // Who is sent the value of each round: all who push, but for those that are lost.
  std::vector<int> receivers() const;
  bool is_lost(const Task& task) const { return presence_.is_of_the_lost(task.worker, task.incarnation); }
  void send(int worker, Frame frame, Reply& reply) const;
  // Says to the task's sender that what it asked for is done.
  void acknowledge(const Task& task, Reply& reply) const;
  Header header_of(FrameKind kind, Encoding encoding, uint64_t round, int32_t priority) const;

  // Of a key that reports_norm(): of what this shard, or the one that it is the heir of, has summed in that round.
  void report_norm(uint64_t round, const NormPart& part);
  void make_state(const Optimizer& optimizer);
  void drop_state();
  // Which part `master_` is, with that optimizer or none: kMaster, kLeftOut, or 0 if there is no such array.
  virtual uint8_t part_of_master(const Optimizer* optimizer) const;
  // It is there from then on, if the shard has one: a copy of the value, or nothing was left out yet.
  void make_master(const Optimizer* optimizer);
  // Of a part that was agreed, which is there from then on.
  void*& part_at(uint8_t part);
  DType type_of(uint8_t part) const { return part == 0 ? dtype_ : sum_dtype_; }

  // Inits of this worker that came here.
  uint32_t inits(int worker) const { return inits_[static_cast<size_t>(worker)]; }

  ShardHost& host_;
  const FrameKinds& frames_;  // that are for it, besides those for every shard
  const uint64_t elements_;
  const DType dtype_, sum_dtype_;
  const size_t bytes_;  // of the value
  const size_t sum_bytes_;

  void* value_;
  void* master_ = nullptr;    // float32, beside the value: see part_of_master()
  uint8_t master_part_ = 0;   // what it is
  std::vector<void*> state_;  // the optimizer's

  struct {
    RoundNumbers numbers;  // by rank
    int pushed = 0;        // pushes that are in
    int present = 0;       // workers with a gradient
    int departed = 0;      // workers that were no part of the job any more
    bool goes_on = false;  // some worker that has none takes part all the same
  } round_;                // in progress
  int32_t priority_ = 0;   // of the round, as who pushes for first() has it

  const uint64_t* updates_ = nullptr;  // that it has had, if each answer is to say so

 private:
  // Of a shard that nobody works on. Never while a round of it is incomplete.
  virtual bool has_all_back() = 0;
  bool is_void(const Task& task) const;
  void init(Task& task, Reply& reply);
  void capture(const Task& task, Reply& reply) const;

  const size_t norm_place_;  // in the store's norm
  bool is_begun_ = false;    // an init of who was first() then is in
  Presence presence_;
  std::vector<uint32_t> inits_;                          // of each worker, that came here
  std::vector<std::pair<int, uint32_t>> waiting_inits_;  // worker, and which of its inits
};

}  // namespace p3
