// What one server owns of a key and works on by itself: a slice of a dense key, or a partition of a key of rows. Here is
// what the two have in common: whose turn it is, and who waits for the first value.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "transport/lent_buffers.h"
#include "p3/captured.h"
#include "p3/compression.h"
#include "wire/disagreement.h"
#include "p3/machines.h"
#include "p3/optimizer.h"
#include "p3/slicing.h"
#include "p3/wire.h"
#include "server/presence.h"

namespace p3 {

// What the shards of one key share. Immutable after define().
struct ServerKey {
  KeyPlan plan;
  std::string name;
  int store = 0;
  Compression compression;             // of what is pushed; and float16 sums are sent as such
  bool average = false;                // of the gradients of those that took part, instead of their sum
  const Machines* machines = nullptr;  // the server's
  // Whether the leader of each machine pushes for all its workers, and gets the value for them.
  bool aggregated = false;
  // Another plan of a key that trains already: its rows and their state come from there, and its rounds go on.
  bool is_successor = false;

  // Whose first value a worker waits for, besides rank 0's: who pushes for others must know the key before they push.
  int leader_of(int worker) const { return aggregated ? machines->leader_of(worker) : 0; }
  // Pushes of each round.
  int pushes() const { return aggregated ? machines->count() : machines->num_workers(); }
};

class ServerShard {
 public:
  ServerShard(const ServerKey& its_key, uint32_t its_index, int its_thread)
      : key(its_key),
        index(its_index),
        thread(its_thread),
        next_round(static_cast<size_t>(key.machines->num_workers()), 0),
        inits(next_round.size(), 0),
        catches_up(next_round.size(), false),
        presence(next_round.size()),
        inits_here_(next_round.size(), 0) {}
  virtual ~ServerShard() = default;

  const ServerKey& key;
  const uint32_t index;
  const int thread;  // which of the summing threads, if there are any

  // --- the receiver thread -----------------------------------------------------------------------------------------
  // The round that each worker pushes next; 0: its first init is still to come.
  std::vector<uint64_t> next_round;
  std::vector<uint32_t> inits;  // received from each worker
  // Up to which round each worker's pushes are completed for it, as it was lost in the midst of them. Empty: none ever was.
  std::vector<uint64_t> fill_to;
  // This worker has taken the place of one that was lost, and its wish for the value is still to come.
  std::vector<bool> catches_up;
  // A push of this worker, or of its machine, is in. Returns how long after the first one of the round.
  double note_push(int worker, bool of_machine, std::chrono::steady_clock::time_point now);
  // How long the first push of the round has been in, while not all are; else 0.
  double waited_s(std::chrono::steady_clock::time_point now) const;

  // What is wrong with a frame of a known worker, regardless of its payload; null if nothing. `optimizer`: the store's.
  virtual const char* problem_with(const Header& header, int worker, const Optimizer* optimizer) const = 0;

  // Of what a frame asks for, for its sender alone, at most.
  virtual size_t answer_bytes(const Header& header) const = 0;

  // --- any thread --------------------------------------------------------------------------------------------------
  // The round of the value that was broadcast last; of a successor at first: that its predecessor broadcast last.
  std::atomic<uint64_t> published{0};

  // --- where it is summed ------------------------------------------------------------------------------------------
  Presence presence;
  // Whether an init of this worker is still to be answered: until then it sends no other.
  bool waits_for_init(int worker) const;
  // Whether the value of each round is sent to this worker: unless it is lost, or its machine's leader gets it.
  bool gets_rounds(int worker) const {
    return presence.is_here(worker) && (!key.aggregated || key.machines->leader_of(worker) == worker);
  }
  // See Presence::lose. Forgets what that worker waits for, and its push if that is not whole.
  virtual void lose(int worker, uint32_t incarnation, uint64_t pushed);
  // Of this round, as its first push brought them.
  const RoundScalars& scalars() const { return numbers_.scalars; }
  // Of this round, as rank 0 pushed it.
  int32_t priority() const { return priority_; }
  // Copies the value and what there is of state, as the last round left them. Returns what is wrong with that, or null.
  virtual const char* capture(std::vector<CapturedArray>& captured) const = 0;

 protected:
  // Notes the n-th init of a worker; `waits`: for the answer.
  void note_init(int worker, uint32_t n, bool waits);
  // The workers who can be answered now: the n-th init of each gets what rank 0's n-th brought, or a later one, once its
  // leader's n-th is in as well.
  std::vector<int> take_answerable();

  // A push is for the round after the last one. All else is about the value or state that the last one left.
  bool in_turn(const Header& header, int worker) const;
  // Of an aggregated key the leader pushes, for all workers of its machine.
  bool is_its_to_send(const Header& header, int worker) const;
  bool has_state(uint8_t part, const Optimizer* optimizer) const;

  // Of what capture() is about.
  CapturedArray captured_array(uint8_t part, DType dtype, uint64_t elements) const;
  void capture_state(const std::vector<void*>& state, const void* master, uint64_t elements,
                     std::vector<CapturedArray>& captured) const;

  RoundNumbers numbers_;  // of this round, by rank
  int32_t priority_ = 0;

 private:
  int pushes_in_ = 0;  // of the round
  std::chrono::steady_clock::time_point first_push_;
  std::vector<uint32_t> inits_here_;                        // of each worker, as far as note_init() was told
  std::vector<std::pair<int, uint32_t>> waiting_for_init_;  // worker, and the how manieth init of its
};

}  // namespace p3
