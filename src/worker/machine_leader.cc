#include "worker/machine_leader.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "worker/machine_rows.h"
#include "worker/machine_slices.h"
#include "wire/disagreement.h"
#include "p3/trace.h"

namespace p3 {

void MachineLeader::add_member(int rank, int van) {
  members_.push_back({rank, van, false, {}});
  std::sort(members_.begin(), members_.end(),
            [](const Member& one, const Member& other) { return one.rank < other.rank; });
}

int MachineLeader::place_of(int van) const {
  for (size_t i = 0; i < members_.size(); ++i)
    if (members_[i].van == van) return static_cast<int>(i) + 1;
  return 0;
}

std::shared_ptr<MachineSum> MachineLeader::sum_of(const KeyPlan& plan, uint64_t next_round) {
  const int workers = static_cast<int>(members_.size()) + 1;
  if (plan.has_rows()) return std::make_shared<MachineRows>(plan, workers, next_round, pool_, lent_);
  return std::make_shared<MachineSlices>(plan, workers, next_round, pool_, lent_);
}

// --- pushes --------------------------------------------------------------------------------------------------------

void MachineLeader::bring(const Key& key, const Frame& own) {
  std::lock_guard<std::mutex> lock(mutex_);
  pushes_.push(urgency_of(own.header), {key.machine_sum, &key, 0, own, {}});
}

void* MachineLeader::room_for(int van, const Key& key, const Header& push) {
  const int place = place_of(van);
  LocalPush& arriving = member(place).arriving;
  arriving = {key.machine_sum, &key, place, {push}, {}};
  if (static_cast<Encoding>(push.encoding) != Encoding::kAbsent)
    arriving.payload = PooledBuffer(pool_, room_bytes(key, push));
  return arriving.payload.data();
}

void MachineLeader::received(int van) {
  LocalPush& push = member(place_of(van)).arriving;
  const Header& header = push.frame.header;
  if (ends_round(header, push.payload.data())) push.sum->note_arrival(push.place, header);
  transport_.hold(van, held_by(push));
  std::lock_guard<std::mutex> lock(mutex_);
  pushes_.push(urgency_of(header), std::move(push));
}

bool MachineLeader::work() {
  LocalPush push;
  bool more;
  {
    std::lock_guard<std::mutex> lock(mutex_);
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
    push.payload = copy_of(*push.key, push.frame);
    if (ends_round(header, push.payload.data())) sum.note_arrival(0, header);
  }
  const MachineSum::Outcome outcome = sum.add(push.place, header, std::move(push.payload));
  if (outcome.problem != nullptr)
    throw slice_refused(label(), label_of(push.place), header, outcome.problem, std::to_string(header.key));
  if (outcome.contradicts >= 0)
    throw scalars_differ(label(), label_of(outcome.contradicts), sum.scalars(header.slice), label_of(push.place),
                         header.scalars, header.round, push.key->name);
  const int rank = push.place == 0 ? rank_ : member(push.place).rank;
  trace(transport_.options().trace.get(), TraceKind::kSummed, header, local_peer(rank));
  if (outcome.push.empty()) return;
  const int server = server_of(sum.plan, header.slice, static_cast<int>(van_of_server_.size()));
  std::vector<Transport::Outgoing> frames;
  for (const Frame& frame : outcome.push) frames.push_back({van_of_server_[static_cast<size_t>(server)], frame});
  transport_.send(frames, Transport::Write::kHere);
}

// Rows may come in any size; slices have few.
size_t MachineLeader::room_bytes(const Key& key, const Header& push) {
  return key.row_elements > 0 ? BufferPool::roomy(push.payload_bytes) : push.payload_bytes;
}

PooledBuffer MachineLeader::copy_of(const Key& key, const Frame& own) {
  if (static_cast<Encoding>(own.header.encoding) == Encoding::kAbsent) return {};
  PooledBuffer copy(pool_, room_bytes(key, own.header));
  if (own.encoder != nullptr)
    own.encoder->encode(own.header, own.payload, copy.data());
  else if (own.header.payload_bytes > 0)
    std::memcpy(copy.data(), own.payload, own.header.payload_bytes);
  return copy;
}

void MachineLeader::check_that_nobody_left(const Key& key, uint64_t round) const {
  for (const Member& member : members_)
    if (member.left) throw left_too_early(label(), transport_.label(member.van), push_of(key.name, round));
}

void MachineLeader::note_late(const Key& key, std::chrono::steady_clock::time_point now, LateWorkers& late) const {
  const int workers = static_cast<int>(members_.size()) + 1;
  for (int place = 0; place < workers; ++place)
    if (auto found = key.machine_sum->late(place, now)) {
      found->worker = place == 0 ? rank_ : members_[static_cast<size_t>(place) - 1].rank;
      found->key = key.name;
      late.note(std::move(*found));
    }
}

// --- answers -------------------------------------------------------------------------------------------------------

std::vector<Transport::Outgoing> MachineLeader::pass_on_slice(Key& key, const Header& header, const void* value) const {
  key.machine_sum->answered(header.slice);
  Frame frame;
  frame.header = header;
  frame.header.of_machine = 0;
  frame.payload = value;
  frame.context = &key;
  std::vector<Transport::Outgoing> frames;
  for (const Member& member : members_) frames.push_back({member.van, frame});
  return frames;
}

std::optional<Frame> MachineLeader::pass_on_rows(const Key& key, const Header& header, const void* payload) {
  auto& sum = static_cast<MachineRows&>(*key.machine_sum);
  const bool absent = static_cast<Encoding>(header.encoding) == Encoding::kAbsent;
  const bool last = ends_round(header, absent ? nullptr : payload);
  Frame rows{header, payload};
  rows.header.of_machine = 0;
  Frame acknowledgement = rows;
  if (!absent) {
    std::memcpy(&acknowledgement_, payload, sizeof acknowledgement_);
    acknowledgement_.first_row = partition_at(sum.plan, header.slice).first;
    acknowledgement_.rows = acknowledgement_.id_bytes = 0;
    acknowledgement_.coding = IdCoding::kRange;
    acknowledgement.header.payload_bytes = sizeof acknowledgement_;
    acknowledgement.payload = &acknowledgement_;
  }

  // A copy: the leader's own may be somewhere else by the time it leaves.
  const auto send_to = [&](bool wanting, const Frame& original) {
    std::vector<Transport::Outgoing> frames;
    for (size_t i = 0; i < members_.size(); ++i)
      if (sum.wants(static_cast<int>(i) + 1, header.slice) == wanting) frames.push_back({members_[i].van, original});
    if (frames.empty()) return;
    const size_t bytes = original.header.payload_bytes;
    if (bytes > 0) {
      PooledBuffer copy(pool_, BufferPool::roomy(bytes));
      std::memcpy(copy.data(), original.payload, bytes);
      const Frame lent = lent_.lend(original.header, std::move(copy), bytes, static_cast<int>(frames.size()));
      for (Transport::Outgoing& outgoing : frames) outgoing.frame = lent;
    }
    transport_.send(frames, Transport::Write::kHere);
  };
  if (last) sum.answered(header.slice);
  send_to(true, rows);
  if (last) send_to(false, acknowledgement);
  if (sum.wants(0, header.slice)) return rows;
  if (last) return acknowledgement;
  return {};
}

}  // namespace p3
