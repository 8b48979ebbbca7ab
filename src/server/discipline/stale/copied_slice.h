// A dense slice whose value goes out as copies, so that it may change while a slow worker still reads: of keys in which
// each worker counts rounds of its own.
//
// Memory: the value and the optimizer's state; a copy of the value for each answer that is on its way. One push of each
//         worker at a time, so at most one copy for each.
#pragma once

#include <cstdint>
#include <vector>

#include "server/discipline/stale/stale_shard.h"
#include "server/ways/dense_shard.h"
#include "transport/lent_buffers.h"

namespace p3 {

class CopiedSlice : public StaleShard<DenseShard> {
 public:
  using StaleShard::StaleShard;

 protected:
  // A frame of the value as it is now, for so many receivers. Round and priority are still to come.
  Frame copy_of_value(size_t receivers);

 private:
  // The last round of this worker's that has come; 0: none.
  virtual uint64_t round_of(int worker) const = 0;

  bool has_all_back() override { return lent_.is_idle(); }
  void send_value(const std::vector<int>& workers, Reply& reply, bool asked_for) override;
  Frame copy_of(const Header& header, const void* array, size_t bytes, int receivers);
  void replace_value(PooledBuffer value) override;
  void fetch(Task& task, Reply& reply) override;
  void store(Task& task, Reply& reply) override;

  LentBuffers lent_;
};

}  // namespace p3
