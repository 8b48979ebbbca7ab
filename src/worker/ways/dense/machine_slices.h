// A dense key on the leader of its machine: see machine/sum.h. Gradients come plain; if the key is compressed, their sum
// is encoded as it leaves, and what that leaves out the leader keeps.
//
// Threads: encode() by who sends; the key's round ends only when all its frames have left.
#pragma once

#include <cstdint>
#include <vector>

#include "numeric/rank_sum.h"
#include "transport/van.h"
#include "worker/machine/sum.h"
#include "worker/ways/dense/dense_way.h"

namespace p3 {

class MachineSlices final : public MachineSum, private Encoder {
 public:
  // `way`: the key's on the leader, which outlives it.
  MachineSlices(const Machine& machine, const KeyPlan& plan, uint64_t next_round, DenseWay& way);

  size_t room_bytes(const Header& push) const override { return push.payload_bytes; }
  Outcome add(int place, const Frame& frame, PooledBuffer payload) override;
  // From where it has landed; the leader has it already.
  Passed pass_on(const Header& header, const void* value, Lender& landing) override;
  int frames_from_key(uint32_t shard) const override { return seats_of(shard).followers + encodes(); }

 private:
  const char* problem_with_payload(int place, const Header& push) const override;
  bool encodes() const { return plan.codec.encoding != Encoding::kPlain; }
  // The machine's push of a key that is compressed; `sum`: none, if nobody has a gradient.
  Frame to_encode(const Header& header, PooledBuffer sum);
  void encode(const Header& header, const void* sum, void* payload) override;

  DenseWay& way_;
  std::vector<std::vector<RankSum>> sums_;  // by slice, of each level
  std::vector<PooledBuffer> leaving_;       // by slice: a sum until it is encoded
  std::vector<uint8_t> goes_on_;            // by slice: in the round, some worker whose push says so (p3::goes_on)
};

}  // namespace p3
