// Rows of a key: what a row_sparse gradient touches of a tensor whose first dimension is large. Sets of row ids, how
// they travel, and how a key is cut into partitions, which are to rows what slices are to elements.
//
// A partition is a contiguous range of rows that one server owns: the unit of aggregation and update. What one worker
// sends for one partition in one round is a set of rows, in one or more frames, each of about the bytes of a slice, so
// that something more urgent waits for one frame at most. Parallax (EuroSys'19), sections 3 and 5.
// Memory: plain values. Threads: pure functions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "p3/rows.h"
#include "p3/slicing.h"
#include "p3/wire.h"

namespace p3 {

// How the ids of one frame are written.
enum class IdCoding : uint8_t {
  kRange = 0,   // first_row, and those behind it; no bytes
  kGaps = 1,    // the distance of each from the one before, less one (of the first: from first_row), as LEB128
  kBitmap = 2,  // all rows from first_row on are there; bit i (least significant first) says that row i was touched
};

// Before the ids and the values in the payload of kPushRows and kRows, and before the ids in kFetchRows.
struct RowsHeader {
  uint64_t first_row = 0;  // of the key
  uint32_t rows = 0;       // whose values (kFetchRows: ids) the frame carries
  uint32_t id_bytes = 0;   // how long the ids are; padded so that the values are aligned to 8 bytes
  IdCoding coding = IdCoding::kRange;
  uint8_t last = 0;  // of this sender's frames of the partition and round
  uint16_t reserved = 0;
  uint32_t next_plan = 0;  // kPushRows of rank 0, and kRows: another plan of the key begins after this round; 0: no
  // Of the partition in this round, added up over the workers: kRows; and kPushRows of a machine, its last frame.
  uint32_t pushed_rows = 0;
  uint32_t touched_rows = 0;  // kRows: the union of those

  static constexpr uint32_t saturated(uint64_t rows) {
    return rows < ~uint32_t{0} ? static_cast<uint32_t>(rows) : ~uint32_t{0};
  }
};
static_assert(sizeof(RowsHeader) == 32, "it is a part of the wire format");

// The plans of a key of rows have row_elements and partitions (slicing.h).
uint64_t row_count(const KeyPlan& plan);
RowRange partition_at(const KeyPlan& plan, uint32_t index);  // index < slice_count(plan)
uint32_t rows_per_frame(const KeyPlan& plan);                // at most
// Of any frame of rows of the plan whose elements have `element_bytes`, at most.
uint64_t max_rows_payload(const KeyPlan& plan, size_t element_bytes);

// One frame of rows as it will be: those with the ids begin .. begin + count of the list that was cut.
struct RowsPiece {
  RowsHeader header;
  uint64_t begin = 0;
  uint64_t count = 0;  // header.rows, unless the frame has all rows of a block and a bitmap

  uint64_t payload_bytes(size_t row_bytes) const { return sizeof header + header.id_bytes + header.rows * row_bytes; }
};

// Cuts ids begin .. end of a list, all in `range`, into frames, of which the last says so; at least one. `as_blocks`:
// frames of all rows of the range, with a bitmap of those that are in the list.
std::vector<RowsPiece> cut_rows(const KeyPlan& plan, const RowRange& range, const int64_t* ids, uint64_t begin,
                                uint64_t end, bool as_blocks);

// Writes the header and the ids of a frame; returns where its values begin.
char* write_ids(const RowsPiece& piece, const int64_t* ids, void* payload);

// The whole payload: fill(destination, i) writes the values of ids[i]. Rows of a block that are not in the list are 0.
template <typename Fill>
void write_rows(const RowsPiece& piece, const int64_t* ids, size_t row_bytes, void* payload, Fill fill) {
  char* values = write_ids(piece, ids, payload);
  const bool block = piece.header.coding == IdCoding::kBitmap;
  if (block) std::memset(values, 0, piece.header.rows * row_bytes);
  for (uint64_t i = piece.begin; i < piece.begin + piece.count; ++i) {
    const uint64_t place = block ? static_cast<uint64_t>(ids[i]) - piece.header.first_row : i - piece.begin;
    fill(values + place * row_bytes, i);
  }
}

// One frame of rows as it came. Reused from frame to frame.
struct ReceivedRows {
  RowsHeader header;
  std::vector<int64_t> ids;      // of the rows that the sender touched
  const char* values = nullptr;  // in the payload
  size_t row_bytes = 0;

  const char* row(size_t i) const {
    const bool block = header.coding == IdCoding::kBitmap;
    return values + (block ? static_cast<uint64_t>(ids[i]) - header.first_row : i) * row_bytes;
  }
};

// Reads a payload whose rows lie in `range`, behind those of the frames before it: `next_row` is the first that may come,
// and then the first behind this frame. Returns what is wrong with it, or null. `row_bytes`: 0 if only ids come.
const char* read_rows(const KeyPlan& plan, const RowRange& range, size_t row_bytes, const void* payload, size_t bytes,
                      uint64_t& next_row, ReceivedRows& rows);

// Whether the ids ascend and each comes once.
bool is_ascending(const int64_t* ids, uint64_t count);

}  // namespace p3
