#include "server/shard.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <utility>

#include "numeric/sum.h"
#include "p3/error.h"

namespace p3 {

Shard::Shard(const ServerKey& its_key, uint32_t its_index, int its_thread, ShardHost& host, const FrameKinds& frames,
             uint64_t elements)
    : key(its_key),
      index(its_index),
      thread(its_thread),
      turns(its_key),
      host_(host),
      frames_(frames),
      elements_(elements),
      dtype_(key.plan.dtype),
      sum_dtype_(sum_type(dtype_)),
      bytes_(elements * size_of(dtype_)),
      sum_bytes_(elements * size_of(sum_dtype_)),
      value_(host.values.take(bytes_)),
      norm_place_(key.reports_norm() ? key.norm->join() : 0),
      presence_(workers()),
      inits_(workers(), 0) {}

Shard::~Shard() {
  host_.values.give_back(value_, bytes_);
  if (master_ != nullptr) host_.values.give_back(master_, sum_bytes_);
  for (void* state : state_) host_.values.give_back(state, sum_bytes_);
}

const char* Shard::problem_with(const Header& header, int worker) const {
  const FrameKind kind = header.kind;
  const bool is_about_part = kind == frames_.fetch || kind == frames_.store;
  const bool is_firsts = kind == FrameKind::kCapture || (kind == frames_.store && !frames_.reach_value);
  if (kind != frames_.push && kind != FrameKind::kInit && kind != FrameKind::kCapture && !is_about_part)
    return "unexpected";
  if (kind == FrameKind::kInit && header.part > static_cast<uint8_t>(InitPart::kRoundAlone)) return "malformed";
  if (is_firsts && worker != key.first()) return "unexpected";
  const bool is_about_value = !is_about_part || (frames_.reach_value && header.part == 0);
  if (!is_about_value && !has_state(header.part)) return "of a state that its key's optimizer does not have";
  if (static_cast<DType>(header.dtype) != (is_about_value ? dtype_ : sum_dtype_))
    return "of another element type than agreed";
  if (const char* problem = problem_with_payload(header, worker)) return problem;
  if (!turns.may_send(header, worker)) return "another worker's to send";
  const bool in_turn = claims != nullptr ? claims->in_turn(header, worker) : turns.in_turn(header, worker, published);
  return in_turn ? nullptr : "out of turn";
}

const char* Shard::problem_with_claim(const Header& claim, int worker) const {
  if (claims == nullptr) return "of a slice that its server has not inherited";
  if (static_cast<DType>(claim.dtype) != dtype_) return "of another element type than agreed";
  return claims->problem_with_claim(claim, worker, bytes_);
}

bool Shard::has_state(uint8_t part) const {
  const Optimizer* const its = optimizer();
  if (key.plan.update != Update::kServers || part == 0) return false;
  return part == part_of_master(its) || (its != nullptr && part <= its->state_count());
}

uint8_t Shard::part_of_master(const Optimizer* its) const {
  return its != nullptr && its->needs_master(dtype_) ? kMaster : 0;
}

Header Shard::header_of(FrameKind kind, Encoding encoding, uint64_t round, int32_t priority) const {
  Header header;
  header.kind = kind;
  header.dtype = static_cast<uint8_t>(key.plan.dtype);
  header.encoding = static_cast<uint8_t>(encoding);
  header.key = key.plan.wire_key;
  header.slice = index;
  header.round = round;
  header.priority = priority;
  return header;
}

// --- where it is summed --------------------------------------------------------------------------------------------

Reply Shard::handle(Task& task) {
  Reply reply;
  if (is_void(task)) return reply;
  if (task.kind == Task::Kind::kCatchUp) {
    presence_.let_in(task.worker);
    if (static_cast<InitPart>(task.header.part) == InitPart::kRoundAlone)
      send(task.worker, {header_of(FrameKind::kValue, Encoding::kAbsent, published, task.header.priority)}, reply);
    else
      send_value({task.worker}, reply, /*asked_for=*/false);
    return reply;
  }
  if (task.kind == Task::Kind::kAgain) {
    answer_again(task.worker, reply);
    return reply;
  }
  if (task.kind == Task::Kind::kResume) {
    resume(reply);
    return reply;
  }
  const FrameKind kind = task.header.kind;
  if (kind == frames_.push) {
    push(task, reply);
  } else if (kind == FrameKind::kInit) {
    init(task, reply);
  } else if (kind == FrameKind::kCapture) {
    capture(task, reply);
  } else if (kind == frames_.fetch) {
    fetch(task, reply);
  } else {
    reply.problem = note_store(task.header);
    if (reply.problem == nullptr) store(task, reply);
  }
  return reply;
}

// Part of a push that never became whole, or a request that nobody waits for any more.
bool Shard::is_void(const Task& task) const {
  if (task.kind == Task::Kind::kResume) return false;
  const FrameKind kind = task.header.kind;
  if (task.kind == Task::Kind::kAgain) return is_lost(task);
  if (is_push(kind)) return presence_.is_torn(task.worker, task.incarnation, task.header.round);
  const bool only_asks = task.kind == Task::Kind::kCatchUp || kind == frames_.fetch || kind == FrameKind::kCapture;
  return only_asks && is_lost(task);
}

void Shard::init(Task& task, Reply& reply) {
  const bool waits_already = std::any_of(waiting_inits_.begin(), waiting_inits_.end(),
                                         [&](const auto& waiting) { return waiting.first == task.worker; });
  if (waits_already) {
    reply.problem = "out of turn";
    return;
  }
  if (task.payload) {
    if (task.worker == key.first() && !is_begun_) drop_state();  // of a value that was loaded
    replace_value(std::move(task.payload));
  }
  if (task.worker == key.first()) {
    is_begun_ = true;
    value_is_replaced();
  }
  inits_[static_cast<size_t>(task.worker)] = task.nth_init;
  if (!is_lost(task)) waiting_inits_.push_back({task.worker, task.nth_init});
  answer_inits(reply);
}

void Shard::send(int worker, Frame frame, Reply& reply) const {
  if (updates_ != nullptr) frame.header.scalars.updates = static_cast<double>(*updates_);
  reply.frames.push_back({host_.van_of(worker), frame});
}

void Shard::answer_inits(Reply& reply) {
  if (!has_value()) return;
  const auto must_wait = [this](const auto& waiting) {
    return waiting.second > std::min(inits(key.first()), inits(key.leader_of(waiting.first)));
  };
  const auto ready = std::stable_partition(waiting_inits_.begin(), waiting_inits_.end(), must_wait);
  std::vector<int> answered;
  for (auto it = ready; it != waiting_inits_.end(); ++it) answered.push_back(it->first);
  waiting_inits_.erase(ready, waiting_inits_.end());
  send_value(answered, reply, /*asked_for=*/true);
}

std::vector<int> Shard::receivers() const {
  std::vector<int> here;
  here.reserve(workers());
  for (int worker = 0; worker < key.machines->num_workers(); ++worker)
    if (presence_.is_here(worker) && key.pushes(worker)) here.push_back(worker);
  return here;
}

void Shard::acknowledge(const Task& task, Reply& reply) const {
  Frame frame;
  frame.header = task.header;
  frame.header.kind = FrameKind::kPart;
  frame.header.encoding = static_cast<uint8_t>(Encoding::kAbsent);
  frame.header.payload_bytes = 0;
  send(task.worker, frame, reply);
}

void Shard::lose(int worker, uint32_t incarnation, uint64_t pushed) {
  presence_.lose(worker, incarnation, pushed);
  waiting_inits_.erase(std::remove_if(waiting_inits_.begin(), waiting_inits_.end(),
                                      [worker](const auto& waiting) { return waiting.first == worker; }),
                       waiting_inits_.end());
}

void Shard::take_over(const Claims& its) {
  is_begun_ = inits_of(its.best()) > 0;
  for (int worker = 0; worker < key.machines->num_workers(); ++worker)
    inits_[static_cast<size_t>(worker)] = its.inits_of_worker(worker);
}

void Shard::begin_behind(uint64_t round) {
  if (bytes_ > 0) std::memset(value_, 0, bytes_);
  published = round;
  is_begun_ = true;
  std::fill(inits_.begin(), inits_.end(), turns.begin_behind(round));
}

void Shard::report_norm(uint64_t round, const NormPart& part) {
  const StoreNorm::Waiting waiting = key.norm->report(norm_place_, round, part);
  if (waiting.shard != nullptr) host_.resume(*waiting.shard, waiting.urgency);
}

void Shard::make_master(const Optimizer* its) {
  const uint8_t part = part_of_master(its);
  if (part == 0 || (master_ != nullptr && master_part_ == part)) return;
  if (master_ == nullptr) master_ = host_.values.take(sum_bytes_);  // else it was another: an optimizer has come since
  master_part_ = part;
  if (part == kMaster)
    start_sum(dtype_, master_, value_, elements_);
  else
    std::memset(master_, 0, sum_bytes_);
}

void Shard::make_state(const Optimizer& optimizer) {
  make_master(&optimizer);
  if (state_.size() == static_cast<size_t>(optimizer.state_count())) return;
  for (void* loaded : std::exchange(state_, {})) host_.values.give_back(loaded, sum_bytes_);  // another optimizer's
  for (int i = 0; i < optimizer.state_count(); ++i) state_.push_back(host_.values.take(sum_bytes_));
  optimizer.start_state(dtype_, value_, state_.data(), elements_);
}

void Shard::drop_state() {
  for (void* state : std::exchange(state_, {})) host_.values.give_back(state, sum_bytes_);
  if (master_ != nullptr) host_.values.give_back(std::exchange(master_, nullptr), sum_bytes_);
}

void*& Shard::part_at(uint8_t part) {
  if (part == 0) return value_;
  const Optimizer* const its = optimizer();
  if (part == part_of_master(its)) {
    make_master(its);
    return master_;
  }
  if (its == nullptr || part > its->state_count())  // it was there when the frame was checked
    host_.refuse_call("a part of key '" + key.name +
                      "' was asked for while the store's optimizer was set. Ask behind it.");
  make_state(*its);
  return state_[part - 1];
}

// --- snapshots -----------------------------------------------------------------------------------------------------

void Shard::capture(const Task& task, Reply& reply) const {
  if (!has_value()) {
    reply.problem = "out of turn";
    return;
  }
  const auto add = [&](uint8_t part) {
    reply.captured.push_back({key.plan.wire_key, index, part, type_of(part), elements_, {}, 0});
    reply.captured.back().data = new_bytes(reply.captured.back().bytes());
    return reply.captured.back().data.get();
  };
  try {
    copy_value(add(0));
    for (size_t i = 0; i < state_.size(); ++i) std::memcpy(add(static_cast<uint8_t>(i + 1)), state_[i], sum_bytes_);
    const uint8_t beside = part_of_master(optimizer());
    if (master_ != nullptr && beside != 0) std::memcpy(add(beside), master_, sum_bytes_);
  } catch (const std::bad_alloc&) {
    throw Error(ErrorKind::kStopped, host_.label + ": no memory for a snapshot's copy of key '" + key.name +
                                         "'. Use more servers, or go without snapshots.");
  }
  acknowledge(task, reply);
}

}  // namespace p3
