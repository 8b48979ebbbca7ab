#include "plan/rows.h"

#include <algorithm>
#include <numeric>

namespace p3 {
namespace {

constexpr uint32_t kMaxGapBytes = 5;  // as LEB128; a key has at most 2^31 rows

uint32_t padded(uint64_t bytes) { return static_cast<uint32_t>((bytes + 7) / 8 * 8); }
uint32_t bitmap_bytes(uint32_t rows) { return padded((uint64_t{rows} + 7) / 8); }

// The gap before `ids[i]`, as kGaps writes it. `before`: the row behind the one that came before it.
uint64_t gap_of(const int64_t* ids, uint64_t i, uint64_t before) { return static_cast<uint64_t>(ids[i]) - before; }

uint32_t gap_bytes(uint64_t gap) {
  uint32_t bytes = 1;
  while (gap >>= 7) ++bytes;
  return bytes;
}

RowsPiece piece_of(const int64_t* ids, uint64_t begin, uint64_t count) {
  RowsPiece piece;
  piece.begin = begin;
  piece.count = count;
  piece.header.first_row = static_cast<uint64_t>(ids[begin]);
  piece.header.rows = static_cast<uint32_t>(count);
  if (static_cast<uint64_t>(ids[begin + count - 1] - ids[begin]) == count - 1) return piece;
  piece.header.coding = IdCoding::kGaps;
  uint64_t bytes = 0, next = piece.header.first_row;
  for (uint64_t i = begin; i < begin + count; ++i) {
    bytes += gap_bytes(gap_of(ids, i, next));
    next = static_cast<uint64_t>(ids[i]) + 1;
  }
  piece.header.id_bytes = padded(bytes);
  return piece;
}

// Each returns what is wrong, or null; `end` is behind the last row that may come.
const char* read_gaps(const unsigned char* at, const RowsHeader& header, uint64_t end, std::vector<int64_t>& ids) {
  const unsigned char* const stop = at + header.id_bytes;
  uint64_t next = header.first_row;
  for (uint32_t i = 0; i < header.rows; ++i) {
    uint64_t gap = 0;
    for (uint32_t shift = 0;; shift += 7) {
      if (at == stop || shift == 7 * kMaxGapBytes) return "cut short";
      gap |= static_cast<uint64_t>(*at & 0x7f) << shift;
      if ((*at++ & 0x80) == 0) break;
    }
    if (gap >= end - next) return "outside its partition";
    next += gap + 1;
    ids[i] = static_cast<int64_t>(next - 1);
  }
  if (stop - at >= 8 || std::any_of(at, stop, [](unsigned char byte) { return byte != 0; })) return "malformed";
  return nullptr;
}

const char* read_bitmap(const unsigned char* bits, const RowsHeader& header, std::vector<int64_t>& ids) {
  ids.clear();
  for (uint32_t byte = 0; byte < header.id_bytes; ++byte)
    for (uint32_t bit = 0; bits[byte] >> bit != 0; ++bit) {
      if ((bits[byte] >> bit & 1) == 0) continue;
      const uint32_t row = byte * 8 + bit;
      if (row >= header.rows) return "malformed";
      ids.push_back(static_cast<int64_t>(header.first_row + row));
    }
  return nullptr;
}

}  // namespace

uint64_t row_count(const KeyPlan& plan) { return plan.elements / plan.row_elements; }

RowRange partition_at(const KeyPlan& plan, uint32_t index) {
  const uint64_t rows = row_count(plan), parts = slice_count(plan);
  const uint64_t first = rows * index / parts;
  return {first, rows * (index + 1) / parts - first};
}

uint32_t rows_per_frame(const KeyPlan& plan) { return std::max(1u, plan.slice_elements / plan.row_elements); }

uint64_t max_rows_payload(const KeyPlan& plan, size_t element_bytes) {
  const uint64_t rows = rows_per_frame(plan);
  return sizeof(RowsHeader) + padded(rows * kMaxGapBytes) + rows * plan.row_elements * element_bytes;
}

std::vector<RowsPiece> cut_rows(const KeyPlan& plan, const RowRange& range, const int64_t* ids, uint64_t begin,
                                uint64_t end, bool as_blocks) {
  const uint64_t most = rows_per_frame(plan);
  std::vector<RowsPiece> pieces;
  if (as_blocks) {
    for (uint64_t row = range.first; row < range.first + range.count; row += most) {
      RowsPiece& piece = pieces.emplace_back();
      const uint64_t rows = std::min(most, range.first + range.count - row);
      piece.header.first_row = row;
      piece.header.rows = static_cast<uint32_t>(rows);
      piece.header.coding = IdCoding::kBitmap;
      piece.header.id_bytes = bitmap_bytes(piece.header.rows);
      piece.begin = begin;
      begin = static_cast<uint64_t>(std::lower_bound(ids + begin, ids + end, static_cast<int64_t>(row + rows)) - ids);
      piece.count = begin - piece.begin;
    }
  } else {
    for (; begin < end; begin += pieces.back().count)
      pieces.push_back(piece_of(ids, begin, std::min(most, end - begin)));
  }
  if (pieces.empty()) pieces.emplace_back().header.first_row = range.first;
  pieces.back().header.last = 1;
  return pieces;
}

char* write_ids(const RowsPiece& piece, const int64_t* ids, void* payload) {
  const RowsHeader& header = piece.header;
  std::memcpy(payload, &header, sizeof header);
  char* const start = static_cast<char*>(payload) + sizeof header;
  char* const values = start + header.id_bytes;
  if (header.coding == IdCoding::kRange) return values;
  std::memset(start, 0, header.id_bytes);
  auto* at = reinterpret_cast<unsigned char*>(start);
  uint64_t next = header.first_row;
  for (uint64_t i = piece.begin; i < piece.begin + piece.count; ++i) {
    if (header.coding == IdCoding::kBitmap) {
      const uint64_t row = static_cast<uint64_t>(ids[i]) - header.first_row;
      at[row / 8] = static_cast<unsigned char>(at[row / 8] | 1u << row % 8);
      continue;
    }
    uint64_t gap = gap_of(ids, i, next);
    for (; gap >= 0x80; gap >>= 7) *at++ = static_cast<unsigned char>(gap | 0x80);
    *at++ = static_cast<unsigned char>(gap);
    next = static_cast<uint64_t>(ids[i]) + 1;
  }
  return values;
}

const char* read_rows(const KeyPlan& plan, const RowRange& range, size_t row_bytes, const void* payload, size_t bytes,
                      uint64_t& next_row, ReceivedRows& rows) {
  RowsHeader& header = rows.header;
  if (bytes < sizeof header) return "of another size than its header says";
  std::memcpy(&header, payload, sizeof header);
  if (header.coding > IdCoding::kBitmap || header.last > 1 || header.reserved != 0) return "malformed";
  if (header.id_bytes % 8 != 0 || header.rows > rows_per_frame(plan) ||
      bytes != sizeof header + header.id_bytes + uint64_t{header.rows} * row_bytes)
    return "of another size than its header says";
  const char* const ids = static_cast<const char*>(payload) + sizeof header;
  rows.values = ids + header.id_bytes;
  rows.row_bytes = row_bytes;
  rows.ids.resize(header.rows);
  if (header.rows == 0) return header.last == 1 && header.id_bytes == 0 ? nullptr : "empty, and not the last";

  const uint64_t end = range.first + range.count;
  if (header.first_row < range.first || header.first_row >= end) return "outside its partition";
  if (header.first_row < next_row) return "out of order";
  const auto* bits = reinterpret_cast<const unsigned char*>(ids);
  if (header.coding == IdCoding::kGaps) {
    if (const char* problem = read_gaps(bits, header, end, rows.ids)) return problem;
    next_row = static_cast<uint64_t>(rows.ids.back()) + 1;
    return nullptr;
  }
  if (header.rows > end - header.first_row) return "outside its partition";
  next_row = header.first_row + header.rows;
  if (header.id_bytes != (header.coding == IdCoding::kRange ? 0 : bitmap_bytes(header.rows)))
    return "of another size than its header says";
  if (header.coding == IdCoding::kBitmap) return read_bitmap(bits, header, rows.ids);
  std::iota(rows.ids.begin(), rows.ids.end(), static_cast<int64_t>(header.first_row));
  return nullptr;
}

bool ends_round(const Header& header, const void* payload) {
  if (payload == nullptr || (header.kind != FrameKind::kPushRows && header.kind != FrameKind::kRows)) return true;
  RowsHeader rows;
  std::memcpy(&rows, payload, sizeof rows);
  return rows.last != 0;
}

bool is_ascending(const int64_t* ids, uint64_t count) {
  return std::adjacent_find(ids, ids + count, [](int64_t one, int64_t next) { return one >= next; }) == ids + count;
}

}  // namespace p3
