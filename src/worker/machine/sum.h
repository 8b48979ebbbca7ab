// One key on the leader of its machine, or group: what the machine's workers push comes in, is put together by their
// ranks, and leaves as one push. Workers count by their place on the machine; the leader's is 0.
//
// Threads: the receiver's alone.
// Memory:  at most one push per worker of shards whose sum is incomplete, and the sums that have not left.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "base/buffer_pool.h"
#include "p3/groups.h"
#include "p3/lateness.h"
#include "p3/slicing.h"
#include "p3/wire.h"
#include "transport/lent_buffers.h"
#include "transport/van.h"
#include "wire/failures.h"

namespace p3 {

// Who pushes the slices of a server to this worker, and where they are added up: on a machine all its workers, at one level;
// in groups as Groups has it.
struct Seats {
  struct Seat {
    int level = -1;  // -1: none of these come from there
    int position = 0;
  };
  std::vector<Seat> of;               // by place
  std::vector<Groups::Level> levels;  // none: nobody pushes any here
  int followers = 0;

  static Seats of_machine(int workers);
};

// What all sums of a machine, or of a worker's groups, share.
struct Machine {
  std::vector<int> ranks;           // of its workers, by place
  const std::vector<Seats>& seats;  // by server; outlives the sums
  BufferPool& pool;
  LentBuffers& lent;  // holds what leaves
};

class MachineSum {
 public:
  // `next_round`: the first that is to be summed. `push_kind`: of the frames that come.
  MachineSum(const Machine& machine, const KeyPlan& plan, uint64_t next_round, FrameKind push_kind);
  virtual ~MachineSum() = default;

  const KeyPlan plan;

  // What is wrong with a push that another worker announces, or null.
  const char* problem_with(int place, const Header& push) const;
  // Notes a push, or the last frame of one, that has come or is the leader's own.
  void note_arrival(int place, const Header& push);
  // Where this one's push is missing and others' is in, where they have waited longest; without worker and key.
  std::optional<Late> late(int place, std::chrono::steady_clock::time_point now) const;

  struct Outcome {
    const char* problem = nullptr;  // what is wrong with the payload
    int contradicts = -1;           // the place of one whose scalars differ from this one's
    std::vector<Frame> push;        // the machine's, with the leader's priority, once all are in
  };
  // The bytes of a buffer for the payload of a push.
  virtual size_t room_bytes(const Header& push) const = 0;
  // Adds what came of this worker; the payload is empty if it has no gradient.
  virtual Outcome add(int place, const Frame& push, PooledBuffer payload) = 0;
  RoundSettings settings(uint32_t shard) const { return shards_[shard].numbers.settings(); }
  // That the machine's push goes by, once it has been made; none: nobody has had a gradient.
  const std::optional<SharedFields>& pushed_fields(uint32_t shard) const { return shards_[shard].fields; }

  // Whether the machine's push has been made, and not answered: then nobody may push.
  bool is_awaiting(uint32_t shard) const { return shards_[shard].awaiting; }
  // What becomes of a frame of the answer.
  struct Passed {
    std::vector<std::pair<int, Frame>> frames;  // with the place of whom it is for
    std::optional<Frame> own;                   // for the leader itself; until the next call
  };
  // `landing`: whose the payload is, if it lies where it has landed on the leader.
  virtual Passed pass_on(const Header& header, const void* payload, Lender& landing) = 0;
  // Whether what is passed on goes by what its sender pushed with.
  virtual bool hands_on_fields() const { return false; }
  // In a round: frames of that shard that the key has lent, be it what has landed or what is still to be encoded.
  virtual int frames_from_key(uint32_t /*shard*/) const { return 0; }

 protected:
  void answered(uint32_t shard);
  int workers() const { return workers_; }
  const Seats& seats_of(uint32_t shard) const { return *seats_[shard]; }
  const Seats::Seat& seat_of(int place, uint32_t shard) const { return seats_[shard]->of[static_cast<size_t>(place)]; }
  // What is wrong with the encoding or the size of a push, or null.
  virtual const char* problem_with_payload(int place, const Header& push) const = 0;
  // Notes the header of a push, or of the last frame of one. Returns who contradicts it, or -1. `takes_part`: its numbers
  // count.
  int note(int place, const Frame& push, bool takes_part);
  // The header of the machine's push, which waits for an answer from now on.
  Header take_header(uint32_t shard);

  BufferPool& pool_;
  LentBuffers& lent_;

 private:
  struct Shard {
    std::vector<uint64_t> came;                        // by place: the last round whose push is in
    uint64_t round;                                    // that is being summed
    std::chrono::steady_clock::time_point first_came;  // of the round that came last
    Header push;                                       // of the machine
    RoundNumbers numbers;                              // by place
    std::optional<SharedFields> fields;                // of the machine's last push
    bool awaiting = false;
  };

  // That a push which is added up at that level may have.
  int most_contributors(uint32_t shard, int level) const;

  const int workers_;
  std::vector<const Seats*> seats_;  // by shard
  const FrameKind push_kind_;
  std::vector<Shard> shards_;
};

}  // namespace p3
