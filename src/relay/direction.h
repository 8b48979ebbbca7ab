// One direction of a link, as a card and a cable are: a packet is sent when the one before has been, takes its time on the
// way, and may be lost there. No burst ever goes faster than the rate.
// Threads: one, but its record is anybody's.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <optional>

#include "relay/table.h"

namespace p3::relay {

class Direction {
 public:
  explicit Direction(DirectionRecord& record) : record_(record), random_(record.seed) {}

  // When a packet of so many bytes, which comes now, is at the other end; std::nullopt: never. In nanoseconds of a clock
  // that never goes back from one call to the next. Which ones are lost depends on the seed, and on how many of those that
  // may be lost have passed before: so that the same packets are lost again.
  std::optional<int64_t> pass(int64_t now, size_t bytes, bool may_be_lost) {
    const double bytes_per_s = record_.bytes_per_s;
    const int64_t begins = std::max(now, free_at_);
    if (bytes_per_s > 0) {
      if (begins - now > nanoseconds(record_.queue_s)) {
        ++record_.dropped;
        return std::nullopt;
      }
      free_at_ = begins + nanoseconds(static_cast<double>(bytes) / bytes_per_s);
    } else {
      free_at_ = begins;
    }
    ++record_.packets;
    record_.bytes += bytes;
    if (may_be_lost && record_.loss > 0 && random() < record_.loss) {
      ++record_.lost;
      return std::nullopt;
    }
    return free_at_ + nanoseconds(record_.delay_s);
  }

 private:
  static int64_t nanoseconds(double seconds) { return std::llround(seconds * 1e9); }

  // From 0 up to 1, evenly: SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014).
  double random() {
    uint64_t mixed = random_ += 0x9e3779b97f4a7c15;
    mixed = (mixed ^ (mixed >> 30)) * 0xbf58476d1ce4e5b9;
    mixed = (mixed ^ (mixed >> 27)) * 0x94d049bb133111eb;
    return static_cast<double>((mixed ^ (mixed >> 31)) >> 11) * 0x1p-53;
  }

  DirectionRecord& record_;
  uint64_t random_;
  int64_t free_at_ = 0;  // when all that has come is sent
};

}  // namespace p3::relay
