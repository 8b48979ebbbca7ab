// A dense key on its worker: each round its gradient leaves in slices, encoded if it is compressed, and their values come
// back. Where the workers of a machine add up what they push, its leader encodes the sums.
//
// Memory: what compression leaves out, as many floats as its codec keeps for each element; none on who has a leader. On a
//         worker that outlives servers KeptValues, and with an optimizer a Replica.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "p3/codec.h"
#include "p3/live_optimizer.h"
#include "p3/slicing.h"
#include "worker/way.h"
#include "worker/ways/dense/kept_values.h"
#include "worker/ways/dense/replica.h"

namespace p3 {

// What compression has left out so far, of this worker's gradients or of its machine's sums. Of steps: u, then v
// (codec/dgc.h).
// Threads: the Worker's lock; of() who sends, in a round whose frames must leave before it ends.
struct Residual {
  // What is to be done to it before it is used again: see Worker::change_residual.
  struct Change {
    bool undo = false;
    float factor = 1;
  };

  std::vector<float> kept;    // while a round is under way, who sends
  std::vector<float> former;  // before the last push; empty: not kept
  Change change;              // before the next push

  void begin_round();
  // What is kept of a slice, as the round under way is to find it; null: nothing is. The slices of one round are apart,
  // and rounds follow each other: nobody else uses this piece.
  float* of(const Slice& slice);
  void end_round();
  // Of the last round: whether anything was encoded, so that there is something to undo.
  bool was_used() const { return is_used_; }

 private:
  Change of_round_;
  bool is_used_ = false;
};

// Of a key that takes steps.
struct Steps {
  float momentum = 0;  // set before the first push
  double clip_norm = 0;
  uint64_t rounds_before = 0;  // of the job that this one resumes
};

class DenseWay final : public Way {
 public:
  DenseWay(Key& its_key, WayHost& host);

  const Compression& codec;
  Residual residual;
  Steps steps;
  std::optional<KeptValues> landed;  // if this worker outlives servers
  // Of the store, if this worker is to update by what lands. Written with the Worker's lock held, before the first round.
  std::optional<LiveOptimizer> optimizer;
  std::optional<Replica> replica;  // then, from where it is needed first; as `landed`

  std::vector<Operation> init(const void* value, void* landing, int32_t priority, Worker::Done done) override;
  std::shared_ptr<Transfer> push(const void* gradient, void* landing, bool gated) override;
  std::shared_ptr<Transfer> skip(void* landing, bool gated, bool goes_on) override;
  std::shared_ptr<Transfer> fetch(uint8_t part, void* landing) override;
  std::shared_ptr<Transfer> store(uint8_t part, const void* content) override;
  // With the residual.
  std::shared_ptr<Transfer> capture(bool asks, float* kept) override;
  std::shared_ptr<MachineSum> sum_on(const Machine& machine, const KeyPlan& plan, uint64_t next_round) override;
  void follow_leader() override { residual = {}; }
  Frame claim(uint32_t shard) override;
  Frame owed(uint32_t shard) override;
  void set_optimizer(const OptimizerSpec& spec) override;

  // With an optimizer; while no answer is due.
  void begin_replica();

  // Itself, if its compression leaves anything out.
  DenseWay& with_residual();
  // With the Worker's lock held. `of_machine`: nor, on a leader, a round that it skips, in which others may push.
  void require_no_push(bool of_machine) const;

 private:
  void require_landing(const void* landing) const;
  void require_state(uint8_t part) const;
  // Of a slice under the key's plan: where its bytes begin, and how many there are.
  std::pair<size_t, size_t> bytes_of(uint32_t shard) const;
};

}  // namespace p3
