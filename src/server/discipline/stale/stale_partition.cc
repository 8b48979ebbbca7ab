#include "server/discipline/stale/stale_partition.h"

#include <utility>

#include "numeric/sum.h"

namespace p3 {

StalePartition::StalePartition(const ServerKey& its_key, uint32_t its_index, int its_thread, ShardHost& host)
    : StaleShard(its_key, its_index, its_thread, host),
      unanswered_(workers(), its_key.plan.staleness),
      workers_(workers(), Its(range_)) {}

void StalePartition::push(Task& task, Reply& reply) {
  Its& its = workers_[static_cast<size_t>(task.worker)];
  reply.problem = unanswered_.problem_with_push(task.worker);
  if (reply.problem != nullptr) return;
  if (std::exchange(its.is_whole, false)) {
    its.next_row = range_.first;
    its.pushed_rows = 0;
    its.as_blocks = false;
    its.is_counted = false;
  }
  if (task.header.part == 0)
    its.changed.reset();
  else if (!its.changed)
    reply.problem = "asking for rows after one that wanted none";
  if (reply.problem == nullptr && task.payload) reply.problem = update(optimizer(), task);
  if (reply.problem != nullptr) return;
  reply.is_summed = true;
  its.is_whole |= !task.payload;
  if (!its.is_whole) return;
  const bool nobody_goes_on = unanswered_.add(task.worker, task.header);
  reply.published = header_of(FrameKind::kRows, Encoding::kPlain, task.header.round, task.header.priority);
  for (int worker : unanswered_.take_answerable()) answer(worker, nobody_goes_on, reply);
}

const char* StalePartition::update(const Optimizer* optimizer, Task& task) {
  Its& its = workers_[static_cast<size_t>(task.worker)];
  const char* const problem =
      read_rows(key.plan, range_, row_bytes_, task.payload.data(), task.header.payload_bytes, its.next_row, received_);
  if (problem != nullptr) return problem;
  if (received_.header.next_plan != 0) return "naming another plan, which keys with staleness never have";
  const std::vector<int64_t>& rows = received_.ids;
  its.is_whole = received_.header.last == 1;
  its.as_blocks = received_.header.coding == IdCoding::kBitmap;
  its.pushed_rows += rows.size();
  for (Its& each : workers_)
    if (each.changed)
      for (int64_t row : rows) each.changed->insert(row);

  if (is_before_value(task.worker)) return nullptr;
  if (task.header.scalars.updates == kNoUpdate) return rows.empty() ? nullptr : "of rows, though it has no gradient";
  if (const char* missing = Unanswered::problem_with_gradient(optimizer)) return missing;
  if (!rows.empty()) make_state(*optimizer);
  const auto now = optimizer_as_of(task.fields);
  if (!std::exchange(its.is_counted, true))  // all frames of a push are one update
    its.scalars = next_update(*now, task.header.scalars);
  const RoundScalars& scalars = its.scalars;
  if (sum_dtype_ == dtype_) {
    update_rows(*now, rows, scalars, row_bytes_, [&](size_t i) { return received_.row(i); });
    return nullptr;
  }
  const size_t wide_bytes = key.plan.row_elements * size_of(sum_dtype_);
  const PooledBuffer wide(host_.transient, BufferPool::roomy(rows.size() * wide_bytes));
  const auto wide_row = [&](size_t i) { return static_cast<char*>(wide.data()) + i * wide_bytes; };
  for (size_t i = 0; i < rows.size(); ++i) start_sum(dtype_, wide_row(i), received_.row(i), key.plan.row_elements);
  update_rows(*now, rows, scalars, wide_bytes, wide_row);
  return nullptr;
}

void StalePartition::answer(int worker, bool nobody_goes_on, Reply& reply) {
  Its& its = workers_[static_cast<size_t>(worker)];
  Header header =
      header_of(FrameKind::kRows, Encoding::kPlain, unanswered_.round(worker), unanswered_.priority(worker));
  header.part = nobody_goes_on;
  set_least_clock(header, unanswered_.least_clock());
  const std::vector<int64_t> rows = its.changed ? its.changed->take() : std::vector<int64_t>();
  RowsHeader counts;
  counts.pushed_rows = RowsHeader::saturated(its.pushed_rows);
  counts.touched_rows = its.changed ? static_cast<uint32_t>(rows.size()) : counts.pushed_rows;
  for (const Frame& frame : frames_of(header, rows, its.changed && its.as_blocks, counts, 1))
    send(worker, frame, reply);
}

// The value stays here; it is fetched by who needs rows of it.
void StalePartition::send_value(const std::vector<int>& workers, Reply& reply, bool) {
  for (int worker : workers)
    send(worker, {header_of(FrameKind::kValue, Encoding::kAbsent, unanswered_.round(worker), 0)}, reply);
}

}  // namespace p3
