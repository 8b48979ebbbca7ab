// One operation on a key of rows on its worker: see transfer.h. What comes back are rows in frames, which land() copies to
// their places.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "plan/routing.h"
#include "plan/rows.h"
#include "worker/key.h"
#include "worker/operation.h"
#include "worker/transfer.h"
#include "worker/ways/rows/rows_way.h"

namespace p3 {

class RowsTransfer final : public Transfer {
 public:
  // `rows` and `landing` as Worker's methods have them; the ids ascend, but for kFetch, which takes any order.
  // kInit asks whether the rows are there. `memory`: what `rows` borrows from, if the caller does not keep it. `goes_on`:
  // of a skip, as Worker::skip.
  RowsTransfer(Kind its_kind, RowsWay& way, const RowsView& rows, void* landing, uint8_t part = 0,
               std::shared_ptr<const void> memory = nullptr, bool goes_on = false);

  std::vector<Operation> to_catch_up;  // of an init: see ask_for_value()

  std::vector<Operation> ask_for_value() override { return std::exchange(to_catch_up, {}); }
  std::vector<Frame> begin(const KeyPlan& plan, Header header) override;
  void encode(const Header& header, const void* piece, void* payload) override;
  const char* problem_with(const Header& header) const override;
  void* place_of(const Header& header) override;
  const char* land(const Header& header, const void* payload, bool& is_last) override;
  void finish() override;
  void count() override;

  // Once it is finished: the rows of the landing array that have changed, ascending.
  const std::vector<int64_t>& changed() const { return changed_; }

 private:
  struct Part {
    std::vector<RowsPiece> pieces;
    uint32_t fetched = 0;         // pieces whose answer has come
    uint64_t next_row = 0;        // the first that may come
    std::vector<int64_t> landed;  // ids
  };

  char* landing() const { return static_cast<char*>(landing_); }

  RowsWay& way_;
  const std::shared_ptr<const void> memory_;
  const RowsView rows_;
  void* const landing_;
  const bool goes_on_;
  // Of a kFetch whose ids did not ascend: the same sorted, each once, and where their rows land first.
  std::vector<int64_t> sorted_ids_;
  std::vector<char> sorted_rows_;
  RowsView asked_;  // what travels: `rows_`, or the sorted ids
  KeyPlan plan_;
  size_t row_bytes_ = 0;
  std::vector<Part> parts_;
  ReceivedRows received_;
  RowCounts counts_;
  uint32_t next_plan_ = 0;  // that the key's next round takes; 0: none
  bool has_sums_ = false;   // what landed are sums
  std::vector<int64_t> changed_;
  uint64_t bytes_sent_ = 0, bytes_received_ = 0;
};

}  // namespace p3
