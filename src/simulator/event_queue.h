// What will happen, and when: the earliest first, equals in the order in which they were planned.
//
// What passes one direction of a link leaves it in the order in which it came. Such events wait in a lane, of which only
// the first is in the heap, so that this stays small however many segments are under way.
// Threads: none.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
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
  int32_t what = 0;
  int32_t lane = 0;  // or kNoLane
};

class EventQueue {
 public:
  double now() const { return now_; }
  bool empty() const { return queue_.empty(); }
  uint64_t count() const { return next_; }

  // From 0.
  void set_lanes(std::size_t count) { lanes_.resize(count); }

  void at(double time, EventKind kind, int subject, int what = 0) {
    queue_.push({time, next_++, kind, subject, what, kNoLane});
  }

  // No earlier than what was planned last in this lane.
  void in_lane(int lane, double time, EventKind kind, int subject, int what = 0) {
    const Event event{time, next_++, kind, subject, what, lane};
    Lane& its = lanes_[static_cast<std::size_t>(lane)];
    if (its.is_in_heap)
      its.behind.push_back(event);
    else
      queue_.push(event);
    its.is_in_heap = true;
  }

  // Precondition: !empty().
  Event pop() {
    const Event event = queue_.top();
    queue_.pop();
    now_ = event.time;
    if (event.lane != kNoLane) advance(lanes_[static_cast<std::size_t>(event.lane)]);
    return event;
  }

 private:
  static constexpr int kNoLane = -1;

  struct Lane {
    bool is_in_heap = false;   // its first event
    std::deque<Event> behind;  // that
  };

  struct Later {
    bool operator()(const Event& one, const Event& other) const {
      return one.time > other.time || (one.time == other.time && one.order > other.order);
    }
  };

  void advance(Lane& lane) {
    lane.is_in_heap = !lane.behind.empty();
    if (!lane.is_in_heap) return;
    queue_.push(lane.behind.front());
    lane.behind.pop_front();
  }

  std::priority_queue<Event, std::vector<Event>, Later> queue_;
  std::vector<Lane> lanes_;
  uint64_t next_ = 0;
  double now_ = 0;
};

}  // namespace p3::simulator
