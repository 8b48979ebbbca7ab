// One slice of a dense key with a quorum on its server (quorum.h). The difference of each push has been multiplied by the
// push's weight, RoundScalars::rescale, by whose sum the round's sum is divided; so a worker may count more than once in
// one round, and in another not at all. The optimizer takes one step for each round.
//
// A worker stands aside by a push that says that it has taken its last step (is_last_step), and is answered when all do.
// least_clock() of an answer is the round of the worker's own push if that is in the value, and less if it was late.
//
// Memory: as a CopiedSlice; of the open round the parts of a sum that wait for others (rank_sum.h), and the sum of what
//         came late.
#pragma once

#include <chrono>
#include <cstdint>
#include <vector>

#include "numeric/rank_sum.h"
#include "server/discipline/quorum/quorum.h"
#include "server/discipline/stale/copied_slice.h"

namespace p3 {

class QuorumSlice final : public CopiedSlice {
 public:
  QuorumSlice(const ServerKey& key, uint32_t index, int thread, ShardHost& host);
  ~QuorumSlice() override { host_.resume_at(*this, {}); }

 private:
  void push(Task& task, Reply& reply) override;
  const char* problem_with_push(const Task& task) const;
  void add(Task& task, bool is_late);
  // Closes the open round if it is over, which may be because the time has come, and answers whoever can be by now.
  void resume(Reply& reply) override;
  void answer(const Quorum::Settled& settled, Reply& reply);
  // The value becomes that of the round.
  void update();
  PooledBuffer take_sum();
  uint64_t round_of(int worker) const override { return pushes_[static_cast<size_t>(worker)].round; }

  // The last one of a worker.
  struct Push {
    uint64_t round = 0;
    int32_t priority = 0;
  };

  Quorum quorum_;
  std::vector<Push> pushes_;  // by rank
  uint64_t closed_ = 0;       // rounds
  // Of the open round.
  RankSum on_time_, late_;
  std::vector<double> weights_;  // of those on time, by rank
  double late_weight_ = 0;       // of the others, together
  RoundSettings settings_{};     // of the last push
};

}  // namespace p3
