#include "worker/machine/leader.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "p3/trace.h"
#include "plan/frames.h"
#include "wire/failures.h"

namespace p3 {

void MachineLeader::add_member(int rank, int van) {
  members_.push_back({rank, van, false, {}});
  std::sort(members_.begin(), members_.end(),
            [](const Member& one, const Member& other) { return one.rank < other.rank; });
  seats_.assign(leader_van_.size(), Seats::of_machine(static_cast<int>(members_.size()) + 1));
}

void MachineLeader::follow(int leader_van) { std::fill(leader_van_.begin(), leader_van_.end(), leader_van); }

void MachineLeader::join(const Groups& groups) {
  std::vector<int> ranks;
  for (const Member& each : members_) ranks.push_back(each.rank);
  std::string problem = groups.problem(static_cast<int>(leader_van_.size()));
  if (problem.empty() && (rank_ >= groups.workers || ranks != groups.members(rank_)))
    problem = "this worker is connected to others than their members";
  if (!problem.empty()) throw Error(ErrorKind::kUsage, label() + ": there are no such groups: " + problem);
  is_in_groups_ = true;
  seats_.resize(leader_van_.size());
  for (int server = 0; server < static_cast<int>(leader_van_.size()); ++server) {
    const int leader = groups.leader_of(rank_, server);
    leader_van_[static_cast<size_t>(server)] = leader == rank_ ? -1 : member(place_of_rank(leader)).van;
    Seats seats;
    seats.of.resize(members_.size() + 1);
    seats.levels = groups.levels_of(rank_, server);
    if (!seats.levels.empty()) seats.of[0] = {0, seats.levels.front().own};
    for (const Groups::Follower& each : groups.followers_of(rank_, server)) {
      seats.of[static_cast<size_t>(place_of_rank(each.worker))] = {each.level, each.place};
      ++seats.followers;
    }
    seats_[static_cast<size_t>(server)] = std::move(seats);
  }
}

int MachineLeader::place_of_rank(int rank) const {
  for (size_t i = 0; i < members_.size(); ++i)
    if (members_[i].rank == rank) return static_cast<int>(i) + 1;
  return -1;
}

int MachineLeader::place_of(int van) const {
  for (size_t i = 0; i < members_.size(); ++i)
    if (members_[i].van == van) return static_cast<int>(i) + 1;
  return 0;
}

std::shared_ptr<MachineSum> MachineLeader::sum_of(const Key& key, const KeyPlan& plan, uint64_t next_round) {
  Machine machine{{rank_}, seats_, pool_, lent_};
  for (const Member& member : members_) machine.ranks.push_back(member.rank);
  return key.way->sum_on(machine, plan, next_round);
}

// --- pushes --------------------------------------------------------------------------------------------------------

void MachineLeader::bring(const Key& key, const Frame& own) {
  MutexLock lock(mutex_);
  pushes_.push(urgency_of(own.header), {key.machine_sum, &key, 0, own, {}});
}

void* MachineLeader::room_for(int van, const Key& key, const Header& push) {
  const int place = place_of(van);
  LocalPush& arriving = member(place).arriving;
  arriving = {key.machine_sum, &key, place, {push}, {}};
  arriving.frame.fields = transport_.received_fields(van);
  if (static_cast<Encoding>(push.encoding) != Encoding::kAbsent)
    arriving.payload = PooledBuffer(pool_, key.machine_sum->room_bytes(push));
  return arriving.payload.data();
}

void MachineLeader::received(int van) {
  LocalPush& push = member(place_of(van)).arriving;
  const Header& header = push.frame.header;
  if (ends_round(header, push.payload.data())) push.sum->note_arrival(push.place, header);
  transport_.hold(van, held_by(push));
  MutexLock lock(mutex_);
  pushes_.push(urgency_of(header), std::move(push));
}

bool MachineLeader::work() {
  LocalPush push;
  bool more;
  {
    MutexLock lock(mutex_);
    if (pushes_.empty()) return false;
    push = pushes_.pop();
    more = !pushes_.empty();
  }
  const uint64_t held = held_by(push);
  const int van = push.place == 0 ? -1 : member(push.place).van;
  add(std::move(push));
  if (van >= 0) transport_.let_go(van, held);
  return more;
}

void MachineLeader::add(LocalPush push) {
  const Header& header = push.frame.header;
  MachineSum& sum = *push.sum;
  if (push.place == 0) {
    check_that_nobody_left(*push.key, header.round);
    push.payload = copy_of(sum, push.frame);
    if (ends_round(header, push.payload.data())) sum.note_arrival(0, header);
  }
  const MachineSum::Outcome outcome = sum.add(push.place, push.frame, std::move(push.payload));
  if (outcome.problem != nullptr)
    throw frame_refused(label(), label_of(push.place), header, outcome.problem, push.key->name);
  if (outcome.contradicts >= 0)
    throw scalars_differ(label(), label_of(outcome.contradicts), sum.settings(header.slice), label_of(push.place),
                         {header.scalars, push.frame.fields}, header.round, push.key->name);
  trace(transport_.options().trace.get(), TraceKind::kSummed, header, local_peer(rank_of(push.place)));
  if (outcome.push.empty()) return;
  const int server = server_of(sum.plan, header.slice, static_cast<int>(van_of_server_.size()));
  const int van = leader_van(server) >= 0 ? leader_van(server) : van_of_server_[static_cast<size_t>(server)];
  std::vector<Transport::Outgoing> frames;
  const std::optional<SharedFields>& fields = sum.pushed_fields(header.slice);
  for (Frame frame : outcome.push) {
    frame.goes_by_fields = fields.has_value();
    if (fields) frame.fields = *fields;
    frames.push_back({van, frame});
  }
  transport_.send(frames, Transport::Write::kHere);
}

PooledBuffer MachineLeader::copy_of(const MachineSum& sum, const Frame& own) {
  if (static_cast<Encoding>(own.header.encoding) == Encoding::kAbsent) return {};
  PooledBuffer copy(pool_, sum.room_bytes(own.header));
  if (own.encoder != nullptr)
    own.encoder->encode(own.header, own.payload, copy.data());
  else if (own.header.payload_bytes > 0)
    std::memcpy(copy.data(), own.payload, own.header.payload_bytes);
  return copy;
}

void MachineLeader::check_that_nobody_left(const Key& key, uint64_t round) const {
  for (const Member& member : members_)
    if (member.left)
      throw left_too_early(label(), transport_.label(member.van), {Awaited::What::kPush, key.name, round});
}

void MachineLeader::note_late(const Key& key, std::chrono::steady_clock::time_point now, LateWorkers& late) const {
  for (int place = 0; place <= static_cast<int>(members_.size()); ++place)
    if (auto found = key.machine_sum->late(place, now)) {
      found->worker = rank_of(place);
      found->key = key.name;
      late.note(std::move(*found));
    }
}

// --- answers -------------------------------------------------------------------------------------------------------

std::optional<Frame> MachineLeader::pass_on(Key& key, const Frame& answer) {
  MachineSum::Passed passed = key.machine_sum->pass_on(answer.header, answer.payload, key);
  if (passed.own) passed.own->fields = answer.fields;
  const bool yields = transport_.puts_pushes_first() && key.machine_sum->plan.is_part_of_norm();
  std::vector<Transport::Outgoing> frames;
  frames.reserve(passed.frames.size());
  for (auto& [place, frame] : passed.frames) {
    frame.goes_by_fields = key.machine_sum->hands_on_fields();
    if (frame.goes_by_fields) frame.fields = answer.fields;
    frame.yields = yields;
    frames.push_back({member(place).van, frame});
  }
  if (!frames.empty()) transport_.send(frames, Transport::Write::kHere);
  return passed.own;
}

}  // namespace p3
