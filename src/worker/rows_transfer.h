// One operation on a key of rows on its worker: what it asks of each partition, and how the answers are put together.
//
// Threads: begin() once, before any frame is sent; encode() by who sends; all else on the receiver thread.
// Memory:  borrows the caller's arrays, and lends its pieces to the frames, until the operation is done.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "numeric/sorted_rows.h"
#include "wire/rows.h"
#include "transport/van.h"
#include "p3/wire.h"

namespace p3 {

// Of one round of a key.
struct RowsOfRound {
  uint64_t pushed = 0;     // by all workers, added up
  uint64_t touched = 0;    // their union
  uint32_t next_plan = 0;  // that the key's next round takes; 0: none
};

class RowsTransfer final : public Encoder {
 public:
  enum class Kind { kPush, kSkip, kWish, kFetch, kStore };

  // `rows` and `landing` as Worker's methods have them; the ids ascend, but for kFetch, which takes any order.
  RowsTransfer(Kind kind, const RowsView& rows, void* landing, uint8_t part);
  // The same, with ids of its own.
  RowsTransfer(Kind kind, std::vector<int64_t> ids, const void* values, void* landing, uint8_t part);
  // kPush of a sorted copy.
  RowsTransfer(std::unique_ptr<const SortedRows> sorted, void* landing);

  // The frames to send, of which `header` tells what they have in common.
  // `next_plan`: of a push of rank 0, see RowsHeader.
  std::vector<Frame> begin(const KeyPlan& plan, const Header& header, bool as_blocks, uint32_t next_plan = 0);
  bool asks(uint32_t partition) const { return !parts_[partition].pieces.empty(); }
  void encode(const Header& header, const void* piece, void* payload) override;

  // What is wrong with an answer's header, or null.
  const char* problem_with(const Header& header) const;
  // Where its payload goes; null: anywhere, as land() puts it in its place.
  void* place_of(const Header& header);
  // Takes an answer. Returns what is wrong with it, or null. `complete`: it was the partition's last.
  const char* land(const Header& header, const void* payload, bool& complete);
  // All have landed. `left_over`: the rows of the landing array that hold sums of the round before, and then of this one.
  void finish(std::vector<int64_t>& left_over);

  bool updated() const { return updated_; }
  bool holds_value() const { return landing_ != nullptr; }
  const RowsOfRound& round() const { return round_; }
  uint64_t own_rows() const { return rows_.count; }
  const std::vector<int64_t>& changed() const { return changed_; }
  uint64_t bytes_sent() const { return bytes_sent_; }
  uint64_t bytes_received() const { return bytes_received_; }

 private:
  struct Part {
    std::vector<RowsPiece> pieces;
    uint32_t fetched = 0;         // pieces whose answer has come
    uint64_t next_row = 0;        // the first that may come
    std::vector<int64_t> landed;  // ids
  };

  bool is_sorted_copy() const { return kind_ == Kind::kFetch && !ids_.empty() && rows_.ids != ids_.data(); }
  bool is_round() const { return kind_ == Kind::kPush || kind_ == Kind::kSkip; }
  char* landing() const { return static_cast<char*>(landing_); }

  const Kind kind_;
  std::unique_ptr<const SortedRows> sorted_;
  RowsView rows_;
  void* const landing_;
  const uint8_t part_;
  std::vector<int64_t> ids_;   // its own; or kFetch: the caller's, ascending, each once, if they were not so
  std::vector<char> fetched_;  // the rows of such a sorted copy
  KeyPlan plan_;
  size_t row_bytes_ = 0;
  std::vector<Part> parts_;
  ReceivedRows received_;
  RowsOfRound round_;
  bool updated_ = false;
  bool sums_ = false;  // what landed are sums
  std::vector<int64_t> changed_;
  uint64_t bytes_sent_ = 0, bytes_received_ = 0;
};

}  // namespace p3
