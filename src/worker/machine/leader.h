// What a worker does for the others of its machine if its rank is the lowest there: it takes their pushes, sends one
// for all to each server, and passes the answers on. In groups each member does so for slices of some servers, and slices
// of other servers go to other members.
//
// Threads: bring(), and what says who leads, from any; add_member(), follow() and join() before the transport starts; all
//          else the receiver's alone.
// Memory:  gradients come into buffers of a pool; what leaves the machine, and copies that are passed on, are lent to
//          their frames (LentBuffers). A member is in one round at a time, so there is never more than one round of
//          each.
#pragma once

#include <algorithm>
#include <chrono>
#include <optional>
#include <string>
#include <vector>

#include "base/buffer_pool.h"
#include "p3/lateness.h"
#include "p3/thread_annotations.h"
#include "transport/lent_buffers.h"
#include "transport/priority_queue.h"
#include "transport/transport.h"
#include "worker/key.h"
#include "worker/machine/sum.h"

namespace p3 {

class MachineLeader {
 public:
  // `van_of_server`: by rank; both must outlive it.
  MachineLeader(int rank, int num_servers, Transport& transport, const std::vector<int>& van_of_server)
      : rank_(rank),
        transport_(transport),
        van_of_server_(van_of_server),
        leader_van_(static_cast<size_t>(std::max(num_servers, 0)), -1) {}

  void add_member(int rank, int van);
  void follow(int leader_van);  // of this machine
  // Behind add_member() of all members, which throws Error(kUsage) if these are others.
  void join(const Groups& groups);

  bool is_in_groups() const { return is_in_groups_; }
  // Whether others push to this worker, of any server's slices, or of that one's.
  bool leads() const { return !members_.empty(); }
  bool leads(int server) const { return leads() && seats_[static_cast<size_t>(server)].followers > 0; }
  // The van to who adds up slices of that server with this worker's; -1: they go to the server.
  int leader_van(int server) const { return leader_van_[static_cast<size_t>(server)]; }
  bool follows() const {
    return std::any_of(leader_van_.begin(), leader_van_.end(), [](int van) { return van >= 0; });
  }
  bool follows_through(int van) const { return std::count(leader_van_.begin(), leader_van_.end(), van) > 0; }
  // Whether what goes through that van stays on this machine.
  bool is_of_machine(int van) const { return !is_in_groups_ && (follows_through(van) || place_of(van) > 0); }
  // Of the worker at the other end, among this machine's; 0: it is none that this one leads.
  int place_of(int van) const;

  // Of the key's rounds under that plan.
  std::shared_ptr<MachineSum> sum_of(const Key& key, const KeyPlan& plan, uint64_t next_round);

  // Queues one frame of the leader's own push for work(), which copies its payload before the round is complete.
  void bring(const Key& key, const Frame& own);
  // A push that a member announces, which was checked: where its payload goes. Then it has come.
  void* room_for(int van, const Key& key, const Header& push);
  void received(int van);
  // Adds one frame; the machine's push leaves once all are in. True: there was more. Throws what is wrong with it.
  bool work();

  // Passes a frame of an answer on to the members, as each wants it. Returns what is for the leader itself, if anything,
  // until the next call. What has landed is borrowed from `key`: its Lender is told of each frame that has left.
  std::optional<Frame> pass_on(Key& key, const Frame& answer);

  void note_departure(int van) { member(place_of(van)).left = true; }
  // Who of this machine has not pushed a round that another one has.
  void note_late(const Key& key, std::chrono::steady_clock::time_point now, LateWorkers& late) const;
  void check_that_nobody_left(const Key& key, uint64_t round) const;

  const BufferPool& pool() const { return pool_; }

 private:
  // One frame to be added.
  struct LocalPush {
    std::shared_ptr<MachineSum> sum;  // the key may have another by then
    const Key* key = nullptr;
    int place = 0;
    Frame frame;  // without a payload, but for the leader's own
    PooledBuffer payload;
  };
  struct Member {
    int rank;
    int van;
    bool left = false;
    LocalPush arriving;  // that is being received
  };

  int place_of_rank(int rank) const;  // -1: there is none
  Member& member(int place) { return members_[static_cast<size_t>(place) - 1]; }
  int rank_of(int place) const { return place == 0 ? rank_ : members_[static_cast<size_t>(place) - 1].rank; }
  const std::string& label() const { return transport_.options().label; }
  const std::string& label_of(int place) { return place == 0 ? label() : transport_.label(member(place).van); }
  static uint64_t held_by(const LocalPush& push) { return sizeof push + push.frame.header.payload_bytes; }
  PooledBuffer copy_of(const MachineSum& sum, const Frame& own);
  void add(LocalPush push);

  const int rank_;
  Transport& transport_;
  const std::vector<int>& van_of_server_;
  BufferPool pool_;
  LentBuffers lent_;
  std::vector<Member> members_;  // by rank
  std::vector<int> leader_van_;  // by server
  std::vector<Seats> seats_;     // by server
  bool is_in_groups_ = false;

  Mutex mutex_;
  PriorityQueue<LocalPush> pushes_ P3_GUARDED_BY(mutex_);
};

}  // namespace p3
