// A key as its worker knows it, and what it has been asked to do with it. How it does that, its Way knows.
// Threads: the Worker's lock, but for what a member says.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "p3/worker.h"
#include "transport/lent_buffers.h"
#include "worker/machine/sum.h"
#include "worker/operation.h"
#include "worker/transfer.h"
#include "worker/way.h"

namespace p3 {

struct Key final : Lender {
  Key(std::function<void(Key&)> its_frame_left, std::string its_name, const KeyPlan& its_declared)
      : frame_left(std::move(its_frame_left)), name(std::move(its_name)), declared(its_declared) {}

  // Any thread.
  const std::function<void(Key&)> frame_left;  // one that this lent
  const std::string name;
  const KeyPlan declared;  // of its plan, what is known before that is agreed on: its content
  std::unique_ptr<Way> way;
  bool fits(const KeyPlan& its_plan) const { return its_plan.fits(declared) && problem_with(its_plan).empty(); }

  RoundCounters counters;

  std::optional<KeyPlan> plan;
  std::optional<KeyPlan> captured_plan;
  std::set<uint32_t> wire_keys;  // by which frames name it: of its plan, and of others that it may go over to
  uint64_t round = 0;            // the last one begun
  bool catches_up = false;       // until its first init is complete, which brings a value and its round
  bool learns_round = false;     // the first slice of that value tells the round
  InitPart next_init = InitPart::kOfAll;
  bool moves = false;  // it goes over to another plan before its next operation

  // --- the operations; the front one is under way if `active` ------------------------------------------------------
  std::deque<Operation> operations;
  bool active = false;
  uint32_t outstanding = 0;  // shards whose answer must land, and frames that must leave, before it is complete
  uint32_t to_land = 0;      // those answers
  std::vector<bool> landed;  // by shard
  std::vector<Frame>
      begun;  // by shard, of those whose frame has left, or is to, for an heir; empty if none is expected
  std::deque<Frame> unready;  // of a gated round: what waits for ready(), in the order of slices
  bool is_unready(uint32_t slice) const { return !unready.empty() && slice >= unready.front().header.slice; }
  Transfer& transfer() const { return *operations.front().transfer; }
  const KeyPlan& plan_in_use() const {
    return active && operations.front().plan != nullptr ? *operations.front().plan : *plan;
  }

  // --- sums of a machine; or of groups, where each is so of some shards --------------------------------------------
  bool by_leader = false;                   // its rounds go through a leader, another worker
  std::shared_ptr<MachineSum> machine_sum;  // this worker leads, and adds up its rounds
  bool adds_up() const { return by_leader || machine_sum != nullptr; }
  // Nothing is under way, and so nothing that it lent; nor does anything wait but a move that no round has begun. On a
  // leader: nor has a push of another worker come.
  bool is_idle() const { return !active && operations.empty() && !moves && machine_sum.use_count() <= 1; }

  void taken_back() override { frame_left(*this); }
};

}  // namespace p3
