// What the links of a lab are set to, and what has passed them: memory that the relay shares, by a file, with who made the
// lab and with who looks on. One writes settings, the relay reads them for each packet and writes counts.
// Threads and processes: any, at any time.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>

namespace p3::relay {

// One direction of a host's link: up, from the host, or down, to it.
struct alignas(64) DirectionRecord {
  std::atomic<double> bytes_per_s;  // of Ethernet frames; 0: no limit
  std::atomic<double> queue_s;      // a packet that would wait longer for its turn is dropped
  std::atomic<double> delay_s;      // of what has passed, besides
  std::atomic<double> loss;         // the share of packets that are lost, from 0 to 1
  std::atomic<uint64_t> seed;       // of which ones; looked at once, when the relay starts

  std::atomic<uint64_t> packets, bytes;  // that have passed, the lost ones included
  std::atomic<uint64_t> dropped, lost;   // packets: for want of room, and by chance
};

struct HostRecord {
  DirectionRecord up, down;
  std::atomic<uint64_t> is_cut;   // 1: nothing passes either way
  std::atomic<uint64_t> late_ns;  // the most that a packet came to the host later than it should, as the relay was late
};

static_assert(std::atomic<double>::is_always_lock_free && std::atomic<uint64_t>::is_always_lock_free);

class Table {
 public:
  // Makes the file, all zeros. This and the next throw std::system_error.
  static void make(const std::string& path, int hosts);

  explicit Table(const std::string& path);
  ~Table();
  Table(const Table&) = delete;
  Table& operator=(const Table&) = delete;

  int hosts() const { return hosts_; }
  HostRecord& operator[](int host) { return records_[host]; }

 private:
  HostRecord* records_ = nullptr;
  int hosts_ = 0;
};

}  // namespace p3::relay
