#include "server/ways/rows_shard.h"

#include <cstring>

#include "numeric/sum.h"

namespace p3 {

RowsShard::RowsShard(const ServerKey& its_key, uint32_t its_index, int its_thread, ShardHost& host)
    : Shard(its_key, its_index, its_thread, host, kRowsFrames,
            partition_at(its_key.plan, its_index).count * its_key.plan.row_elements),
      range_(partition_at(key.plan, index)),
      row_bytes_(row_bytes_of(0)),
      stored_(range_.count * first_parts(), false),
      missing_(stored_.size()) {}

uint64_t RowsShard::first_parts() const {
  const Optimizer* const its = key.is_successor ? optimizer() : nullptr;
  return its == nullptr ? 1 : static_cast<uint64_t>(1 + its->state_count() + its->needs_master(dtype_));
}

// --- the receiver thread -------------------------------------------------------------------------------------------

const char* RowsShard::problem_with_payload(const Header& header, int) const {
  const auto encoding = static_cast<Encoding>(header.encoding);
  const bool pushes = header.kind == FrameKind::kPushRows;
  const bool without_rows = header.kind == FrameKind::kInit || header.kind == FrameKind::kCapture;
  if (pushes && header.part > 1) return "malformed";
  if (without_rows ? encoding != Encoding::kAbsent
                   : encoding != Encoding::kPlain && !(pushes && encoding == Encoding::kAbsent))
    return "in another encoding than agreed";
  if (encoding == Encoding::kAbsent) return nullptr;
  const size_t element_bytes = header.kind == FrameKind::kFetchRows ? 0 : size_of(static_cast<DType>(header.dtype));
  const bool fits =
      header.payload_bytes >= sizeof(RowsHeader) && header.payload_bytes <= max_rows_payload(key.plan, element_bytes);
  return fits ? nullptr : "of another size than agreed";
}

void* RowsShard::place_of(const Header& header, PooledBuffer& buffer) {
  if (static_cast<Encoding>(header.encoding) == Encoding::kAbsent) return nullptr;
  buffer = PooledBuffer(host_.transient, BufferPool::roomy(header.payload_bytes));
  return buffer.data();
}

size_t RowsShard::answer_bytes(const Header& header) const {
  return header.kind == FrameKind::kFetchRows ? rows_per_frame(key.plan) * row_bytes_of(header.part) : 0;
}

// --- where it is summed --------------------------------------------------------------------------------------------

// That many rows from this one on.
void RowsShard::update_run(const Optimizer& optimizer, int64_t row, size_t count, const RoundScalars& scalars,
                           const void* gradients) {
  state_of_run_.clear();
  for (void* state : state_)
    state_of_run_.push_back(row_at(state, static_cast<uint8_t>(state_of_run_.size() + 1), row));
  optimizer.update(dtype_, row_at(value_, 0, row), master_ == nullptr ? nullptr : row_at(master_, kMaster, row),
                   state_of_run_.data(), gradients, count * key.plan.row_elements, scalars);
}

std::vector<Frame> RowsShard::frames_of(const Header& header, const std::vector<int64_t>& rows, bool as_blocks,
                                        const RowsHeader& counts, int receivers, const RowSum* sums) {
  std::vector<Frame> frames;
  for (RowsPiece& piece : cut_rows(key.plan, range_, rows.data(), 0, rows.size(), as_blocks)) {
    piece.header.next_plan = counts.next_plan;
    piece.header.pushed_rows = counts.pushed_rows;
    piece.header.touched_rows = counts.touched_rows;
    const size_t bytes = piece.payload_bytes(row_bytes_);
    PooledBuffer payload(host_.transient, BufferPool::roomy(bytes));
    write_rows(piece, rows.data(), row_bytes_, payload.data(), [&](void* destination, uint64_t i) {
      if (sums != nullptr)
        sums->write_row(rows[i], destination);
      else
        std::memcpy(destination, row_at(value_, 0, rows[i]), row_bytes_);
    });
    frames.push_back(lent_.lend(header, std::move(payload), bytes, receivers));
  }
  return frames;
}

// --- rows of the value and of the state ----------------------------------------------------------------------------

void RowsShard::fetch(Task& task, Reply& reply) {
  const uint8_t part = task.header.part;
  uint64_t next_row = range_.first;
  reply.problem = missing_ > 0 ? "out of turn"
                               : read_rows(key.plan, range_, 0, task.payload.data(), task.header.payload_bytes,
                                           next_row, received_);
  if (reply.problem != nullptr) return;
  Header header = task.header;
  header.kind = FrameKind::kPart;
  const size_t row_bytes = row_bytes_of(part), bytes = received_.ids.size() * row_bytes;
  PooledBuffer content(host_.transient, BufferPool::roomy(bytes));
  char* destination = static_cast<char*>(content.data());
  void* const array = part_at(part);
  for (int64_t row : received_.ids) {
    std::memcpy(destination, row_at(array, part, row), row_bytes);
    destination += row_bytes;
  }
  send(task.worker, lent_.lend(header, std::move(content), bytes, 1), reply);
}

void RowsShard::store(Task& task, Reply& reply) {
  const uint8_t part = task.header.part;
  const size_t row_bytes = row_bytes_of(part);
  uint64_t next_row = range_.first;
  reply.problem =
      read_rows(key.plan, range_, row_bytes, task.payload.data(), task.header.payload_bytes, next_row, received_);
  if (reply.problem != nullptr) return;
  void* const array = part_at(part);
  for (size_t i = 0; i < received_.ids.size(); ++i) {
    const int64_t row = received_.ids[i];
    std::memcpy(row_at(array, part, row), received_.row(i), row_bytes);
    if (part == 0 && master_ != nullptr)
      start_sum(dtype_, row_at(master_, kMaster, row), received_.row(i), key.plan.row_elements);
    if (missing_ > 0) note_stored(part, row);
  }
  if (received_.header.last != 1) return;
  if (!is_lost(task)) acknowledge(task, reply);
  answer_inits(reply);
}

void RowsShard::note_stored(uint8_t part, int64_t row) {
  const size_t nth = part == kMaster ? state_.size() + 1 : part;
  const size_t place = nth * range_.count + static_cast<size_t>(row) - range_.first;
  if (place >= stored_.size() || stored_[place]) return;
  stored_[place] = true;
  if (--missing_ == 0) std::vector<bool>().swap(stored_);
}

}  // namespace p3
