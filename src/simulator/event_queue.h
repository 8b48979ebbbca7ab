// What will happen, and when: the earliest first, equals in the order in which they were planned.
// Threads: none.
#pragma once

#include <cstdint>
#include <queue>
#include <vector>

namespace p3::simulator {

enum class EventKind : uint32_t {
  kStepDone,       // of a worker's computation; what: layer, or its complement in the backward pass
  kAtDownlink,     // a segment has passed its sender's link and arrives at its receiver's
  kArrived,        // and has passed that
  kAckAtDownlink,  // its acknowledgement
  kAckArrived,
  kLossNoticed,  // a segment must be sent again
  kRetry,        // a connection tries again what its host has dropped
  kPaceReached,  // a connection may send its next segment
};

struct Event {
  double time = 0;
  uint64_t order = 0;
  EventKind kind{};
  int32_t subject = 0;
  int64_t what = 0;
};

class EventQueue {
 public:
  double now() const { return now_; }
  bool empty() const { return queue_.empty(); }
  uint64_t count() const { return next_; }

  void at(double time, EventKind kind, int subject, int64_t what = 0) {
    queue_.push({time, next_++, kind, subject, what});
  }

  // Precondition: !empty().
  Event pop() {
    const Event event = queue_.top();
    queue_.pop();
    now_ = event.time;
    return event;
  }

 private:
  struct Later {
    bool operator()(const Event& one, const Event& other) const {
      return one.time > other.time || (one.time == other.time && one.order > other.order);
    }
  };

  std::priority_queue<Event, std::vector<Event>, Later> queue_;
  uint64_t next_ = 0;
  double now_ = 0;
};

}  // namespace p3::simulator
