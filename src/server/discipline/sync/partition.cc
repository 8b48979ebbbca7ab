#include "server/discipline/sync/partition.h"

#include <algorithm>

namespace p3 {

ServerPartition::ServerPartition(const ServerKey& its_key, uint32_t its_index, int its_thread, ShardHost& host)
    : RowsShard(its_key, its_index, its_thread, host),
      total_(host.sum_order == SumOrder::kRank ? key.machines->count() : key.machines->num_workers(), key.plan, range_,
             host.transient, host.sum_order == SumOrder::kRank, host.outlives_workers),
      wants_rows_(workers(), false) {
  const Machines& machines = *key.machines;
  if (host.sum_order != SumOrder::kRank || key.pushes_of_round() == machines.count()) return;
  for (int machine = 0; machine < machines.count(); ++machine)
    machine_.emplace_back(static_cast<int>(machines.workers(machine).size()), key.plan, range_, host.transient, true,
                          host.outlives_workers);
}

// --- a round -------------------------------------------------------------------------------------------------------

void ServerPartition::push(Task& task, Reply& reply) {
  const auto [its_sum, place] = sum_and_place(task.worker);
  RankRowSum& sum = *its_sum;
  wants_rows_[static_cast<size_t>(task.worker)] = task.header.part == 1;
  if (key.pushes_for_first(task.worker)) priority_ = task.header.priority;
  if (task.payload) {
    reply.contradicts = round_.numbers.note(task.worker, task.header.scalars, task.fields);
    reply.problem = add(task, sum, place);
    if (reply.problem != nullptr || reply.contradicts >= 0) return;
  } else {
    sum.add_nothing(place);
    round_.departed += task.has_departed;
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
  if (task.worker == key.first()) {
    as_blocks_ = rows.coding == IdCoding::kBitmap;
    next_plan_ = rows.next_plan;
    if (next_plan_ != 0 && !host_.can_move(key, next_plan_)) return "naming a plan that the key does not have";
  } else if (rows.next_plan != 0) {
    return "naming another plan, which only rank 0 may do";
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
  if (round_.present > 0 && key.plan.averages()) {
    if (its == nullptr)
      sum.divide(key.divisor(round_.present, round_.departed));
    else
      round_.numbers.scalars.rescale /= key.divisor(round_.present, round_.departed);
  }
  if (its != nullptr && round_.present > 0) make_state(*its);  // on all partitions: a snapshot has all of it or none
  if (its != nullptr && !touched.empty()) {
    update_rows(*optimizer_as_of(round_.numbers.fields), touched, round_.numbers.scalars, sum.row_bytes(),
                [&](size_t i) { return sum.sum_of(touched[i]); });
  }

  if (key.reports_norm()) report_norm(published, norm_of_sums(touched));

  const bool is_skipped = round_.present == 0;
  Header round = header_of(FrameKind::kRows, is_skipped ? Encoding::kAbsent : Encoding::kPlain, published, priority_);
  round.part = its == nullptr && !is_skipped;
  const std::vector<int> workers = receivers();
  const auto wants = [this](int worker) { return wants_rows_[static_cast<size_t>(worker)]; };
  const auto wanting = static_cast<int>(std::count_if(workers.begin(), workers.end(), wants));
  const std::vector<Frame> rows = frames_of_round(round, touched, true, wanting);
  const std::vector<Frame> nothing = frames_of_round(round, touched, false, static_cast<int>(workers.size()) - wanting);
  for (int worker : workers)
    for (Frame frame : wants(worker) ? rows : nothing) {
      frame.header.of_machine = key.is_shared(worker);
      frame.yields = key.reports_norm();
      send(worker, frame, reply);
    }
  reply.published = reply.frames.empty() ? round : reply.frames.front().frame.header;

  total_.clear();
  round_ = {};
  pushed_rows_ = 0;
  as_blocks_ = false;
  next_plan_ = 0;
}

NormPart ServerPartition::norm_of_sums(const std::vector<int64_t>& touched) {
  NormPart sum;
  for (int64_t row : touched) sum.add(norm_part(sum_dtype_, total_.sum().sum_of(row), key.plan.row_elements));
  return sum;
}

std::vector<Frame> ServerPartition::frames_of_round(const Header& round, const std::vector<int64_t>& touched,
                                                    bool wanted, int receivers) {
  if (receivers == 0) return {};
  if (static_cast<Encoding>(round.encoding) == Encoding::kAbsent) return std::vector<Frame>{{round}};
  RowsHeader counts;
  counts.next_plan = next_plan_;
  counts.pushed_rows = RowsHeader::saturated(pushed_rows_);
  counts.touched_rows = static_cast<uint32_t>(touched.size());
  const RowSum* const sums = round.part == 1 ? &total_.sum() : nullptr;
  return frames_of(round, wanted ? touched : std::vector<int64_t>(), wanted && as_blocks_, counts, receivers, sums);
}

// The value stays here; it is fetched by who needs rows of it.
void ServerPartition::send_value(const std::vector<int>& workers, Reply& reply, bool) {
  const Frame frame{header_of(FrameKind::kValue, Encoding::kAbsent, published, priority_)};
  for (int worker : workers) send(worker, frame, reply);
}

}  // namespace p3
