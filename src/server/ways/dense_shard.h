// What the slices of dense keys have in common on their server: what may come for one, and where it goes.
#pragma once

#include "server/shard.h"

namespace p3 {

class DenseShard : public Shard {
 public:
  DenseShard(const ServerKey& key, uint32_t index, int thread, ShardHost& host);

  // --- the receiver thread -----------------------------------------------------------------------------------------
  // Rank 0's first init is received straight into the value, if that is not loaded; later ones elsewhere, because that
  // may still be on its way.
  void* place_of(const Header& header, PooledBuffer& buffer) override;
  size_t answer_bytes(const Header& header) const override;

  void take_over(const Claims& its) override;
  void begin_behind(uint64_t round) override;
  bool load(uint8_t part, const void* content, size_t bytes) override;

 protected:
  // Of a push: what its length did not show. nullptr: nothing, or it brings no gradient.
  const char* problem_with_gradient_of(const Task& task) const;
  uint8_t part_of_master(const Optimizer* optimizer) const override;

 private:
  const char* problem_with_payload(const Header& header, int worker) const override;

  bool has_first_value_ = false;  // receiver thread: first()'s first init has come, perhaps not whole, or is not needed
  bool is_loaded_ = false;
};

}  // namespace p3
