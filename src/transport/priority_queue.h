// Most urgent first; equals in the order they came (a heap alone would scramble them).
// Threads: none of its own; the owner locks. Knows nothing of sockets or slices.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "wire/urgency.h"

namespace p3 {

template <typename T>
class PriorityQueue {
 public:
  void push(const Urgency& urgency, T value) {
    heap_.push_back({urgency, next_++, std::move(value)});
    std::push_heap(heap_.begin(), heap_.end(), goes_after);
  }

  bool empty() const { return heap_.empty(); }
  size_t size() const { return heap_.size(); }
  const Urgency& top_urgency() const { return heap_.front().urgency; }

  // Precondition, here and below: !empty().
  const T& top() const { return heap_.front().value; }
  T pop() {
    std::pop_heap(heap_.begin(), heap_.end(), goes_after);
    T value = std::move(heap_.back().value);
    heap_.pop_back();
    return value;
  }

  void clear() { heap_.clear(); }

 private:
  struct Entry {
    Urgency urgency;
    uint64_t sequence;
    T value;
  };

  static bool goes_after(const Entry& one, const Entry& other) {
    if (other.urgency.is_sooner_than(one.urgency)) return true;
    return !one.urgency.is_sooner_than(other.urgency) && other.sequence < one.sequence;
  }

  std::vector<Entry> heap_;
  uint64_t next_ = 0;
};

}  // namespace p3
