// What all nodes of a job agree on for one key: how it is cut, and five independent choices of how its rounds go. The
// scheduler's planner (p3/plan/planner.py) decides them; workers and servers read them here and nowhere else.
#pragma once

#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "p3/codec.h"
#include "p3/dtype.h"

namespace p3 {

constexpr uint64_t kUnboundedStaleness = std::numeric_limits<int64_t>::max();  // nobody waits for anybody

constexpr double kMostGraceS = 1e8;  // three years

constexpr uint32_t kDefaultSliceElements = 50000;  // P3 (SysML'19), section 5.7: the knee of the curve

// What becomes of the workers' gradients. The numbers are those of p3/plan/key_plan.py.
enum class Reduction : uint8_t {
  kSum,
  kAverage,  // over the workers that took part in the round
  kMean,     // over all workers of the job
  kNorm,     // there are none: each server tells the norm of what it has summed of the store's other keys
};

// Of a key of norms, which has one slice on each server, of two float64: the sum of the squares of what that server has
// summed in a round of the other keys of its store, and its largest absolute value.
constexpr uint32_t kNormElements = 2;

// Who applies the optimizer's rule. The numbers are those of p3/plan/key_plan.py.
enum class Update : uint8_t {
  kServers,  // to what has been reduced; without an optimizer that is the new value
  kSteps,    // the workers apply its momentum, and the servers subtract the steps that they send: the codec makes them
  kWorkers,  // each to its own value, of what has been gathered
};

struct KeyPlan {
  uint32_t wire_key = 0;
  DType dtype = DType::kFloat32;
  uint64_t elements = 0;
  uint32_t slice_elements = kDefaultSliceElements;
  // The slices of all keys announced before, so that those of the whole job, not of each key, go round robin over the
  // servers.
  uint64_t first_slice = 0;
  // Of a key of rows (rows.h): elements of a row, and how many partitions take the place of slices. 0: a dense key.
  uint32_t row_elements = 0;
  uint32_t partitions = 0;
  // Of a key that is gathered instead of summed (factors.h): one part of `elements` from each so many workers, one after
  // the other. Each part is cut into slices of its own. 0: the key is summed.
  uint32_t parts = 0;
  // Ranks: the slices of the job that have the same ones go to them in turn, and one may stand there several times. Empty:
  // to all servers.
  std::vector<uint16_t> servers{};

  // Discipline: how many rounds the fastest worker may be ahead of the slowest. 0: rounds are synchronous. Else each push
  // updates the key at once, and push r of a worker is answered when all others have pushed r - staleness. Such a key
  // needs an optimizer on its servers, each worker pushes it on its own, and it keeps its plan; an average is over all
  // workers of the job.
  uint64_t staleness = 0;
  // Of what is pushed to servers; and steps come back so. To the leader of their machine workers push plain gradients, and
  // get plain values from it.
  Compression codec{};
  Reduction reduction = Reduction::kSum;
  Update update = Update::kServers;
  // Of what comes back, wherever it is shorter so (Compression::if_shorter). With an optimizer on the servers: changes of
  // the value, which each worker adds to the one that it has. Without: the sums.
  Compression value_codec{};
  // Of a key whose rounds close without who is late (docs/local-steps.md): how many workers must have pushed, and how long
  // the others are waited for then. Each worker counts rounds of its own, so `staleness` is kUnboundedStaleness. 0: no
  // round closes so.
  uint32_t quorum = 0;
  double grace_s = 0;

  bool is_synchronous() const { return staleness == 0; }
  bool has_quorum() const { return quorum > 0; }
  bool has_rows() const { return row_elements > 0; }
  bool is_gathered() const { return parts > 0; }
  bool takes_steps() const { return update == Update::kSteps; }
  // Of sums that the workers apply.
  Compression codec_of_sums() const {
    return value_codec.codec() != nullptr ? value_codec : codec.carries_sums() ? codec : Compression();
  }
  bool averages() const { return reduction == Reduction::kAverage || reduction == Reduction::kMean; }
  bool tells_norms() const { return reduction == Reduction::kNorm; }
  // Whether what its servers sum is part of its store's norm, if that has one.
  bool is_part_of_norm() const { return is_synchronous() && !is_gathered() && is_float(dtype) && !tells_norms(); }
  // Whether a key that was declared so, by its content, can have it.
  bool fits(const KeyPlan& declared) const {
    return elements == declared.elements && dtype == declared.dtype && row_elements == declared.row_elements &&
           parts == declared.parts && codec == declared.codec;
  }
  // Whether a key can go over from it to another plan between two rounds, and to it from that one.
  bool can_move() const { return has_rows() && is_synchronous(); }
  bool can_follow(const KeyPlan& former) const { return can_move() && former.can_move() && fits(former); }
  // Whether it differs from another plan in nothing but how a dense key is cut and where its slices are, so that a job may go
  // over to it while it rests; where the servers have an optimizer, they keep more than that, and it may not.
  bool is_another_cut_of(const KeyPlan& former) const {
    return fits(former) && !has_rows() && !is_gathered() && !takes_steps() && !tells_norms() && is_synchronous() &&
           former.is_synchronous() && reduction == former.reduction && update == former.update &&
           value_codec == former.value_codec && value_codec.residuals() == 0;
  }
  // Whether the workers of a machine may add up what they have for the servers, and encode the sum: each clock of
  // staleness is one worker's, and so is the momentum of a codec that makes steps.
  bool adds_up_on_machine() const { return !codec.makes_steps() && is_synchronous(); }
  // Whether groups of workers may do so, each of whom leads for some servers: what travels between machines stays as it
  // is, so nothing of it may be encoded; and norms, which are few bytes that all wait for, go the shortest way.
  bool adds_up_in_groups() const {
    return is_synchronous() && !has_rows() && !is_gathered() && !takes_steps() && !tells_norms() &&
           codec.codec() == nullptr && value_codec.codec() == nullptr;
  }
};

class Optimizer;

// Why no key can have such a plan, in words; empty: one can. And why none can in a job of so many workers, or if any of them
// may be lost; and with that optimizer on its servers. What scripts ask for, their session refuses before, and says what
// to do.
std::string problem_with(const KeyPlan& plan);
std::string problem_with(const KeyPlan& plan, int workers, bool outlives_workers);
std::string problem_with(const KeyPlan& plan, const Optimizer& optimizer);
// And why none can in a job of so many servers.
std::string problem_with_servers(const KeyPlan& plan, int num_servers);

}  // namespace p3
