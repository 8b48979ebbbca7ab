// A key as its worker knows it, and what it has been asked to do with it.
// Threads: the Worker's lock, but for what a member says.
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "numeric/dgc.h"
#include "p3/worker.h"
#include "transport/lent_buffers.h"
#include "worker/machine/sum.h"
#include "worker/transfer.h"
#include "worker/ways/gathered/factored_update.h"

namespace p3 {

// Another plan of a key of rows, to which its rows move.
struct Successor {
  KeyPlan plan;
  std::vector<uint8_t> parts;
  RowRange share;
  Worker::Done done;
};

// What is to be done to the residual of a codec that keeps one before it is used again: see Worker::change_residual.
struct ResidualChange {
  bool undo = false;
  float factor = 1;
};

// Something asked for about one key, and not yet complete.
struct Operation {
  std::shared_ptr<Transfer> transfer;
  Worker::Done done;
  int32_t priority = 0;
  RoundScalars scalars{};
  const Successor* successor = nullptr;  // whose plan it is about, instead of the key's
  std::vector<Operation> to_catch_up{};  // instead of this one and the next, if the key catches up
  std::chrono::steady_clock::time_point asked_at = std::chrono::steady_clock::now();
  uint64_t ready_elements = kAll;  // of a gated round: how many have been said to be ready

  static constexpr uint64_t kAll = std::numeric_limits<uint64_t>::max();
  bool is_gated() const { return ready_elements != kAll; }
};

struct Key final : Lender {
  Key(std::function<void(Key&)> its_frame_left, std::string its_name, uint64_t its_elements, DType its_dtype,
      uint32_t its_row_elements, const Compression& its_codec)
      : frame_left(std::move(its_frame_left)),
        name(std::move(its_name)),
        elements(its_elements),
        dtype(its_dtype),
        row_elements(its_row_elements),
        codec(its_codec),
        residual(codec.residuals() * elements) {
    counters.has_rows = row_elements > 0;
  }

  // Any thread.
  const std::function<void(Key&)> frame_left;  // one that this lent
  const std::string name;
  const uint64_t elements;
  const DType dtype;
  const uint32_t row_elements;  // 0: a dense key
  const Compression codec;
  uint64_t rows() const { return elements / row_elements; }
  bool fits(const KeyPlan& its_plan) const {
    return its_plan.elements == elements && its_plan.dtype == dtype && its_plan.row_elements == row_elements &&
           its_plan.parts == (factored == nullptr ? 0 : factored->workers()) && its_plan.codec == codec &&
           problem_with(its_plan).empty();
  }

  // What compression has left out so far; while a push is under way, who sends. Of steps: u, then v (numeric/dgc.h).
  std::vector<float> residual;
  std::vector<float> former_residual;  // before the last push; empty: not kept
  ResidualChange residual_change;
  float momentum = 0;          // of steps; set before the first push
  double clip_norm = 0;        // of steps; 0: none
  uint64_t rounds_before = 0;  // of steps: of the job that this one resumes
  KeyCounters counters;

  // Of a key of factors, whose elements are those of one worker's; else null. While a round is under way, who computes.
  std::unique_ptr<FactoredUpdate> factored;

  bool takes_steps() const { return codec.makes_steps(); }
  // What a snapshot keeps of it: the residual, and how far the warm-up is.
  size_t kept_floats() const { return residual.size() + (takes_steps() ? kRoundFloats : 0); }

  std::optional<KeyPlan> plan;
  std::optional<KeyPlan> captured_plan;
  uint64_t round = 0;  // the last one begun
  double updates = 0;  // with staleness: as the shard that answered last counts them
  // With staleness: of the last round whose answers have all landed, and the least clock in these; and in those of the
  // round under way.
  LandedRound landed_round{};
  uint64_t least_clock = 0;
  bool catches_up = false;    // until its first init is complete, which brings a value and its round
  bool learns_round = false;  // the first slice of that value tells the round

  // Of a key of rows.
  int pushes = 0;                  // choose_route
  std::vector<int64_t> left_over;  // receiver thread: rows of the landing array that hold sums of the last round
  std::map<uint32_t, Successor> successors;  // by wire key
  uint32_t next_plan = 0;                    // the successor that the next operation waits for; 0: none
  uint32_t announced = 0;                    // on rank 0: the one that the next push tells of

  // --- the operations; the front one is under way if `active` ------------------------------------------------------
  std::deque<Operation> operations;
  bool active = false;
  uint32_t outstanding = 0;   // shards whose answer must land, and frames that must leave, before it is complete
  uint32_t to_land = 0;       // those answers
  std::vector<bool> landed;   // by shard
  std::deque<Frame> unready;  // of a gated round: what waits for ready(), in the order of slices
  bool is_unready(uint32_t slice) const { return !unready.empty() && slice >= unready.front().header.slice; }
  Transfer& transfer() const { return *operations.front().transfer; }
  const KeyPlan& plan_in_use() const {
    return active && operations.front().successor != nullptr ? operations.front().successor->plan : *plan;
  }

  // --- local aggregation -------------------------------------------------------------------------------------------
  bool by_leader = false;                   // its rounds go through the leader of this machine, another worker
  std::shared_ptr<MachineSum> machine_sum;  // this worker leads, and adds up its rounds
  // Nothing is under way, and so nothing that it lent; nor does anything wait but a move that no round has begun. On a
  // leader: nor has a push of another worker come.
  bool is_idle() const { return !active && operations.empty() && next_plan == 0 && machine_sum.use_count() <= 1; }
  bool sums_here() const { return machine_sum != nullptr && transfer().is_round(); }

  void taken_back() override { frame_left(*this); }
};

}  // namespace p3
