// One slice of a dense key on its server, through a round: pushes come in, are summed in order, update the value, and the
// new value goes out from where it lies.
//
// Memory: the value, and with an optimizer its state; of a round that is incomplete, parts of its sum (rank_sum.h).
//         Sends borrow the value and states: nothing changes under them (`outstanding_`).
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "numeric/rank_sum.h"
#include "server/ways/dense_shard.h"
#include "transport/lent_buffers.h"

namespace p3 {

class ServerSlice : public DenseShard, public Lender {
 public:
  ServerSlice(const ServerKey& key, uint32_t index, int thread, ShardHost& host);

  bool can_be_inherited() const override { return !key.plan.is_gathered() && !key.plan.takes_steps(); }
  void take_over(const Claims& its) override;

  // --- any thread --------------------------------------------------------------------------------------------------
  void taken_back() override;

 protected:
  // All have pushed, and no send borrows anything.
  void resume(Reply& reply) override;
  void answer_again(int worker, Reply& reply) override;
  // The value becomes that of the round.
  virtual void update();

  bool has_new_value_ = true;         // of the last round: not all have skipped it
  bool is_sum_of_cut_round_ = false;  // of it: a lost worker may have had a gradient for other slices alone

 private:
  bool has_all_back() override { return outstanding_ == key.pushes_of_round() && round_.pushed == 0; }

  // --- a round -----------------------------------------------------------------------------------------------------
  void push(Task& task, Reply& reply) override;
  void add(Task& task);
  NormPart norm_of_sum() const;
  void publish_sum(PooledBuffer& total);
  // What all workers are to add to the value that they have: it becomes what they have then. `scratch`: of a sum.
  void publish_change(float* scratch);
  // Of a key that takes steps: subtracts the sum from the value, and keeps it as it is sent, if it takes fewer bytes.
  void take_step(const float* sum);
  // What the value is sent as: its frame, which borrows it.
  Frame value_frame(Encoding encoding);
  // The step or the change that led to it, for who has the value before.
  Frame step_frame();
  Frame change_frame();
  void send_value(const std::vector<int>& workers, Reply& reply, bool asked_for) override;

  // --- other contents ----------------------------------------------------------------------------------------------
  void replace_value(PooledBuffer value) override;
  void fetch(Task& task, Reply& reply) override;
  void store(Task& task, Reply& reply) override;
  void copy_value(void* to) const override;
  void make_writable(void*& array, size_t size);
  const void* lent(const void* array);
  void drop_replaced();

  // How what comes back of this slice is encoded.
  const Compression of_changes_, of_sums_;

  // Pushes of the round in progress that are still to come, and sends that borrow the value or a state: who brings it to
  // zero lets the round finish.
  std::atomic<int> outstanding_;

  PooledBuffer wire_value_;  // the sum as it is sent, if it is encoded
  Encoding value_encoding_ = Encoding::kPlain;
  PooledBuffer step_, change_;          // the last one; neither: the value is sent
  RoundSettings published_settings_{};  // of the last round
  bool sums_go_out_ = true;             // of it: who updates by them are the workers
  std::vector<PooledBuffer> replaced_;  // former values and states that a send may still borrow
  std::vector<const void*> not_lent_;   // their successors, of which no send has borrowed anything yet

  RankSum total_;                 // of the machines' sums; of all workers' gradients if they are added as they come
  std::vector<RankSum> machine_;  // by machine, if several workers of one push on their own and are added in order
};

}  // namespace p3
