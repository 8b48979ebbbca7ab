// The payload of a frame of rows: what is taken has ids in order and in range, and values inside the payload; and what
// is written is read back.
#include "input.h"
#include "plan/rows.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace p3;
  Input input(data, size);
  KeyPlan plan;
  plan.row_elements = 1 + input.below(8);
  plan.elements = uint64_t{plan.row_elements} * (1 + input.below(200));
  plan.partitions = 1 + input.below(static_cast<uint32_t>(row_count(plan) < 8 ? row_count(plan) : 8));
  plan.slice_elements = 1 + input.below(255);
  const RowRange range = partition_at(plan, input.below(slice_count(plan)));
  const size_t row_bytes = input.below(2) * plan.row_elements * sizeof(float);
  uint64_t next_row = range.first;
  ReceivedRows rows;

  if (input.below(2) == 0) {
    while (!input.empty()) {
      RowsHeader header;
      input.take(&header, 24);
      if (input.below(4) > 0) {  // mostly what may pass
        header.first_row = range.first + header.first_row % (range.count + 1);
        header.rows %= rows_per_frame(plan) + 2;
        header.id_bytes = header.id_bytes % 9 * 8;
        header.coding = static_cast<IdCoding>(static_cast<uint8_t>(header.coding) % 3);
        header.last &= 1;
        header.reserved = 0;
      }
      const size_t bytes = header.id_bytes % 4096 + header.rows % 256 * row_bytes;
      std::vector<char> payload(sizeof header + bytes - (input.byte() == 1 && bytes > 0));
      std::memcpy(payload.data(), &header, sizeof header);
      input.take(payload.data() + sizeof header, payload.size() - sizeof header);
      const uint64_t before = next_row;
      if (read_rows(plan, range, row_bytes, payload.data(), payload.size(), next_row, rows) != nullptr) return 0;
      require(is_ascending(rows.ids.data(), rows.ids.size()) && next_row >= before);
      for (size_t i = 0; i < rows.ids.size(); ++i) {
        const auto id = static_cast<uint64_t>(rows.ids[i]);
        require(id >= before && id < next_row && id - range.first < range.count);
        if (row_bytes > 0)
          require(rows.row(i) >= payload.data() && rows.row(i) + row_bytes <= payload.data() + payload.size());
      }
    }
    return 0;
  }

  std::vector<int64_t> ids;
  for (uint64_t row = range.first; row < range.first + range.count; ++row)
    if (input.byte() & 1) ids.push_back(static_cast<int64_t>(row));
  std::vector<int64_t> read;
  for (const RowsPiece& piece :
       cut_rows(plan, range, ids.data(), 0, ids.size(), row_bytes > 0 && input.below(2) == 1)) {
    std::vector<char> payload(piece.payload_bytes(row_bytes));
    write_rows(piece, ids.data(), row_bytes, payload.data(),
               [&](void* to, uint64_t i) { std::memset(to, static_cast<char>(ids[i]), row_bytes); });
    require(payload.size() <= max_rows_payload(plan, sizeof(float)));
    require(read_rows(plan, range, row_bytes, payload.data(), payload.size(), next_row, rows) == nullptr);
    for (size_t i = 0; i < rows.ids.size() && row_bytes > 0; ++i)
      require(*rows.row(i) == static_cast<char>(rows.ids[i]));
    read.insert(read.end(), rows.ids.begin(), rows.ids.end());
  }
  require(read == ids);
  return 0;
}
