// What the partitions of keys of rows have in common on their server: what may come for one, the rows of its value and of
// its state, and how they go out.
#pragma once

#include <cstdint>
#include <vector>

#include "numeric/row_sum.h"
#include "plan/rows.h"
#include "server/shard.h"
#include "transport/lent_buffers.h"

namespace p3 {

class RowsShard : public Shard {
 public:
  RowsShard(const ServerKey& key, uint32_t index, int thread, ShardHost& host);

  // --- the receiver thread -----------------------------------------------------------------------------------------
  void* place_of(const Header& header, PooledBuffer& buffer) override;
  size_t answer_bytes(const Header& header) const override;

 protected:
  // Updates these rows of the value, which ascend, each by its gradient: gradient_of(i), of rows[i]. In runs of rows that
  // follow each other in the value and whose gradients do so in memory, each `gradient_bytes` behind the one before. The
  // state has been made.
  template <typename GradientOf>
  void update_rows(const Optimizer& optimizer, const std::vector<int64_t>& rows, const RoundScalars& scalars,
                   size_t gradient_bytes, GradientOf gradient_of);
  // The frames that tell these rows, which ascend: their values, or their `sums`. Each is sent to so many receivers, at
  // least one. `counts`: what each says of the round.
  std::vector<Frame> frames_of(const Header& header, const std::vector<int64_t>& rows, bool as_blocks,
                               const RowsHeader& counts, int receivers, const RowSum* sums = nullptr);

  const RowRange range_;
  const size_t row_bytes_;  // of the value
  ReceivedRows received_;   // what is worked on

 private:
  const char* problem_with_payload(const Header& header, int worker) const override;

  bool has_all_back() override { return lent_.is_idle(); }
  bool has_value() const override { return missing_ == 0; }
  void fetch(Task& task, Reply& reply) override;
  void store(Task& task, Reply& reply) override;
  void note_stored(uint8_t part, int64_t row);
  void update_run(const Optimizer& optimizer, int64_t row, size_t count, const RoundScalars& scalars,
                  const void* gradients);
  size_t row_bytes_of(uint8_t part) const { return key.plan.row_elements * size_of(type_of(part)); }
  // Where a row lies in an array of part `part`.
  char* row_at(void* array, uint8_t part, int64_t row) const {
    return static_cast<char*>(array) + (static_cast<uint64_t>(row) - range_.first) * row_bytes_of(part);
  }

  // How many a first value has: the value, and of a successor the optimizer's state as well.
  uint64_t first_parts() const;

  // Until none is missing: which rows have been stored, of each part that a first value has.
  std::vector<bool> stored_;
  uint64_t missing_;
  std::vector<void*> state_of_run_;
  LentBuffers lent_;
};

template <typename GradientOf>
void RowsShard::update_rows(const Optimizer& optimizer, const std::vector<int64_t>& rows, const RoundScalars& scalars,
                            size_t gradient_bytes, GradientOf gradient_of) {
  for (size_t begin = 0, end; begin < rows.size(); begin = end) {
    const char* const gradients = gradient_of(begin);
    for (end = begin + 1; end < rows.size() && rows[end] == rows[end - 1] + 1 &&
                          gradient_of(end) == gradients + (end - begin) * gradient_bytes;)
      ++end;
    update_run(optimizer, rows[begin], end - begin, scalars, gradients);
  }
}

}  // namespace p3
