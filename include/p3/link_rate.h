// The link that leaves this machine, as one process sees it: how fast it is, and how many of its connections share it.
//
// All of them derive their windows from this. A window that follows the rate of its own connection does not stay fair:
// who has had less gets a smaller one, and so less again (docs/decisions.md).
// Threads: who writes. Memory: outlives the streams that it is given to.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>

namespace p3 {

class LinkRate {
 public:
  void add_connection() { ++connections_; }
  void remove_connection() { --connections_; }
  uint64_t connections() const { return connections_; }

  // So many bytes have been taken by one of them. The rate is measured so, and not the kernel's delivery rate, which
  // takes what a token bucket lets pass at once for the rate of the path.
  void wrote(uint64_t bytes) {
    written_ += bytes;
    if (written_ < kBytesPerMeasurement) return;
    const auto now = std::chrono::steady_clock::now();
    const double seconds = std::chrono::duration<double>(now - since_).count();
    measured(static_cast<uint64_t>(static_cast<double>(written_) / seconds));
    written_ = 0;
    since_ = now;
  }
  void measured(uint64_t rate) {
    rate_ = std::max(rate, rate_ - rate_ / kMemory);
    ++measurements_;
  }
  uint64_t measurements() const { return measurements_; }

  // Bytes per second; 0: not known yet. The greatest of late, because often there is less to send.
  uint64_t rate() const { return rate_; }

 private:
  static constexpr uint64_t kBytesPerMeasurement = 1 << 20;
  static constexpr uint64_t kMemory = 256;  // measurements

  uint64_t connections_ = 0, rate_ = 0, written_ = 0, measurements_ = 0;
  std::chrono::steady_clock::time_point since_ = std::chrono::steady_clock::now();
};

}  // namespace p3
