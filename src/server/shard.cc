#include "server/shard.h"

#include <algorithm>
#include <cstring>
#include <new>

#include "p3/error.h"

namespace p3 {

const char* Shard::problem_with(const Header& header, int worker) const {
  if (const char* problem = problem_with_frame(header, worker)) return problem;
  if (!turns.may_send(header, worker)) return "another worker's to send";
  return turns.in_turn(header, worker, published) ? nullptr : "out of turn";
}

bool Shard::has_state(uint8_t part) const {
  const Optimizer* const its = optimizer();
  if (its == nullptr) return false;
  if (part == kMaster) return its->needs_master(key.plan.dtype);
  return part >= 1 && part <= its->state_count();
}

Header Shard::header_of(FrameKind kind, Encoding encoding) const {
  Header header;
  header.kind = kind;
  header.dtype = static_cast<uint8_t>(key.plan.dtype);
  header.encoding = static_cast<uint8_t>(encoding);
  header.key = key.plan.wire_key;
  header.slice = index;
  header.round = published;
  header.priority = priority_;
  return header;
}

Header Shard::absent_push(uint64_t round) const {
  Header header;
  header.kind = push_kind();
  header.dtype = static_cast<uint8_t>(key.plan.dtype);
  header.encoding = static_cast<uint8_t>(Encoding::kAbsent);
  header.key = key.plan.wire_key;
  header.slice = index;
  header.round = round;
  return header;
}

// --- where it is summed --------------------------------------------------------------------------------------------

Reply Shard::handle(Task task) {
  Reply reply;
  if (is_void(task)) return reply;
  if (task.kind == Task::Kind::kCatchUp) {
    presence_.request(task.worker, task.header.round);
    answer_who_catches_up(reply);
    return reply;
  }
  if (task.kind == Task::Kind::kResume) {
    resume(reply);
    return reply;
  }
  switch (task.header.kind) {
    case FrameKind::kInit:
      init(task, reply);
      break;
    case FrameKind::kFetch:
    case FrameKind::kFetchRows:
      fetch(task, reply);
      break;
    case FrameKind::kStore:
    case FrameKind::kStoreRows:
      store(task, reply);
      break;
    case FrameKind::kCapture:
      answer_capture(task, reply);
      break;
    default:
      push(task, reply);
  }
  return reply;
}

// Part of a push that never became whole, or a request that nobody waits for any more.
bool Shard::is_void(const Task& task) const {
  if (task.kind == Task::Kind::kResume) return false;
  const FrameKind kind = task.header.kind;
  if (is_push(kind)) return presence_.is_torn(task.worker, task.incarnation, task.header.round);
  const bool only_asks = task.kind == Task::Kind::kCatchUp || kind == FrameKind::kFetch ||
                         kind == FrameKind::kFetchRows || kind == FrameKind::kCapture;
  return only_asks && is_lost(task);
}

void Shard::init(Task& task, Reply& reply) {
  const bool waits_already = std::any_of(waiting_inits_.begin(), waiting_inits_.end(),
                                         [&](const auto& waiting) { return waiting.first == task.worker; });
  if (waits_already) {
    reply.problem = "out of turn";
    return;
  }
  if (task.payload) replace_value(std::move(task.payload));
  inits_[static_cast<size_t>(task.worker)] = task.nth_init;
  if (!is_lost(task)) waiting_inits_.push_back({task.worker, task.nth_init});
  answer_inits(reply);
}

void Shard::answer_inits(Reply& reply) {
  if (!has_value()) return;
  const auto must_wait = [this](const auto& waiting) {
    return waiting.second > std::min(inits_[0], inits_[static_cast<size_t>(key.leader_of(waiting.first))]);
  };
  const auto ready = std::stable_partition(waiting_inits_.begin(), waiting_inits_.end(), must_wait);
  std::vector<int> answered;
  for (auto it = ready; it != waiting_inits_.end(); ++it) answered.push_back(it->first);
  waiting_inits_.erase(ready, waiting_inits_.end());
  send_value(answered, reply, /*asked_for=*/true);
}

void Shard::answer_who_catches_up(Reply& reply) {
  send_value(presence_.take_answerable(published), reply, /*asked_for=*/false);
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

// --- snapshots -----------------------------------------------------------------------------------------------------

void Shard::answer_capture(const Task& task, Reply& reply) const {
  try {
    reply.problem = capture(reply.captured);
  } catch (const std::bad_alloc&) {
    throw Error(ErrorKind::kStopped, host_.label + ": no memory for a snapshot's copy of key '" + key.name +
                                         "'. Use more servers, or go without snapshots.");
  }
  acknowledge(task, reply);
}

CapturedArray Shard::captured_array(uint8_t part, DType dtype, uint64_t elements) const {
  return {key.plan.wire_key, index, part, dtype, elements, new_bytes(elements * size_of(dtype)), 0};
}

void Shard::capture_state(const std::vector<void*>& state, const void* master, uint64_t elements,
                          std::vector<CapturedArray>& captured) const {
  const auto copy = [&](uint8_t part, const void* content) {
    CapturedArray array = captured_array(part, sum_type(key.plan.dtype), elements);
    std::memcpy(array.data.get(), content, array.bytes());
    captured.push_back(std::move(array));
  };
  for (size_t i = 0; i < state.size(); ++i) copy(static_cast<uint8_t>(i + 1), state[i]);
  if (master != nullptr) copy(kMaster, master);
}

}  // namespace p3
