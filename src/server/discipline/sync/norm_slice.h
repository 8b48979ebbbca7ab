// The slice of a key of norms (KeyPlan::tells_norms) on its server. Workers push nothing but that they have begun the round;
// the answer is the norm of what this server has summed in that round of the store's other keys, as soon as it has summed
// all of it: the sum of squares, and the largest absolute value. Or that there is none, as no worker goes on.
//
// Memory: as any slice.
#pragma once

#include "server/discipline/sync/slice.h"

namespace p3 {

class NormSlice final : public ServerSlice {
 public:
  using ServerSlice::ServerSlice;

  void take_over(const Claims& its) override {
    ServerSlice::take_over(its);
    key.norm->go_on_behind(its.best().round);
  }

 private:
  // Or waits for the shards that have not reported yet.
  void resume(Reply& reply) override;
  void update() override;
};

}  // namespace p3
