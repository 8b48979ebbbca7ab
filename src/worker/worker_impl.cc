#include "worker/worker_impl.h"

#include <algorithm>

#include "p3/trace.h"
#include "wire/failures.h"

namespace p3 {

// --- from the script to the network -------------------------------------------------------------------------------

void Worker::Impl::submit(Key& key, std::vector<Operation> operations, Transport::Write write) {
  std::vector<Transport::Outgoing> frames;
  std::optional<Error> failure;
  {
    MutexLock lock(mutex_);
    failure = failure_;
    if (!failure) {
      pending_ += operations.size();
      for (Operation& operation : operations) key.operations.push_back(std::move(operation));
      begin_next(key, frames);
    }
  }
  if (failure)
    operations.back().done(&*failure, false);
  else
    transport_.send(frames, write);
}

void Worker::Impl::flush() { transport_.send({}); }

void Worker::Impl::begin_next(Key& key, std::vector<Transport::Outgoing>& frames) {
  if (key.active || !key.plan || failure_) return;
  if (key.moves && !begin_to_move(key)) return;
  if (key.operations.empty()) return;
  if (key.catches_up) begin_to_catch_up(key);
  const Operation& operation = key.operations.front();
  Transfer& transfer = *operation.transfer;
  key.active = true;
  if (transfer.is_round()) ++key.round;
  const KeyPlan& plan = key.plan_in_use();
  Header header;
  header.key = plan.wire_key;
  header.round = key.round;
  header.priority = operation.priority;
  header.scalars = operation.scalars;
  std::vector<Frame> made = transfer.begin(plan, header);
  if (transfer.kind == Transfer::Kind::kPush) {
    transfer.goes_by(operation.fields);
    for (Frame& frame : made) {
      frame.goes_by_fields = true;
      frame.fields = operation.fields;
    }
  }
  if (transfer.is_round()) {
    Header ready = made.front().header;
    ready.payload_bytes = 0;
    trace_at(recorder(), operation.asked_at, TraceKind::kReady, ready);
  }

  const uint32_t count = slice_count(plan);
  key.landed.assign(count, true);
  if (outlives_servers) key.begun.assign(count, {});
  key.to_land = 0;
  for (const Frame& frame : made)
    if (key.landed[frame.header.slice]) {
      key.landed[frame.header.slice] = false;
      ++key.to_land;
    }
  key.outstanding = key.to_land;
  const bool sums_any = key.machine_sum != nullptr && transfer.is_round();
  if (sums_any)
    for (uint32_t shard = 0; shard < count; ++shard)
      if (sums_here(key, shard)) key.outstanding += static_cast<uint32_t>(key.machine_sum->frames_from_key(shard));
  if (operation.is_gated()) {
    key.unready.assign(made.begin(), made.end());
    begin_ready(key, frames);
  } else {
    for (const Frame& frame : made) begin_frame(key, frame, frames);
  }
  if (key.outstanding == 0) complete_at_once_.push_back(&key);
  if (key.outstanding == 0 || sums_any || !left_.empty()) transport_.ask_for_work();
}

void Worker::Impl::begin_frame(Key& key, Frame frame, std::vector<Transport::Outgoing>& frames) {
  if (sums_here(key, frame.header.slice)) return leader_.bring(key, frame);
  if (outlives_servers) key.begun[frame.header.slice] = frame;
  if (frame.payload != nullptr || frame.encoder != nullptr) {
    frame.context = static_cast<Lender*>(&key);
    ++key.outstanding;
  }
  frames.push_back({van_of(key, frame.header.slice), frame});
}

void Worker::Impl::begin_ready(Key& key, std::vector<Transport::Outgoing>& frames) {
  const uint64_t ready = key.operations.front().ready_elements;
  const bool leaves_whole = !key.unready.empty() && key.transfer().leaves_whole();
  while (!key.unready.empty()) {
    const Slice slice = slice_at(*key.plan, key.unready.front().header.slice);
    if ((leaves_whole ? key.declared.elements : slice.offset + slice.elements) > ready) return;
    begin_frame(key, key.unready.front(), frames);
    if (sums_here(key, key.unready.front().header.slice)) transport_.ask_for_work();
    key.unready.pop_front();
  }
}

int Worker::Impl::van_of(const Key& key, uint32_t shard) const {
  const KeyPlan& plan = key.plan_in_use();
  const int leader =
      key.by_leader && key.transfer().is_round() ? leader_.leader_van(server_of(plan, shard, num_servers_)) : -1;
  return leader >= 0 ? leader : serving_van(plan, shard);
}

bool Worker::Impl::sums_here(const Key& key, uint32_t shard) const {
  return key.machine_sum != nullptr && key.transfer().is_round() &&
         leader_.leads(server_of(key.plan_in_use(), shard, num_servers_));
}

int Worker::Impl::serving_van(const KeyPlan& plan, uint32_t shard) const {
  return van_of_server_[static_cast<size_t>(server_of(plan, shard, num_servers_))];
}

// --- and back: the receiver thread ---------------------------------------------------------------------------------

void* Worker::Impl::receive_into(int van, const Header& header) {
  MutexLock lock(mutex_);
  if (header.kind == FrameKind::kAsk) return receive_ask_into(van, header);
  const auto known = handle_of_wire_key_.find(header.key);
  if (known == handle_of_wire_key_.end()) refuse(van, header, "unexpected");
  Key& key = keys_.at(known->second);
  if (is_push(header.kind)) return receive_push_into(van, key, header);
  if (key.active && key.learns_round && header.kind == FrameKind::kValue) {
    key.learns_round = false;
    key.round = header.round;
  }
  if (!key.active || header.round != key.round || header.key != key.plan_in_use().wire_key)
    refuse(van, header, "out of turn");
  if (header.slice >= slice_count(key.plan_in_use())) refuse(van, header, "misplaced");
  if ((header.of_machine != 0) != sums_here(key, header.slice))
    refuse(van, header, "for another number of workers than agreed");
  if (key.landed[header.slice] || van_of(key, header.slice) != van) refuse(van, header, "misplaced");
  if (key.is_unready(header.slice) || (header.of_machine != 0 && !key.machine_sum->is_awaiting(header.slice)))
    refuse(van, header, "an answer to no push");
  if (const char* problem = key.transfer().problem_with(header)) refuse(van, header, problem);
  if (void* place = key.transfer().place_of(header)) return place;
  std::vector<char>& arriving = arriving_[static_cast<size_t>(van)];
  arriving.resize(header.payload_bytes);
  return arriving.data();
}

void Worker::Impl::refuse(int van, const Header& header, const char* what) const {
  throw frame_refused(label(), transport_.label(van), header, what, {});
}

void Worker::Impl::received(int van, const Header& header, void* payload) {
  if (is_push(header.kind)) return leader_.received(van);
  if (header.kind == FrameKind::kAsk) return answer_ask(van, header);
  Key* key;
  Frame answer{header, payload};
  Transfer* transfer;  // stays while this thread works on the answer, as the key does
  {
    MutexLock lock(mutex_);
    key = &keys_.at(handle_of_wire_key_.at(header.key));
    transfer = &key->transfer();
  }
  answer.fields = transport_.received_fields(van);
  if (const char* problem = transfer->decode(answer)) refuse(van, header, problem);
  if (header.of_machine != 0) {
    const auto own = leader_.pass_on(*key, answer);
    if (!own) return;
    answer = *own;
  }
  const bool has_content = static_cast<Encoding>(answer.header.encoding) != Encoding::kAbsent;
  if (has_content && transfer->kind == Transfer::Kind::kSkip) transfer->goes_by(answer.fields);
  bool is_last = false;
  const char* problem = transfer->land(answer.header, answer.payload, is_last);
  if (problem != nullptr) refuse(van, header, problem);
  if (!is_last) return;
  if (key->to_land == 1) transfer->finish();
  {
    MutexLock lock(mutex_);
    key->landed[header.slice] = true;
    --key->to_land;
  }
  count_down(*key);
}

void Worker::Impl::count_down(Key& key) {
  Transfer* transfer;
  Urgency urgency;
  {
    MutexLock lock(mutex_);
    if (--key.outstanding > 0) return;
    transfer = &key.transfer();
    urgency = {key.round, key.operations.front().priority};
  }
  if (!transfer->computes()) return complete(key);
  updater_.queue(urgency, [this, &key, transfer] { compute(key, *transfer); });
}

void Worker::Impl::compute(Key& key, Transfer& transfer) {
  try {
    transfer.compute();
    complete(key);
  } catch (const std::exception& error) {
    transport_.fail(Error(ErrorKind::kStopped,
                          label() + ": " + error.what() + " while updating key '" + key.name + "' on this worker.",
                          {{}, key.name, {}}));
  }
}

void Worker::Impl::complete(Key& key) {
  std::vector<Transport::Outgoing> frames;
  Done done;
  bool updated;
  {
    MutexLock lock(mutex_);
    Operation& operation = key.operations.front();
    count(key, operation);
    updated = operation.transfer->is_updated();
    done = std::move(operation.done);
    if (operation.transfer->kind == Transfer::Kind::kInit) {
      key.catches_up = key.learns_round = false;
      key.next_init = InitPart::kOfAll;
      if (operation.plan != nullptr) adopt(key, *operation.plan);
    }
    key.operations.pop_front();
    key.active = false;
    begin_next(key, frames);
  }
  transport_.send(frames);
  if (done) done(nullptr, updated);
  {
    // Only now: close() must not return before the last `done` has.
    MutexLock lock(mutex_);
    --pending_;
  }
  idle_.notify_all();
}

void Worker::Impl::count(Key& key, const Operation& operation) {
  ++rounds_;
  operation.transfer->count();
  if (operation.transfer->is_round() && key.moves) ++pending_;  // the move, until its operations are there
  if (operation.transfer->is_round() && key.round > last_round_) last_round_ = key.round;
  if (operation.transfer->kind != Transfer::Kind::kPush) return;
  const auto now = Clock::now();
  const double waited_s = seconds_since(operation.asked_at, now);
  ++key.counters.rounds;
  key.counters.completed_s = std::chrono::duration<double>(now.time_since_epoch()).count();
  key.counters.waited_s += waited_s;
  key.counters.longest_wait_s = std::max(key.counters.longest_wait_s, waited_s);
}

void Worker::Impl::look(Clock::time_point now) {
  if (!leader_.leads()) return;
  MutexLock lock(mutex_);
  LateWorkers late;
  for (const auto& [handle, key] : keys_)
    if (key.machine_sum != nullptr) leader_.note_late(key, now, late);
  late_ = late.take();
}

bool Worker::Impl::work() {
  std::vector<Key*> complete_at_once;
  {
    MutexLock lock(mutex_);
    for (int van : left_) check_that_nothing_waits_for(van);
    complete_at_once.swap(complete_at_once_);
  }
  for (Key* key : complete_at_once) {
    key->transfer().finish();
    complete(*key);
  }
  return leader_.work();
}

// --- a key that goes on from somewhere else, or goes over to another plan ------------------------------------------

void Worker::Impl::begin_to_catch_up(Key& key) {
  std::vector<Operation> instead = key.transfer().ask_for_value();
  if (!instead.empty()) {
    key.operations.erase(key.operations.begin(), key.operations.begin() + 2);
    pending_ -= 2;
    put_first(key, std::move(instead));
  }
  key.learns_round = key.transfer().kind == Transfer::Kind::kInit;
}

bool Worker::Impl::begin_to_move(Key& key) {
  std::vector<Operation> operations = key.way->begin_to_move();
  if (operations.empty()) return false;
  if (key.machine_sum != nullptr) key.machine_sum = leader_.sum_of(key, *operations.back().plan, key.round + 1);
  put_first(key, std::move(operations));
  --pending_;  // the move itself
  key.moves = false;
  return true;
}

void Worker::Impl::put_first(Key& key, std::vector<Operation> operations) {
  pending_ += operations.size();
  key.operations.insert(key.operations.begin(), std::make_move_iterator(operations.begin()),
                        std::make_move_iterator(operations.end()));
}

void Worker::Impl::adopt(Key& key, const KeyPlan& plan) {
  handle_of_wire_key_.erase(key.plan->wire_key);
  key.wire_keys.erase(key.plan->wire_key);
  key.plan = plan;
}

void Worker::Impl::add_wire_key(Key& key, int handle, uint32_t wire_key) {
  handle_of_wire_key_[wire_key] = handle;
  key.wire_keys.insert(wire_key);
}

// --- the leader of a machine, and who follows it -------------------------------------------------------------------

void* Worker::Impl::receive_push_into(int van, const Key& key, const Header& header) {
  const int place = leader_.place_of(van);
  if (place == 0 || key.machine_sum == nullptr) refuse(van, header, "unexpected");
  if (const char* problem = key.machine_sum->problem_with(place, header)) refuse(van, header, problem);
  leader_.check_that_nobody_left(key, header.round);
  return leader_.room_for(van, key, header);
}

void Worker::Impl::check_that_nothing_waits_for(int van) const {
  if (const auto awaited = awaited_from(van)) throw left_too_early(label(), transport_.label(van), *awaited);
}

std::optional<Awaited> Worker::Impl::awaited_from(int van) const {
  const int place = leader_.place_of(van);
  for (const auto& [handle, key] : keys_) {
    if (place > 0 && key.machine_sum != nullptr)
      if (const auto late = key.machine_sum->late(place, Clock::now()))
        return Awaited{Awaited::What::kRound, key.name, late->round};
    if (!key.active) continue;
    for (uint32_t i = 0; i < slice_count(key.plan_in_use()); ++i)
      if (!key.landed[i] && van_of(key, i) == van) return Awaited{Awaited::What::kRound, key.name, key.round};
  }
  return {};
}

void Worker::Impl::left(int van) {
  if (leader_.follows_through(van) || leader_.place_of(van) > 0) {
    MutexLock lock(mutex_);
    if (leader_.follows_through(van)) left_.push_back(van);
    if (leader_.place_of(van) > 0) leader_.note_departure(van);
    check_that_nothing_waits_for(van);
  }
  if (std::find(own_van_.begin(), own_van_.end(), van) != own_van_.end())
    throw peer_left(label(), transport_.label(van), waiting_for(van));
}

// --- the end -------------------------------------------------------------------------------------------------------

void Worker::Impl::failed(const Error& error) {
  updater_.stop();
  std::vector<Done> pending;
  Error first = error;
  {
    MutexLock lock(mutex_);
    if (failure_) first = *failure_;
    failure_ = first;
    complete_at_once_.clear();
    for (auto& [handle, key] : keys_) {
      for (Operation& operation : key.operations) pending.push_back(std::move(operation.done));
      key.operations.clear();
      key.unready.clear();
      pending_ -= std::exchange(key.moves, false);  // which waits for its plan
      key.active = false;
    }
  }
  for (const Done& done : pending)
    if (done) done(&first, false);
  {
    MutexLock lock(mutex_);
    pending_ -= pending.size();
  }
  idle_.notify_all();
}

std::optional<Awaited> Worker::Impl::waiting_for(int van) const {
  MutexLock lock(mutex_);
  return awaited_from(van);
}

std::optional<Awaited> Worker::Impl::waiting_for_any() const {
  MutexLock lock(mutex_);
  for (const auto& [handle, key] : keys_)
    if (!key.unready.empty()) return Awaited{Awaited::What::kGradient, key.name, key.round};
  std::vector<int> vans = van_of_server_;
  for (int server = 0; server < num_servers_; ++server)
    if (leader_.leader_van(server) >= 0) vans.push_back(leader_.leader_van(server));
  for (int van : vans)
    if (auto awaited = awaited_from(van)) return awaited;
  return {};
}

}  // namespace p3
