// Most urgent first; equals in the order they came (std::priority_queue alone would scramble them).
// Threads: none of its own; the owner locks. Knows nothing of sockets or slices.
#pragma once

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
    size_t child = heap_.size() - 1;
    while (child > 0) {
      const size_t parent = (child - 1) / 2;
      if (!heap_[child].before(heap_[parent])) break;
      std::swap(heap_[child], heap_[parent]);
      child = parent;
    }
  }

  bool empty() const { return heap_.empty(); }
  size_t size() const { return heap_.size(); }
  const Urgency& top_urgency() const { return heap_.front().urgency; }

  // Precondition: !empty().
  T pop() {
    T value = std::move(heap_.front().value);
    if (heap_.size() > 1) heap_.front() = std::move(heap_.back());
    heap_.pop_back();
    sink();
    return value;
  }

  void clear() { heap_.clear(); }

 private:
  struct Entry {
    Urgency urgency;
    uint64_t sequence;
    T value;
    bool before(const Entry& other) const {
      if (urgency.is_sooner_than(other.urgency)) return true;
      return !other.urgency.is_sooner_than(urgency) && sequence < other.sequence;
    }
  };

  void sink() {
    size_t parent = 0;
    while (true) {
      size_t first = parent;
      for (size_t child = 2 * parent + 1; child <= 2 * parent + 2 && child < heap_.size(); ++child)
        if (heap_[child].before(heap_[first])) first = child;
      if (first == parent) return;
      std::swap(heap_[parent], heap_[first]);
      parent = first;
    }
  }

  std::vector<Entry> heap_;
  uint64_t next_ = 0;
};

}  // namespace p3
