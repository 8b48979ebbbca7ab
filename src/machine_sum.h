// One key on the leader of its machine: the gradients of the machine's workers come in, each slice's sum is made in the
// order of ranks, and leaves as one push. Workers count by their place on the machine; the leader's is 0.
//
// Threads: the receiver's alone, but left(): who holds the sending role.
// Memory:  at most one copy per worker of slices whose sum is incomplete, and the sums that have not left.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "p3/buffer_pool.h"
#include "p3/rank_sum.h"
#include "p3/slicing.h"
#include "p3/van.h"
#include "p3/wire.h"

namespace p3 {

class MachineSum {
 public:
  MachineSum(const KeyPlan& plan, int workers, BufferPool& buffers);
  ~MachineSum();

  // What is wrong with a push that another worker announces, or null. Then where its payload goes: null if it has none.
  const char* problem_with(int place, const Header& push) const;
  void* room_for(int place, const Header& push);
  // The leader's own: copied from `gradient`; null: it has none.
  void bring(const Header& push, const void* gradient);
  // Whose push of which round is missing where others' is in.
  std::optional<uint64_t> waits_for(int place) const;

  // Adds what came of this worker. Returns the place of one whose scalars differ from this one's, or -1.
  int add(int place, const Header& push);
  const RoundScalars& scalars(uint32_t slice) const { return slices_[slice].push.scalars; }
  bool complete(uint32_t slice) const { return slices_[slice].sum.complete(); }
  // Once complete: the machine's push, with the leader's priority. The next round of the slice begins.
  Frame take(uint32_t slice);
  // That push is no longer borrowed.
  void left(uint32_t slice);

 private:
  struct SliceSum {
    RankSum sum;
    std::vector<uint64_t> came;   // by place: the last round that was announced
    std::vector<void*> gradient;  // by place: received and not yet given to `sum`
    uint64_t round = 1;           // that is being summed
    Header push;                  // of the machine
    int first = -1;               // whose scalars the others are compared with
    void* leaving = nullptr;      // the sum, while it is borrowed
  };

  const KeyPlan plan_;
  BufferPool& buffers_;
  std::vector<SliceSum> slices_;
};

}  // namespace p3
