#include "server/partition.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "numeric/sum.h"

namespace p3 {

ServerPartition::ServerPartition(const ServerKey& its_key, uint32_t its_index, SumOrder order, int its_thread,
                                 BufferPool& values, BufferPool& transient, int parts, bool whole_pushes)
    : ServerShard(its_key, its_index, its_thread),
      range(partition_at(its_key.plan, its_index)),
      pushes_(its_key.pushes()),
      in_order_(order == SumOrder::kRank),
      values_(values),
      transient_(transient),
      dtype_(its_key.plan.dtype),
      sum_dtype_(sum_type(dtype_)),
      row_bytes_(its_key.plan.row_elements * size_of(dtype_)),
      bytes_(range.count * row_bytes_),
      sum_bytes_(range.count * its_key.plan.row_elements * size_of(sum_dtype_)),
      value_(static_cast<char*>(values.take(bytes_))),
      stored_(range.count * static_cast<uint64_t>(parts), false),
      missing_(stored_.size()),
      total_(in_order_ ? key.machines->count() : key.machines->num_workers(), key.plan, range, transient, in_order_,
             whole_pushes),
      wants_rows_(static_cast<size_t>(key.machines->num_workers()), false) {
  const Machines& machines = *key.machines;
  if (!in_order_ || pushes_ == machines.count()) return;
  for (int machine = 0; machine < machines.count(); ++machine)
    machine_.emplace_back(static_cast<int>(machines.workers(machine).size()), key.plan, range, transient, true,
                          whole_pushes);
}

ServerPartition::~ServerPartition() {
  values_.give_back(value_, bytes_);
  if (master_ != nullptr) values_.give_back(master_, sum_bytes_);
  for (void* state : state_) values_.give_back(state, sum_bytes_);
}

const char* ServerPartition::problem_with(const Header& header, int worker, const Optimizer* optimizer) const {
  const auto encoding = static_cast<Encoding>(header.encoding);
  const bool about_a_part = header.kind == FrameKind::kFetchRows || header.kind == FrameKind::kStoreRows;
  const bool pushes = header.kind == FrameKind::kPushRows;
  const bool without_rows = header.kind == FrameKind::kInit || header.kind == FrameKind::kCapture;
  if (!without_rows && !pushes && !about_a_part) return "unexpected";
  if (header.kind == FrameKind::kCapture && worker != 0) return "unexpected";
  if (about_a_part && header.part != 0 && !has_state(header.part, optimizer))
    return "of a state that its key's optimizer does not have";
  const DType type = about_a_part ? type_of(header.part) : dtype_;
  if (static_cast<DType>(header.dtype) != type) return "of another element type than agreed";
  if (pushes && header.part > 1) return "malformed";
  if (without_rows ? encoding != Encoding::kAbsent
                   : encoding != Encoding::kPlain && !(pushes && encoding == Encoding::kAbsent))
    return "in another encoding than agreed";
  const size_t element_bytes = header.kind == FrameKind::kFetchRows ? 0 : size_of(type);
  if (encoding == Encoding::kPlain &&
      (header.payload_bytes < sizeof(RowsHeader) || header.payload_bytes > max_rows_payload(key.plan, element_bytes)))
    return "of another size than agreed";
  if (!is_its_to_send(header, worker)) return "another worker's to send";
  return in_turn(header, worker) ? nullptr : "out of turn";
}

size_t ServerPartition::answer_bytes(const Header& header) const {
  return header.kind == FrameKind::kFetchRows
             ? rows_per_frame(key.plan) * key.plan.row_elements * size_of(type_of(header.part))
             : 0;
}

std::vector<int> ServerPartition::init(int worker, uint32_t n, bool waits) {
  note_init(worker, n, waits);
  return newly_answerable();
}

void ServerPartition::lose(int worker, uint32_t incarnation, uint64_t pushed) {
  ServerShard::lose(worker, incarnation, pushed);
  if (pushed > published) return;  // what is missing of this round's push waits to be summed
  const auto [sum, place] = sum_and_place(worker);
  sum->forget_part_of(place);
}

// --- a round -------------------------------------------------------------------------------------------------------

// Where a worker's rows are added.
std::pair<RankRowSum*, int> ServerPartition::sum_and_place(int worker) {
  const Machines& machines = *key.machines;
  const int machine = machines.of(worker);
  if (!machine_.empty() && !machines.is_alone(worker))
    return {&machine_[static_cast<size_t>(machine)], machines.place(worker)};
  return {&total_, in_order_ ? machine : worker};
}

ServerPartition::Outcome ServerPartition::push(int worker, const Header& header, PooledBuffer payload,
                                               bool is_filled) {
  const auto [its_sum, place] = sum_and_place(worker);
  RankRowSum& sum = *its_sum;
  Outcome outcome;
  wants_rows_[static_cast<size_t>(worker)] = header.part == 1;
  if (worker == 0) priority_ = header.priority;
  if (payload) {
    RankRowSum::Frame frame;
    outcome.problem = sum.read(place, std::move(payload), header.payload_bytes, frame);
    if (outcome.problem == nullptr)
      outcome.problem = note_rows(worker, header, frame.rows.header, sum.rows_of(place) + frame.rows.ids.size());
    outcome.contradicts = numbers_.note(worker, header.scalars);
    if (outcome.problem != nullptr || outcome.contradicts >= 0) return outcome;
    sum.add(place, std::move(frame));
  } else {
    sum.add_nothing(place);
    is_filled_ |= is_filled;
  }
  pushed_ += sum.has_all_of(place);
  if (&sum != &total_ && sum.complete()) total_.add(key.machines->of(worker), sum.take_rounded());
  outcome.complete = pushed_ == pushes_;
  return outcome;
}

// `union_of_frames`: rows of this push so far. Returns what is wrong with the frame, or null.
const char* ServerPartition::note_rows(int worker, const Header& header, const RowsHeader& rows,
                                       uint64_t union_of_frames) {
  if (worker == 0) {
    as_blocks_ = rows.coding == IdCoding::kBitmap;
    next_plan_ = rows.next_plan;
  } else if (rows.next_plan != 0) {
    return "telling of another plan, which only worker 0 may";
  }
  if (rows.last == 0) return nullptr;
  const int contributors = header.of_machine != 0 ? header.contributors : 1;
  const uint64_t pushed = header.of_machine != 0 ? rows.pushed_rows : union_of_frames;
  if (pushed < union_of_frames || pushed > union_of_frames * static_cast<uint64_t>(contributors))
    return "of more or fewer rows than its machine can have pushed";
  present_ += contributors;
  pushed_rows_ += pushed;
  return nullptr;
}

ServerPartition::Published ServerPartition::finish(const Optimizer* optimizer) {
  RowSum& sum = total_.sum();
  const std::vector<int64_t> touched = sum.ids();
  if (present_ > 0 && key.average) {
    if (optimizer == nullptr)
      sum.divide(present_);
    else
      numbers_.scalars.rescale /= present_;
  }
  if (optimizer != nullptr) update(*optimizer, touched);

  Header header;
  header.kind = FrameKind::kRows;
  header.dtype = static_cast<uint8_t>(dtype_);
  header.key = key.plan.wire_key;
  header.slice = index;
  header.round = published;
  header.priority = priority_;
  const bool is_skipped = present_ == 0 && !is_filled_;
  header.encoding = static_cast<uint8_t>(is_skipped ? Encoding::kAbsent : Encoding::kPlain);
  header.part = optimizer == nullptr && !is_skipped;
  int wanting = 0, receivers_here = 0;
  for (int worker = 0; worker < key.machines->num_workers(); ++worker) {
    if (!gets_rounds(worker)) continue;
    ++receivers_here;
    wanting += wants_rows(worker);
  }
  const auto told = [&](int receivers, uint64_t count, bool as_blocks) {
    std::vector<Frame> frames;
    if (receivers == 0) return frames;
    if (is_skipped) return std::vector<Frame>{{header}};
    for (RowsPiece& piece : cut_rows(key.plan, range, touched.data(), 0, count, as_blocks)) {
      piece.header.next_plan = next_plan_;
      piece.header.pushed_rows = RowsHeader::saturated(pushed_rows_);
      piece.header.touched_rows = static_cast<uint32_t>(touched.size());
      const size_t bytes = piece.payload_bytes(row_bytes_);
      PooledBuffer payload(transient_, BufferPool::roomy(bytes));
      write_rows(piece, touched.data(), row_bytes_, payload.data(), [&](void* destination, uint64_t i) {
        if (optimizer != nullptr)
          std::memcpy(destination, value_ + offset_of(touched[i]) * size_of(dtype_), row_bytes_);
        else
          sum.write_row(touched[i], destination);
      });
      frames.push_back(lent_.lend(header, std::move(payload), bytes, receivers));
    }
    return frames;
  };
  Published published_frames{told(wanting, touched.size(), as_blocks_), told(receivers_here - wanting, 0, false)};

  total_.clear();
  pushed_ = present_ = 0;
  is_filled_ = false;
  pushed_rows_ = 0;
  numbers_.first = -1;
  as_blocks_ = false;
  next_plan_ = 0;
  return published_frames;
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
    const size_t offset = offset_of(touched[begin]), sum_offset = offset * size_of(sum_dtype_);
    for (size_t s = 0; s < state.size(); ++s) state[s] = static_cast<char*>(state_[s]) + sum_offset;
    optimizer.update(dtype_, value_ + offset * size_of(dtype_), master_ == nullptr ? nullptr : master_ + sum_offset,
                     state.data(), sums, (end - begin) * key.plan.row_elements, numbers_.scalars);
  }
}

void ServerPartition::make_state(const Optimizer& optimizer) {
  const size_t elements = range.count * key.plan.row_elements;
  if (master_ == nullptr && optimizer.needs_master(dtype_)) {
    master_ = static_cast<char*>(values_.take(sum_bytes_));
    start_sum(dtype_, master_, value_, elements);
  }
  if (!state_.empty()) return;
  for (int i = 0; i < optimizer.state_count(); ++i) state_.push_back(values_.take(sum_bytes_));
  optimizer.start_state(dtype_, value_, state_.data(), elements);
}

// --- rows of the value and of the state ----------------------------------------------------------------------------

char* ServerPartition::part_at(uint8_t part, const Optimizer* optimizer) {
  if (part == 0) return value_;
  make_state(*optimizer);
  return part == kMaster ? master_ : static_cast<char*>(state_[part - 1]);
}

const char* ServerPartition::store(const Header& header, const void* payload, const Optimizer* optimizer, bool& last) {
  const size_t row_bytes = key.plan.row_elements * size_of(type_of(header.part));
  uint64_t next_row = range.first;
  const char* problem = read_rows(key.plan, range, row_bytes, payload, header.payload_bytes, next_row, received_);
  if (problem != nullptr) return problem;
  last = received_.header.last == 1;
  char* const place = part_at(header.part, optimizer);
  for (size_t i = 0; i < received_.ids.size(); ++i) {
    const int64_t row = received_.ids[i];
    std::memcpy(place + offset_of(row) * size_of(type_of(header.part)), received_.row(i), row_bytes);
    if (header.part == 0 && master_ != nullptr)
      start_sum(dtype_, master_ + offset_of(row) * size_of(sum_dtype_), received_.row(i), key.plan.row_elements);
    if (missing_ > 0) note_stored(header.part, row);
  }
  return nullptr;
}

void ServerPartition::note_stored(uint8_t part, int64_t row) {
  const size_t nth = part == kMaster ? state_.size() + 1 : part;
  const size_t place = nth * range.count + static_cast<size_t>(row) - range.first;
  if (place >= stored_.size() || stored_[place]) return;
  stored_[place] = true;
  if (--missing_ == 0) std::vector<bool>().swap(stored_);
}

const char* ServerPartition::fetch(const Header& header, const void* payload, const Optimizer* optimizer,
                                   Frame& answer) {
  if (missing_ > 0) return "out of turn";
  const size_t row_bytes = key.plan.row_elements * size_of(type_of(header.part));
  uint64_t next_row = range.first;
  const char* problem = read_rows(key.plan, range, 0, payload, header.payload_bytes, next_row, received_);
  if (problem != nullptr) return problem;
  Header answered = header;
  answered.kind = FrameKind::kPart;
  const size_t bytes = received_.ids.size() * row_bytes;
  PooledBuffer content(transient_, BufferPool::roomy(bytes));
  char* destination = static_cast<char*>(content.data());
  const char* const place = part_at(header.part, optimizer);
  for (int64_t row : received_.ids) {
    std::memcpy(destination, place + offset_of(row) * size_of(type_of(header.part)), row_bytes);
    destination += row_bytes;
  }
  answer = lent_.lend(answered, std::move(content), bytes, 1);
  return nullptr;
}

const char* ServerPartition::capture(std::vector<CapturedArray>& captured) const {
  if (missing_ > 0) return "out of turn";
  const uint64_t elements = range.count * key.plan.row_elements;
  CapturedArray value = captured_array(0, dtype_, elements);
  std::memcpy(value.data.get(), value_, bytes_);
  captured.push_back(std::move(value));
  capture_state(state_, master_, elements, captured);
  return nullptr;
}

}  // namespace p3
