// One sum of gradients by their places, in whatever order they come: the same bits in every run.
//
// A machine's sum has a place for each of its workers, the total a place for each machine. The sum of n places is that of
// the first m and that of the others, m being the largest power of two below n, each made in the same way. So neighbours
// are added as soon as they are there, whoever is late.
//   Payloads of few bits are added one after the other in runs of neighbours (Codec::run()), and runs are to the tree what
// places are otherwise: of two bits 16, of one bit 32, of four bits 8, of eight bits 4, which together take the bytes of one
// sum; of the largest elements 16.
//
// Memory:  takes over buffers of a pool. Of n places at most n/2, rounded up, have parts of a sum that wait for others;
//          while m places are missing, at most m * log2(n), rounded up: 6 if rank 0 of 64 is late. A part is at most a
//          sum; of a run that is not complete yet, a sum and the payloads that came before their turn. The first gradient
//          becomes the sum itself where the types allow, so that one worker's copy is all there is.
// Threads: none of its own.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/buffer_pool.h"
#include "p3/codec.h"
#include "p3/dtype.h"

namespace p3 {

class RankSum {
 public:
  // `encoding`: of most gradients. `in_order` false: added as they come, in less memory.
  RankSum(int places, DType type, uint32_t elements, BufferPool& buffers, Encoding encoding = Encoding::kPlain,
          bool in_order = true);

  // Takes over `gradient`, which is written as `compression` says; none: this place has none.
  void add(int place, PooledBuffer gradient, const Compression& compression = {});
  bool has(int place) const { return here_[static_cast<size_t>(place)]; }
  bool complete() const { return came_ == here_.size(); }

  // The sum, in sum_type(type), or none if no place has any. The next sum begins. In order only when complete().
  PooledBuffer take();
  // The same in the key's own type: half precision is rounded, as it is wherever a sum leaves its machine.
  PooledBuffer take_rounded();
  size_t bytes() const { return elements_ * size_of(type_); }
  size_t sum_bytes() const { return elements_ * size_of(sum_type(type_)); }

 private:
  // The sum of the places from `begin` to `end`; of one place, its gradient as it came.
  struct Part {
    size_t begin, end;
    PooledBuffer data;
    Compression compression;
    bool is_sum;
  };

  bool joins(const Part& left, const Part& right) const;
  void join(Part& left, Part right);
  void make_sum(Part& part);

  const DType type_;
  const uint32_t elements_;
  BufferPool& buffers_;
  const size_t run_;
  const bool in_order_;
  std::vector<bool> here_;
  std::vector<Part> parts_;  // by place
  size_t came_ = 0;
};

}  // namespace p3
