// Hosts' links and the TCP connections over them: what is written to a socket arrives at the other end, in order, when
// the window, the congestion control and the queues on the way let it.
//
// A connection is one direction of one between two processes. Its segments pass the sender's uplink, the delay and the
// receiver's downlink; their acknowledgements the same the other way. A segment that is lost by chance, or for which the
// downlink has no room, is sent again once its sender has noticed: a round trip later if others follow it, else after a pause. One for which the
// uplink has none was never sent: as in Linux it stays in its socket.
// Units: bytes without the headers of packets, seconds. Threads: none.
#pragma once

#include <cstdint>
#include <memory>
#include <random>
#include <vector>

#include "simulator/congestion.h"
#include "simulator/event_queue.h"
#include "simulator/job.h"
#include "simulator/link.h"

namespace p3::simulator {

class Network {
 public:
  class Listener {
   public:
    virtual ~Listener() = default;
    virtual void delivered(int connection, int frame) = 0;  // the last byte of a frame has arrived
    virtual void acknowledged(int connection) = 0;          // fewer bytes of it are under way
    // A segment of a frame takes this time of a host's link.
    virtual void passed(Span::Kind /*link*/, int /*host*/, int /*frame*/, double /*begin*/, double /*end*/) {}
  };

  Network(const Job& job, EventQueue& events, Listener& listener);

  // The number of a new connection, from 0. What its own host drops is tried again at the next acknowledgement; where none
  // is to come, after `retry_s`; 0: as Linux does, after 0.2 s and then after 0.5 s.
  int connect(int from_host, int to_host, double retry_s = 0);
  int source(int connection) const { return of(connection).from; }
  int sink(int connection) const { return of(connection).to; }

  // Adds bytes of a frame to the socket. Whether it has room is for the caller to know.
  void write(int connection, int frame, double bytes, bool ends_frame);
  // Written and not acknowledged.
  double under_way(int connection) const { return of(connection).under_way; }

  Link& up(int host) { return up_[static_cast<size_t>(host)]; }
  Link& down(int host) { return down_[static_cast<size_t>(host)]; }

  // An event of a segment, an acknowledgement or a connection.
  void handle(const Event& event);

 private:
  static constexpr int kNone = -1;

  struct Segment {
    int connection = 0;
    int frame = 0;
    double bytes = 0;
    uint64_t number = 0;  // in its connection
    bool ends_frame = false;
    bool is_again = false;
    int next = kNone;  // behind it in its socket, or among the free ones
    double sent_at = 0, delivered_then = 0, delivered_at_then = 0;
    double frees = 0;  // as an acknowledgement: of what is under way
  };

  struct Early {  // arrived before another that was lost
    uint64_t number;
    int frame;
    double bytes;
    bool ends_frame;
  };

  struct Connection {
    int from = 0, to = 0;
    double under_way = 0;
    double in_flight = 0;
    int first_unsent = kNone, last_unsent = kNone;
    uint64_t written = 0, expected = 0;  // numbers of segments
    std::vector<Early> early;
    std::unique_ptr<CongestionControl> control;
    double next_departure = 0;
    double retry_s = 0;
    bool waits_for_pace = false, waits_to_retry = false;
    double delivered = 0, delivered_at = 0;
  };

  Connection& of(int connection) { return connections_[static_cast<size_t>(connection)]; }
  const Connection& of(int connection) const { return connections_[static_cast<size_t>(connection)]; }
  Segment& segment(int number) { return segments_[static_cast<size_t>(number)]; }
  // Of a host's links, in the queue of events.
  static int up_lane(int host) { return 2 * host; }
  static int down_lane(int host) { return 2 * host + 1; }
  double on_wire(double bytes) const { return bytes * wire_share_; }

  int take_segment();
  void send(int connection, double retry_s);
  bool may_send(int connection);
  bool enter_uplink(int number);
  void enter_downlink(int number);
  bool is_lost_by_chance(double bytes);
  void report(Span::Kind kind, int host, const Link& link, const Segment& segment);
  void lose(int number);
  void arrive(int number);
  void acknowledge(int number);
  void pass_acknowledgement(Link& link, int lane, double delay_s, EventKind next, int connection, int number);
  void on_acknowledgement(int number);

  const Transport transport_;
  const double wire_share_;
  EventQueue& events_;
  Listener& listener_;
  std::mt19937_64 random_;
  std::vector<Link> up_, down_;
  std::vector<Connection> connections_;
  std::vector<Segment> segments_;
  int free_ = kNone;
};

}  // namespace p3::simulator
