// One operation on a key of rows on its worker: see transfer.h. What comes back are rows in frames, which land() copies to
// their places.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "numeric/sorted_rows.h"
#include "wire/rows.h"
#include "worker/key.h"
#include "worker/transfer.h"

namespace p3 {

// Of one round of a key.
struct RowsOfRound {
  uint64_t pushed = 0;     // by all workers, added up
  uint64_t touched = 0;    // their union
  uint32_t next_plan = 0;  // that the key's next round takes; 0: none
};

class RowsTransfer final : public Transfer {
 public:
  // `rows` and `landing` as Worker's methods have them; the ids ascend, but for kFetch, which takes any order.
  // kInit asks whether the rows are there.
  RowsTransfer(Kind kind, Key& key, const RowsView& rows, void* landing, uint8_t part = 0);
  // The same, with ids of its own.
  RowsTransfer(Kind kind, Key& key, std::vector<int64_t> ids, const void* values, void* landing, uint8_t part = 0);
  // kPush of a sorted copy.
  RowsTransfer(Key& key, std::unique_ptr<const SortedRows> sorted, void* landing);

  std::vector<Frame> begin(const KeyPlan& plan, Header header) override;
  bool asks(uint32_t partition) const override { return !parts_[partition].pieces.empty(); }
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

  bool is_sorted_copy() const { return kind == Kind::kFetch && !ids_.empty() && rows_.ids != ids_.data(); }
  FrameKind frame_kind() const;
  DType type() const { return part_ == 0 ? key_.dtype : sum_type(key_.dtype); }
  char* landing() const { return static_cast<char*>(landing_); }

  std::unique_ptr<const SortedRows> sorted_;
  RowsView rows_;
  void* const landing_;
  std::vector<int64_t> ids_;   // its own; or kFetch: the caller's, ascending, each once, if they were not so
  std::vector<char> fetched_;  // the rows of such a sorted copy
  KeyPlan plan_;
  size_t row_bytes_ = 0;
  std::vector<Part> parts_;
  ReceivedRows received_;
  RowsOfRound round_;
  bool has_sums_ = false;  // what landed are sums
  std::vector<int64_t> changed_;
  uint64_t bytes_sent_ = 0, bytes_received_ = 0;
};

}  // namespace p3
