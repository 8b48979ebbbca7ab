// When each slice was ready, queued, sent, received, summed and updated on one node; `p3 trace` puts the nodes together.
//
//   options.trace = std::make_shared<Recorder>(fd);           // null: nothing is recorded
//   trace(options.trace.get(), TraceKind::kSummed, header, worker);
//
// Threads: record() from any thread; each fills a chunk of its own, without a lock, and writes it to the file when it is
//          full. close() from any thread at any time.
// Memory:  the file is the Recorder's. One chunk of 16 KiB for each thread that records.
// Cost:    off: one branch. On: one clock read where the caller does not have the time already, 32 bytes of memory, and
//          every 512 events one write() by the thread that recorded them.
// If the file can no longer be written, the recording ends, with one line on standard error; nothing else happens.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <thread>
#include <unordered_map>

#include "p3/thread_annotations.h"
#include "p3/wire.h"

namespace p3 {

// docs/trace.md says the same to those who read the files.
enum class TraceKind : uint8_t {
  kReady = 1,      // worker: the gradient is ready and with the core, or being copied there; once for each key, slice 0
  kQueued = 2,     // the frame waits in the queue of its van
  kSendBegin = 3,  // it was taken off the queue: nothing can overtake it from here on
  kSendEnd = 4,    // its last byte is in the socket or ring
  kReceiveBegin = 5,  // its header was read
  kReceiveEnd = 6,    // its last byte was read: on a worker, the value has landed
  kSummed = 7,        // server: taken off the receive queue and added, or kept until lower ranks have come
  kUpdated = 8,       // server: the round's new value is there
  kStallBegin = 9,    // worker: the training thread begins to wait for the value of the key's last round
  kStallEnd = 10,     // worker: and goes on
  kEnd = 11,          // the recording was closed: nothing is missing
};

// Not a worker's server or a server's worker, but another worker of the same machine, or group.
constexpr int kNoPeer = -1;
constexpr int local_peer(int rank) { return -2 - rank; }

// As it lies in the file, after kTraceMagic.
struct TraceEvent {
  int64_t time_ns = 0;  // CLOCK_MONOTONIC
  uint32_t key = 0;     // wire key
  uint32_t slice = 0;
  uint32_t round = 0;  // its low 32 bits
  uint32_t bytes = 0;  // of the payload, as it is sent
  int32_t priority = 0;
  int16_t peer = kNoPeer;  // rank of the node at the other end, or local_peer()
  TraceKind kind{};
  FrameKind frame{};
};
static_assert(sizeof(TraceEvent) == 32, "events are written as they lie in memory");

constexpr char kTraceMagic[8] = {'P', '3', 't', 'r', 'a', 'c', 'e', '1'};

class Recorder {
 public:
  using Clock = std::chrono::steady_clock;  // CLOCK_MONOTONIC

  // Takes over an empty file, opened for appending.
  explicit Recorder(int fd);
  ~Recorder();  // close()
  Recorder(const Recorder&) = delete;
  Recorder& operator=(const Recorder&) = delete;

  void record(const TraceEvent& event);
  // Writes what every thread has recorded so far, then kEnd; what is recorded later is dropped. The file is closed.
  void close();

 private:
  static constexpr uint32_t kChunkEvents = 512;
  struct Chunk {
    std::atomic<uint32_t> count{0};  // written by its thread
    TraceEvent events[kChunkEvents];
  };

  Chunk& own_chunk();
  void write(const Chunk& chunk) P3_REQUIRES(mutex_);
  void write_bytes(const void* data, size_t size) P3_REQUIRES(mutex_);

  const uint64_t id_;  // tells recorders apart, as an address may be reused
  Mutex mutex_;
  int fd_ P3_GUARDED_BY(mutex_);
  std::unordered_map<std::thread::id, std::unique_ptr<Chunk>> chunks_ P3_GUARDED_BY(mutex_);
};

inline void trace_at(Recorder* recorder, std::chrono::steady_clock::time_point when, TraceKind kind,
                     const Header& header, int peer = kNoPeer) {
  if (recorder == nullptr) return;
  TraceEvent event;
  event.time_ns = std::chrono::nanoseconds(when.time_since_epoch()).count();
  event.key = header.key;
  event.slice = header.slice;
  event.round = static_cast<uint32_t>(header.round);
  event.bytes = header.payload_bytes;
  event.priority = header.priority;
  event.peer = static_cast<int16_t>(peer);
  event.kind = kind;
  event.frame = header.kind;
  recorder->record(event);
}

inline void trace(Recorder* recorder, TraceKind kind, const Header& header, int peer = kNoPeer) {
  if (recorder != nullptr) trace_at(recorder, Recorder::Clock::now(), kind, header, peer);
}

}  // namespace p3
