// What nodes send each other: a slice's push, or its value. Kept in one place; everything else knows their numbers.
// Threads: none.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace p3::simulator {

struct Frame {
  uint64_t urgency = 0;  // less is sooner
  int slice = 0;
  int round = 0;
  int machine = 0;  // whose push it is, or to whom the value goes
  bool is_push = false;
  double bytes = 0, left = 0;  // in all, and not yet written
  double begun_at = 0;
};

class Frames {
 public:
  int add(const Frame& frame) {
    if (free_.empty()) {
      frames_.push_back(frame);
      return static_cast<int>(frames_.size()) - 1;
    }
    const int number = free_.back();
    free_.pop_back();
    frames_[static_cast<size_t>(number)] = frame;
    return number;
  }
  void remove(int number) { free_.push_back(number); }
  Frame& operator[](int number) { return frames_[static_cast<size_t>(number)]; }

 private:
  std::vector<Frame> frames_;
  std::vector<int> free_;
};

}  // namespace p3::simulator
