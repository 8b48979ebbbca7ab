// One sum of gradients in the order of their places, in whatever order they come: the same bits in every run.
//
// A machine's sum has a place for each of its workers, the total a place for each machine: the canonical order.
// Memory:  takes over the buffers of a pool that it is given, and holds those that came before their turn. The first one
//          becomes the accumulator itself where the types allow, so that one worker's copy is all there is.
// Threads: none of its own.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/buffer_pool.h"
#include "p3/compression.h"
#include "p3/dtype.h"

namespace p3 {

class RankSum {
 public:
  // `in_order` false: added as they come, in less memory.
  RankSum(int places, DType type, uint32_t elements, BufferPool& buffers, bool in_order = true);
  ~RankSum();
  RankSum(const RankSum&) = delete;
  RankSum(RankSum&& other) noexcept;

  // Takes over `gradient`, which is written as `compression` says, of encoded_bytes(); null: this place has none.
  void add(int place, void* gradient, const Compression& compression = {});
  bool has(int place) const { return here_[static_cast<size_t>(place)]; }
  bool complete() const { return came_ == here_.size(); }

  // The sum so far, in sum_type(type), or null if there is none: the caller's from now on. The next sum begins.
  void* take();
  // The same in the key's own type: half precision is rounded, as it is wherever a sum leaves its machine.
  void* take_rounded();
  size_t bytes() const { return elements_ * size_of(type_); }
  size_t sum_bytes() const { return elements_ * size_of(sum_type(type_)); }

 private:
  struct Early {
    void* gradient = nullptr;
    Compression compression;
  };

  void accumulate(void* gradient, const Compression& compression);

  const DType type_;
  const uint32_t elements_;
  BufferPool& buffers_;
  const bool in_order_;
  void* accumulator_ = nullptr;
  std::vector<bool> here_;
  std::vector<Early> early_;  // by place: came before its turn
  size_t came_ = 0;
  size_t next_ = 0;  // places below this one are in the accumulator
};

}  // namespace p3
