// Behind Worker: routes frames to keys and keys' frames to vans, holds the lock, and reports. Which operations a key has,
// its Way knows (way.h), and what each does to the key's shards, its Transfer; what is added up for a machine is
// MachineLeader's.
// Threads: any, unless a member says otherwise.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "p3/thread_annotations.h"
#include "p3/worker.h"
#include "transport/transport.h"
#include "worker/key.h"
#include "worker/machine/leader.h"
#include "worker/updater.h"
#include "worker/way.h"

namespace p3 {

class Worker::Impl final : public Transport::Handler, public WayHost {
  friend class Worker;

 public:
  Impl(int its_rank, int num_servers, NodeOptions options);

  // --- Transport::Handler ------------------------------------------------------------------------------------------
  void* receive_into(int van, const Header& header) override;
  [[noreturn]] void refuse(int van, const Header& header, const char* what) const override;
  void received(int van, const Header& header, void* payload) override;
  void sent(const Frame& frame) override { static_cast<Lender*>(frame.context)->taken_back(); }
  bool work() override;
  void left(int van) override;
  std::optional<Awaited> waiting_for(int van) const override;
  uint64_t last_round() const override { return last_round_; }
  bool lost(int van, const Error& loss) override;
  void look(std::chrono::steady_clock::time_point now) override;
  void failed(const Error& error) override;

  // --- WayHost -----------------------------------------------------------------------------------------------------
  const std::string& label() const override { return transport_.options().label; }
  void fail(const Error& error) override { transport_.fail(error); }

 private:
  using Clock = std::chrono::steady_clock;

  Recorder* recorder() const { return transport_.options().trace.get(); }
  // Throws Error(kUsage) if there is none.
  Key& key(int handle);
  Way& way(int handle) { return *key(handle).way; }
  // The same, if the key has such a way; else it is `otherwise`.
  template <typename SomeWay>
  SomeWay& way_of(int handle, const char* otherwise);
  // Of that content. `arguments`: of its way, behind key and host.
  template <typename SomeWay, typename... Arguments>
  int add_key(std::string name, const KeyPlan& declared, Arguments&&... arguments);
  int add_van(std::unique_ptr<Stream> stream, std::string peer, int rank_there = kNoPeer, bool is_bounded = false);
  int van_of_server(int server) const;
  void check_server(int server) const;
  void check_that_it_outlives_servers() const;
  // Receiver thread: Worker's methods of these names.
  void inherit(int lost, int heir, const std::vector<int>& ranks);
  void take_back(int server, std::unique_ptr<Stream> stream);
  // Receiver thread. What these servers did is done at the other end of that van from here on.
  void go_to(int van, const std::vector<int>& ranks);
  void claim_of(Key& key, const std::vector<bool>& is_moved, int heir_van, std::vector<Transport::Outgoing>& frames)
      P3_REQUIRES(mutex_);
  // The claim that a Way has made, with a copy of its payload.
  Transport::Outgoing claim_to(int heir_van, const Key& key, uint32_t shard, const Frame& claim);
  void* receive_ask_into(int van, const Header& ask) P3_REQUIRES(mutex_);
  void answer_ask(int van, const Header& ask);
  void add_what_is_owed(Key& key, uint32_t shard, std::vector<Transport::Outgoing>& frames) P3_REQUIRES(mutex_);
  void add_all_that_is_owed(std::vector<Transport::Outgoing>& frames) P3_REQUIRES(mutex_);
  // What heirs may still ask for leaves unasked, from here on behind its claim: they could not be answered later.
  void give_what_is_owed();
  void send_again(Key& key, const std::vector<bool>& is_moved, std::vector<Transport::Outgoing>& frames)
      P3_REQUIRES(mutex_);
  // One after the other; `done` is only that of the last one.
  void submit(Key& key, std::vector<Operation> operations, Transport::Write write = Transport::Write::kBySender);
  void flush();
  // The answer of one shard has landed, or one frame that borrows from the key has left.
  void count_down(Key& key);
  // What is under way is complete: tells who asked for it, and begins the key's next operation.
  void complete(Key& key);
  // On the updater's thread: the same, behind what the transfer computes.
  void compute(Key& key, Transfer& transfer);
  std::optional<Awaited> waiting_for_any() const;

  Key& find(int handle) P3_REQUIRES(mutex_);
  // Sends the frames of the key's next operation, unless one is under way or the plan is not known yet.
  void begin_next(Key& key, std::vector<Transport::Outgoing>& frames) P3_REQUIRES(mutex_);
  // Sends a frame of the operation under way, or adds it to this machine's sum. What it borrows stays until it has left,
  // even if a peer answers what it has not been asked yet.
  void begin_frame(Key& key, Frame frame, std::vector<Transport::Outgoing>& frames) P3_REQUIRES(mutex_);
  // Of the round under way, if it is gated: the frames of the slices that are ready by now.
  void begin_ready(Key& key, std::vector<Transport::Outgoing>& frames) P3_REQUIRES(mutex_);
  // Whether this worker adds up that shard for its machine, or groups, in the operation under way.
  bool sums_here(const Key& key, uint32_t shard) const P3_REQUIRES(mutex_);
  // Where a shard of the operation under way is, and its answer comes from.
  int van_of(const Key& key, uint32_t shard) const P3_REQUIRES(mutex_);
  // To the server of that shard, or its heir.
  int serving_van(const KeyPlan& plan, uint32_t shard) const P3_REQUIRES(mutex_);
  void count(Key& key, const Operation& operation) P3_REQUIRES(mutex_);
  void begin_to_catch_up(Key& key) P3_REQUIRES(mutex_);
  void put_first(Key& key, std::vector<Operation> operations) P3_REQUIRES(mutex_);
  // False if the plan that the key goes over to is not known here yet.
  bool begin_to_move(Key& key) P3_REQUIRES(mutex_);
  // The last operation of a move is complete.
  void adopt(Key& key, const KeyPlan& plan) P3_REQUIRES(mutex_);
  // Frames that name that key are about it from here on.
  void add_wire_key(Key& key, int handle, uint32_t wire_key) P3_REQUIRES(mutex_);
  void* receive_push_into(int van, const Key& key, const Header& header) P3_REQUIRES(mutex_);
  void check_that_nothing_waits_for(int van) const P3_REQUIRES(mutex_);
  // What this worker needs of that peer, if anything.
  std::optional<Awaited> awaited_from(int van) const P3_REQUIRES(mutex_);

  const int num_servers_;
  // Who serves its slices. Written by the receiver thread with the lock held, from start() on. Several servers have one, if
  // that is an heir.
  std::vector<int> van_of_server_;
  std::vector<int> own_van_;                         // by server: to itself, lost or not; written before start()
  std::vector<bool> is_lost_ P3_GUARDED_BY(mutex_);  // by server: that one is, and nothing has been said of it since
  BufferPool claims_{/*reuses=*/false};              // what is told to heirs
  LentBuffers lent_claims_;                          // receiver thread
  bool leaves_ P3_GUARDED_BY(mutex_) = false;        // give_what_is_owed() was called

  MachineLeader leader_;  // of this machine, or of groups: this worker, or who it is

  std::vector<std::vector<char>> arriving_;  // receiver thread: by van, the payload being received

  mutable Mutex mutex_;
  CondVar idle_;
  std::map<int, Key> keys_ P3_GUARDED_BY(mutex_);  // by handle; keys stay where they are
  int declared_ P3_GUARDED_BY(mutex_) = 0;         // keys ever; the next one's handle
  std::unordered_map<uint32_t, int> handle_of_wire_key_ P3_GUARDED_BY(mutex_);
  std::vector<Key*> complete_at_once_ P3_GUARDED_BY(mutex_);  // whose operation under way asks no other node
  std::vector<int> left_ P3_GUARDED_BY(mutex_);               // vans to workers that have said goodbye
  size_t pending_ P3_GUARDED_BY(mutex_) = 0;                  // operations whose `done` has not returned
  std::optional<Error> failure_ P3_GUARDED_BY(mutex_);
  std::vector<Late> late_ P3_GUARDED_BY(mutex_);  // of this machine, if this worker leads it

  std::atomic<uint64_t> rounds_{0};
  std::atomic<uint64_t> last_round_{0};  // written with the lock held

  Updater updater_;
  Transport transport_;  // last: its threads use all of the above
};

template <typename SomeWay>
SomeWay& Worker::Impl::way_of(int handle, const char* otherwise) {
  Key& found = key(handle);
  auto* const its = dynamic_cast<SomeWay*>(found.way.get());
  if (its == nullptr) refuse_call("key '" + found.name + "' " + otherwise);
  return *its;
}

template <typename SomeWay, typename... Arguments>
int Worker::Impl::add_key(std::string name, const KeyPlan& declared, Arguments&&... arguments) {
  // Outside the lock, and nowhere yet: its way may take much memory, or more than there is.
  std::map<int, Key> made;
  Key& key = made.try_emplace(0, [this](Key& its) { count_down(its); }, std::move(name), declared).first->second;
  key.way = std::make_unique<SomeWay>(key, *this, std::forward<Arguments>(arguments)...);
  auto added = made.extract(0);
  MutexLock lock(mutex_);
  added.key() = declared_;
  keys_.insert(std::move(added));
  return declared_++;
}

}  // namespace p3
