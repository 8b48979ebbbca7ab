// What the shards of one key share.
// Threads: plain values; the Registry's, which says when they may change.
#pragma once

#include <atomic>
#include <string>

#include "p3/machines.h"
#include "p3/slicing.h"

namespace p3 {

class StoreNorm;

// Immutable after define().
struct ServerKey {
  KeyPlan plan;
  std::string name;
  int store = 0;
  const Machines* machines = nullptr;              // the server's; its groups, if the key adds up there
  const std::atomic<int>* first_worker = nullptr;  // the server's: see first()
  // Whether the leader of each machine, or group, pushes for all its workers, and gets the value for them.
  bool aggregated = false;
  // Of its store, if that has a key of norms.
  StoreNorm* norm = nullptr;
  // Another plan of a key that trains already: its value and state come from there, and its rounds go on.
  bool is_successor = false;

  // By what the sum of so many workers' gradients is divided, when so many others had departed.
  int divisor(int present, int departed) const {
    return plan.reduction == Reduction::kMean ? machines->num_workers() - departed : present;
  }

  // Whether what its shards sum is part of the store's norm.
  bool reports_norm() const { return norm != nullptr && !plan.tells_norms(); }

  // Who gives first values, and asks for snapshots: rank 0; if that has departed, who has been there longest.
  int first() const { return *first_worker; }
  // Whose first value a worker waits for, besides first()'s: who pushes for others must know the key before they push.
  int leader_of(int worker) const { return aggregated ? machines->leader_of(worker) : first(); }
  // Who pushes in each round for this worker, and gets the value of the round for it.
  int pusher_of(int worker) const { return aggregated ? machines->leader_of(worker) : worker; }
  bool pushes(int worker) const { return pusher_of(worker) == worker; }
  bool pushes_for_first(int worker) const { return pusher_of(first()) == worker; }
  // Whether it does so for others as well.
  bool is_shared(int worker) const { return aggregated && !machines->is_alone(worker); }
  int pushes_of_round() const { return aggregated ? machines->count() : machines->num_workers(); }
};

}  // namespace p3
