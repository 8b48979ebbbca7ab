// What worker and server have in common, seen from outside: how they are set up, watched and stopped.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

namespace p3 {

class Recorder;

struct NodeOptions {
  std::string label;         // in messages: "worker 2 (10.0.0.5)"
  double heartbeat_s = 1.0;  // a heartbeat leaves every van at least this often
  double timeout_s = 10.0;   // silence on a van for this long means a dead peer
  // The end of the connection to the scheduler is no failure: replace_watch() will bring another one.
  bool outlives_scheduler = false;
  // Of a worker: a server that is lost is no failure, as Worker::inherit() will say who takes over from it.
  bool outlives_servers = false;
  bool checksums = false;  // CRC32C on every frame that carries a slice; the same on all nodes
  // How much is held for a peer that may send requests (answers that it has not read, its frames that wait to be
  // handled) before nothing more is read from it. Far more than jobs need.
  uint64_t max_held_bytes = 64 << 20;

  std::shared_ptr<Recorder> trace;  // p3/trace.h; null: nothing is recorded
};

// Of one van, or of all vans of a node, since start. Bytes count whole frames, heartbeats included.
struct Traffic {
  uint64_t bytes_sent = 0;
  uint64_t bytes_received = 0;
  uint64_t slices_sent = 0;
  uint64_t slices_received = 0;
  uint64_t queued_slices = 0;       // waiting to be sent, now
  uint64_t peak_queued_slices = 0;  // of all vans: the largest peak of one
  double queued_s = 0;              // how long all slices sent so far have waited for their turn, in total
  uint64_t held_bytes = 0;          // held for the peer alone, now (see NodeOptions::max_held_bytes)
  uint64_t peak_held_bytes = 0;     // of all vans: the largest peak of one
};

struct Counters {
  Traffic traffic;
  Traffic local;                   // worker: with the other workers of its machine, which `traffic` leaves out
  uint64_t rounds = 0;             // worker: keys' rounds completed; server: slices' rounds completed
  uint64_t last_round = 0;         // the highest one completed of any key
  uint64_t received_slices = 0;    // server: received and not yet handled, now
  uint64_t buffer_bytes = 0;       // server, leader of a machine: received slices of incomplete rounds, now
  uint64_t peak_buffer_bytes = 0;  // the peak so far
  uint64_t system_calls = 0;       // of the threads that serve the vans, to move bytes, to sleep and to wake others
  uint64_t keys = 0;               // server: that it knows, now
  uint64_t value_bytes = 0;        // server: of their values and their optimizers' states, now
};

}  // namespace p3
