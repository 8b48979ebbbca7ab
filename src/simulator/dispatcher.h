// P3's senders: which frame of a host is written to which socket, and when (struct Sender).
//
// Each connection has a queue of frames, most urgent first, above its socket. Whenever a socket has room, the most urgent
// frame that can move is written; among equals the connections of a host take turns. A socket that is full takes more
// when a third of it is free again, as the kernel has it. The processes of a host, which each have a sender, act as one:
// they differ in nothing that is modelled. So a worker's pushes and a server's values, which have connections of their own,
// share the host's link evenly, but for Sender::pushes_first.
// Threads: none.
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <tuple>
#include <utility>
#include <vector>

#include "simulator/event_queue.h"
#include "simulator/job.h"
#include "simulator/network.h"

namespace p3::simulator {

// What nodes send each other: a slice's push, its value, or a server's part of the norm.
struct Frame {
  static constexpr int kNorm = -1;

  uint64_t urgency = 0;  // less is sooner
  int slice = 0;         // or kNorm
  int round = 0;
  int machine = 0;  // whose push it is, or to whom it goes
  bool is_push = false;
  double bytes = 0, left = 0;  // in all, and not yet written
  double begun_at = 0;
};

// All frames under way. Everything else knows their numbers.
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

class Dispatcher {
 public:
  Dispatcher(const Sender& rules, int hosts, EventQueue& events, Network& network, Frames& frames);

  // Every connection of the network, in turn, before anything is queued.
  void add(int connection, double window_bytes);

  // A frame waits to leave. Call pump() when all that leave at once do. With Sender::pushes_first a push must be more
  // urgent than the values of its round.
  void queue(int connection, int frame);
  // Writes what can be written on a host.
  void pump(int host);
  // Fewer bytes are under way than before.
  void acknowledged(int connection);

 private:
  struct Waiting {
    uint64_t urgency;
    uint64_t order;
    int frame;
  };
  static bool goes_after(const Waiting& one, const Waiting& other) {
    return std::tie(one.urgency, one.order) > std::tie(other.urgency, other.order);
  }

  using Place = std::pair<uint64_t, int>;  // urgency, connection

  struct Queue {
    std::vector<Waiting> frames;  // a heap
    int current = -1;             // half written
    double window = 0;
    bool is_full = false;   // until a third of the window is free
    bool is_ready = false;  // and then its place
    Place ready_at;
  };

  struct Host {
    std::set<Place> ready;  // connections that have frames and room
    int written_last = -1;
    std::map<int, int> pushes;  // by round: those that are not yet written; for Sender::pushes_first
  };

  Queue& of(int connection) { return queues_[static_cast<size_t>(connection)]; }
  Host& host(int number) { return hosts_[static_cast<size_t>(number)]; }
  bool has_work(const Queue& queue) const { return queue.current >= 0 || !queue.frames.empty(); }
  uint64_t urgency(const Queue& queue);
  double piece_of(const Queue& queue) const;
  void place(int connection);
  int choose(Host& host);
  bool must_yield(const Host& host, int connection);
  void write(int connection);

  const Sender rules_;
  EventQueue& events_;
  Network& network_;
  Frames& frames_;
  std::vector<Queue> queues_;
  std::vector<Host> hosts_;
  uint64_t next_order_ = 0;
};

}  // namespace p3::simulator
