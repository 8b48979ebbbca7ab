#include "server/partition.h"

#include <algorithm>
#include <cstring>

#include "numeric/sum.h"

namespace p3 {

ServerPartition::ServerPartition(const ServerKey& its_key, uint32_t its_index, int its_thread, ShardHost& host,
                                 int parts)
    : Shard(its_key, its_index, its_thread, host,
            partition_at(its_key.plan, its_index).count * its_key.plan.row_elements),
      range_(partition_at(key.plan, index)),
      row_bytes_(row_bytes_of(0)),
      stored_(range_.count * static_cast<uint64_t>(parts), false),
      missing_(stored_.size()),
      total_(host.sum_order == SumOrder::kRank ? key.machines->count() : key.machines->num_workers(), key.plan, range_,
             host.transient, host.sum_order == SumOrder::kRank, host.outlives_workers),
      wants_rows_(workers(), false) {
  const Machines& machines = *key.machines;
  if (host.sum_order != SumOrder::kRank || key.pushes_of_round() == machines.count()) return;
  for (int machine = 0; machine < machines.count(); ++machine)
    machine_.emplace_back(static_cast<int>(machines.workers(machine).size()), key.plan, range_, host.transient, true,
                          host.outlives_workers);
}

// --- the receiver thread -------------------------------------------------------------------------------------------

const char* ServerPartition::problem_with_payload(const Header& header, int) const {
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

void* ServerPartition::place_of(const Header& header, PooledBuffer& buffer) {
  if (static_cast<Encoding>(header.encoding) == Encoding::kAbsent) return nullptr;
  buffer = PooledBuffer(host_.transient, BufferPool::roomy(header.payload_bytes));
  return buffer.data();
}

size_t ServerPartition::answer_bytes(const Header& header) const {
  return header.kind == FrameKind::kFetchRows ? rows_per_frame(key.plan) * row_bytes_of(header.part) : 0;
}

// --- a round -------------------------------------------------------------------------------------------------------

void ServerPartition::push(Task& task, Reply& reply) {
  const auto [its_sum, place] = sum_and_place(task.worker);
  RankRowSum& sum = *its_sum;
  wants_rows_[static_cast<size_t>(task.worker)] = task.header.part == 1;
  if (task.worker == 0) priority_ = task.header.priority;
  if (task.payload) {
    reply.contradicts = round_.numbers.note(task.worker, task.header.scalars);
    reply.problem = add(task, sum, place);
    if (reply.problem != nullptr || reply.contradicts >= 0) return;
  } else {
    sum.add_nothing(place);
    round_.is_filled |= task.is_filled;
  }
  reply.is_summed = true;
  round_.pushed += sum.has_all_of(place);
  if (&sum != &total_ && sum.complete()) total_.add(key.machines->of(task.worker), sum.take_rounded());
  if (round_.pushed == key.pushes_of_round()) finish(reply);
}

// Returns what is wrong with the frame, or null.
const char* ServerPartition::add(Task& task, RankRowSum& sum, int place) {
  RankRowSum::Frame frame;
  if (const char* problem = sum.read(place, std::move(task.payload), task.header.payload_bytes, frame)) return problem;
  const uint64_t union_of_frames = sum.rows_of(place) + frame.rows.ids.size();
  if (const char* problem = note_rows(task, frame.rows.header, union_of_frames)) return problem;
  sum.add(place, std::move(frame));
  return nullptr;
}

// `union_of_frames`: rows of this push so far. Returns what is wrong with the frame, or null.
const char* ServerPartition::note_rows(const Task& task, const RowsHeader& rows, uint64_t union_of_frames) {
  if (task.worker == 0) {
    as_blocks_ = rows.coding == IdCoding::kBitmap;
    next_plan_ = rows.next_plan;
    if (next_plan_ != 0 && !host_.can_move(key, next_plan_)) return "naming a plan that the key does not have";
  } else if (rows.next_plan != 0) {
    return "naming another plan, which only worker 0 may do";
  }
  if (rows.last == 0) return nullptr;
  const int contributors = task.header.of_machine != 0 ? task.header.contributors : 1;
  const uint64_t pushed = task.header.of_machine != 0 ? rows.pushed_rows : union_of_frames;
  if (pushed < union_of_frames || pushed > union_of_frames * static_cast<uint64_t>(contributors))
    return "of more or fewer rows than its machine can have pushed";
  round_.present += contributors;
  pushed_rows_ += pushed;
  return nullptr;
}

// Where a worker's rows are added.
std::pair<RankRowSum*, int> ServerPartition::sum_and_place(int worker) {
  const Machines& machines = *key.machines;
  const int machine = machines.of(worker);
  if (!machine_.empty() && !machines.is_alone(worker))
    return {&machine_[static_cast<size_t>(machine)], machines.place(worker)};
  return {&total_, host_.sum_order == SumOrder::kRank ? machine : worker};
}

void ServerPartition::lose(int worker, uint32_t incarnation, uint64_t pushed) {
  Shard::lose(worker, incarnation, pushed);
  if (pushed > published) return;  // what is missing of this round's push waits to be summed
  const auto [sum, place] = sum_and_place(worker);
  sum->forget_part_of(place);
}

void ServerPartition::finish(Reply& reply) {
  ++published;
  RowSum& sum = total_.sum();
  const std::vector<int64_t> touched = sum.ids();
  const Optimizer* const its = optimizer();
  if (round_.present > 0 && key.average) {
    if (its == nullptr)
      sum.divide(round_.present);
    else
      round_.numbers.scalars.rescale /= round_.present;
  }
  if (its != nullptr) update(*its, touched);

  const bool is_skipped = round_.present == 0 && !round_.is_filled;
  Header round = header_of(FrameKind::kRows, is_skipped ? Encoding::kAbsent : Encoding::kPlain, published, priority_);
  round.part = its == nullptr && !is_skipped;
  const std::vector<int> workers = receivers();
  const auto wants = [this](int worker) { return wants_rows_[static_cast<size_t>(worker)]; };
  const auto wanting = static_cast<int>(std::count_if(workers.begin(), workers.end(), wants));
  const std::vector<Frame> rows = frames_of(round, touched, true, wanting);
  const std::vector<Frame> nothing = frames_of(round, touched, false, static_cast<int>(workers.size()) - wanting);
  for (int worker : workers)
    for (Frame frame : wants(worker) ? rows : nothing) {
      frame.header.of_machine = key.is_shared(worker);
      send(worker, frame, reply);
    }
  reply.published = reply.frames.empty() ? round : reply.frames.front().frame.header;

  total_.clear();
  round_ = {};
  pushed_rows_ = 0;
  as_blocks_ = false;
  next_plan_ = 0;
  answer_who_catches_up(reply);
}

std::vector<Frame> ServerPartition::frames_of(const Header& round, const std::vector<int64_t>& touched, bool wanted,
                                              int receivers) {
  if (receivers == 0) return {};
  if (static_cast<Encoding>(round.encoding) == Encoding::kAbsent) return std::vector<Frame>{{round}};
  const bool are_sums = round.part == 1;
  const uint64_t count = wanted ? touched.size() : 0;
  std::vector<Frame> frames;
  for (RowsPiece& piece : cut_rows(key.plan, range_, touched.data(), 0, count, wanted && as_blocks_)) {
    piece.header.next_plan = next_plan_;
    piece.header.pushed_rows = RowsHeader::saturated(pushed_rows_);
    piece.header.touched_rows = static_cast<uint32_t>(touched.size());
    const size_t bytes = piece.payload_bytes(row_bytes_);
    PooledBuffer payload(host_.transient, BufferPool::roomy(bytes));
    write_rows(piece, touched.data(), row_bytes_, payload.data(), [&](void* destination, uint64_t i) {
      if (are_sums)
        total_.sum().write_row(touched[i], destination);
      else
        std::memcpy(destination, row_at(value_, 0, touched[i]), row_bytes_);
    });
    frames.push_back(lent_.lend(round, std::move(payload), bytes, receivers));
  }
  return frames;
}

// In runs of rows that follow each other both in the value and in the sum.
void ServerPartition::update(const Optimizer& optimizer, const std::vector<int64_t>& touched) {
  if (touched.empty()) return;
  make_state(optimizer);
  const RowSum& sum = total_.sum();
  std::vector<void*> state(state_.size());
  for (size_t begin = 0, end; begin < touched.size(); begin = end) {
    char* const sums = sum.sum_of(touched[begin]);
    for (end = begin + 1; end < touched.size() && touched[end] == touched[end - 1] + 1 &&
                          sum.sum_of(touched[end]) == sums + (end - begin) * sum.row_bytes();)
      ++end;
    const int64_t row = touched[begin];
    for (size_t s = 0; s < state.size(); ++s) state[s] = row_at(state_[s], static_cast<uint8_t>(s + 1), row);
    optimizer.update(dtype_, row_at(value_, 0, row), master_ == nullptr ? nullptr : row_at(master_, kMaster, row),
                     state.data(), sums, (end - begin) * key.plan.row_elements, round_.numbers.scalars);
  }
}

// The value stays here; it is fetched by who needs rows of it.
void ServerPartition::send_value(const std::vector<int>& workers, Reply& reply, bool) {
  const Frame frame{header_of(FrameKind::kValue, Encoding::kAbsent, published, priority_)};
  for (int worker : workers) send(worker, frame, reply);
}

// --- rows of the value and of the state ----------------------------------------------------------------------------

void ServerPartition::fetch(Task& task, Reply& reply) {
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

void ServerPartition::store(Task& task, Reply& reply) {
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

void ServerPartition::note_stored(uint8_t part, int64_t row) {
  const size_t nth = part == kMaster ? state_.size() + 1 : part;
  const size_t place = nth * range_.count + static_cast<size_t>(row) - range_.first;
  if (place >= stored_.size() || stored_[place]) return;
  stored_[place] = true;
  if (--missing_ == 0) std::vector<bool>().swap(stored_);
}

}  // namespace p3
