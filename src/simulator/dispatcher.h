// P3's senders: which frame of a host is written to which socket, and when (struct Sender).
//
// Each connection has a queue of frames, most urgent first, above its socket. Whenever a socket has room, the most urgent
// frame that can move is written; among equals the connections of a host take turns. A socket that is full takes more
// when a third of it is free again, as the kernel has it. The processes of a host, which each have a sender, act as one:
// they differ in nothing that is modelled.
// Threads: none.
#pragma once

#include <cstdint>
#include <set>
#include <tuple>
#include <utility>
#include <vector>

#include "simulator/event_queue.h"
#include "simulator/frames.h"
#include "simulator/job.h"
#include "simulator/network.h"

namespace p3::simulator {

class Dispatcher {
 public:
  Dispatcher(const Sender& rules, double segment_bytes, int hosts, EventQueue& events, Network& network,
             Frames& frames);

  // Every connection of the network, in turn, before anything is queued.
  void add(int connection, double window_bytes);

  // A frame waits to leave. Call pump() when all that leave at once do.
  void queue(int connection, int frame);
  // Writes what can be written on a host.
  void pump(int host);
  // Fewer bytes are under way than before.
  void acknowledged(int connection);
  // kEgressDrained.
  void drained(int host);

 private:
  struct Waiting {
    uint64_t urgency;
    uint64_t order;
    int frame;
  };
  static bool goes_after(const Waiting& one, const Waiting& other) {
    return std::tie(one.urgency, one.order) > std::tie(other.urgency, other.order);
  }

  using Place = std::tuple<uint64_t, double, int>;  // urgency, bytes under way (rule 3), connection

  struct Queue {
    std::vector<Waiting> frames;  // a heap
    int current = -1;             // half written
    double window = 0;
    double bound = 0;                           // of the socket since it was written to last
    bool is_full = false;                       // until a third of `bound` is free
    bool is_ready = false, is_waiting = false;  // and then its places
    Place ready_at;
    std::pair<uint64_t, int> waiting_at;
  };

  struct Host {
    std::set<Place> ready;                       // connections that have frames and room
    std::set<std::pair<uint64_t, int>> waiting;  // that have frames: urgency, connection
    int written_last = -1;
    bool wakes = false;
  };

  Queue& of(int connection) { return queues_[static_cast<size_t>(connection)]; }
  Host& host(int number) { return hosts_[static_cast<size_t>(number)]; }
  bool has_work(const Queue& queue) const { return queue.current >= 0 || !queue.frames.empty(); }
  uint64_t urgency(const Queue& queue);
  double piece_of(const Queue& queue) const;
  void place(int connection);
  int choose(Host& host);
  void write(int connection);
  bool egress_is_full(int number);

  const Sender rules_;
  const double segment_bytes_;
  EventQueue& events_;
  Network& network_;
  Frames& frames_;
  std::vector<Queue> queues_;
  std::vector<Host> hosts_;
  uint64_t next_order_ = 0;
};

}  // namespace p3::simulator
