// One direction of a host's NIC (LinkSpec), and how it has been used.
// Threads: none.
#pragma once

#include <algorithm>
#include <limits>

#include "simulator/job.h"

namespace p3::simulator {

class Link {
 public:
  explicit Link(const LinkSpec& spec) : spec_(spec) {}

  static constexpr double kLost = -1;

  // When the last of `bytes` that come now has passed; kLost if there is no room for them. Times must not decrease.
  double pass(double now, double bytes) {
    if (spec_.queue_bytes > 0 && waiting_bytes(now) + bytes > spec_.queue_bytes) {
      ++use_.lost;
      return kLost;
    }
    // The bucket is full when nothing has passed for a burst's time: what comes then passes at once.
    empty_at_ = std::max(empty_at_, now - spec_.burst_bytes / spec_.bytes_per_s) + bytes / spec_.bytes_per_s;
    const double passed = std::max(now, empty_at_);
    use_.bytes += bytes;
    use_.busy_s += bytes / spec_.bytes_per_s;
    use_.greatest_queue_s = std::max(use_.greatest_queue_s, passed - now);
    queued_s_ += passed - now;
    ++use_.segments;
    return passed;
  }

  // The time of the link that the last segment takes, of so many bytes. No two segments' times overlap.
  double taken_from(double bytes) const { return empty_at_ - bytes / spec_.bytes_per_s; }
  double taken_until() const { return empty_at_; }

  double waiting_bytes(double now) const { return std::max(0.0, (empty_at_ - now) * spec_.bytes_per_s); }
  double waiting_s(double now) const { return std::max(0.0, empty_at_ - now); }

  void forget_use() {
    use_ = {};
    queued_s_ = 0;
  }
  LinkUse use() const {
    LinkUse use = use_;
    if (use.segments > 0) use.mean_queue_s = queued_s_ / static_cast<double>(use.segments);
    return use;
  }

 private:
  const LinkSpec spec_;
  double empty_at_ = -std::numeric_limits<double>::infinity();  // when all that has come is paid for in tokens
  double queued_s_ = 0;
  LinkUse use_;
};

}  // namespace p3::simulator
