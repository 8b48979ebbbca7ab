#include "simulator/network.h"

#include <algorithm>
#include <cmath>

namespace p3::simulator {
namespace {

// Between a lost segment's turn to arrive and its sender's knowledge, besides a round trip.
constexpr double kNotice_s = 1e-3;
constexpr double kLeastProbe_s = 10e-3;  // where nothing follows that could tell
// A segment that the own host drops stays in its socket, and is tried again at the next acknowledgement; where none is
// to come, after this, and then again after that.
constexpr double kFirstRetry_s = 0.2;
constexpr double kNextRetry_s = 0.5;

}  // namespace

Network::Network(const Job& job, EventQueue& events, Listener& listener)
    : transport_(job.transport),
      wire_share_(1 + job.transport.packet_header_bytes / job.transport.packet_payload_bytes),
      events_(events),
      listener_(listener),
      random_(job.transport.seed) {
  events_.set_lanes(2 * job.hosts.size());
  for (const Host& host : job.hosts) {
    up_.emplace_back(host.up);
    down_.emplace_back(host.down);
  }
}

int Network::connect(int from_host, int to_host, double retry_s) {
  connections_.emplace_back();
  connections_.back().from = from_host;
  connections_.back().to = to_host;
  connections_.back().retry_s = retry_s;
  connections_.back().control = CongestionControl::make(transport_.congestion, transport_.packet_payload_bytes);
  return static_cast<int>(connections_.size()) - 1;
}

int Network::take_segment() {
  if (free_ == kNone) {
    segments_.emplace_back();
    return static_cast<int>(segments_.size()) - 1;
  }
  const int number = free_;
  free_ = segment(number).next;
  segment(number) = {};
  return number;
}

void Network::write(int connection, int frame, double bytes, bool ends_frame) {
  while (bytes > 0) {
    const double now = std::min(bytes, transport_.segment_bytes);
    bytes -= now;
    const int number = take_segment();
    Connection& c = of(connection);
    Segment& s = segment(number);
    s.connection = connection;
    s.frame = frame;
    s.bytes = now;
    s.ends_frame = ends_frame && bytes <= 0;
    s.number = c.written++;
    (c.last_unsent == kNone ? c.first_unsent : segment(c.last_unsent).next) = number;
    c.last_unsent = number;
    c.under_way += now;
  }
  send(connection, kFirstRetry_s);
}

bool Network::may_send(int connection) {
  Connection& c = of(connection);
  if (c.first_unsent == kNone) return false;
  if (c.control == nullptr) return true;
  const double bytes = segment(c.first_unsent).bytes;
  if (c.in_flight > 0 && c.in_flight + bytes > c.control->window()) return false;
  if (c.next_departure <= events_.now()) return true;
  if (!c.waits_for_pace) events_.at(c.next_departure, EventKind::kPaceReached, connection);
  c.waits_for_pace = true;
  return false;
}

void Network::send(int connection, double retry_s) {
  while (may_send(connection)) {
    Connection& c = of(connection);
    const int number = c.first_unsent;
    Segment& s = segment(number);
    if (!enter_uplink(number)) {
      if (c.control != nullptr) c.control->on_loss(events_.now(), c.delivered);
      if (c.in_flight > 0 || c.waits_to_retry) return;
      events_.at(events_.now() + (c.retry_s > 0 ? c.retry_s : retry_s), EventKind::kRetry, connection);
      c.waits_to_retry = true;
      return;
    }
    c.first_unsent = s.next;
    if (c.first_unsent == kNone) c.last_unsent = kNone;
    if (c.control != nullptr)
      c.next_departure = std::max(c.next_departure, events_.now()) + s.bytes / c.control->bytes_per_s();
    if (c.in_flight <= 0) c.delivered_at = events_.now();  // a pause does not count as slow delivery
    c.in_flight += s.bytes;
    s.sent_at = events_.now();
    s.delivered_then = c.delivered;
    s.delivered_at_then = c.delivered_at;
  }
}

// False: there is no room for it.
bool Network::enter_uplink(int number) {
  const Segment& s = segment(number);
  const int host = of(s.connection).from;
  const double passed = up(host).pass(events_.now(), on_wire(s.bytes));
  if (passed < 0) return false;
  report(Span::kUp, host, up(host), s);
  events_.in_lane(up_lane(host), passed + transport_.delay_s, EventKind::kAtDownlink, s.connection, number);
  return true;
}

void Network::enter_downlink(int number) {
  const Segment& s = segment(number);
  if (is_lost_by_chance(s.bytes)) return lose(number);
  const int host = of(s.connection).to;
  const double passed = down(host).pass(events_.now(), on_wire(s.bytes));
  if (passed < 0) return lose(number);
  report(Span::kDown, host, down(host), s);
  events_.in_lane(down_lane(host), passed, EventKind::kArrived, s.connection, number);
}

// A segment is sent again whole, though mostly one of its packets alone is lost.
bool Network::is_lost_by_chance(double bytes) {
  if (transport_.loss == 0) return false;
  const double packets = std::ceil(bytes / transport_.packet_payload_bytes);
  return std::bernoulli_distribution(1 - std::pow(1 - transport_.loss, packets))(random_);
}

void Network::report(Span::Kind kind, int host, const Link& link, const Segment& segment) {
  listener_.passed(kind, host, segment.frame, link.taken_from(on_wire(segment.bytes)), link.taken_until());
}

void Network::lose(int number) {
  Segment& s = segment(number);
  const Connection& c = of(s.connection);
  const double now = events_.now();
  const double round_trip_s = up(c.from).waiting_s(now) + down(c.to).waiting_s(now) + 2 * transport_.delay_s;
  const bool is_last = c.in_flight <= s.bytes;
  s.is_again = true;
  const double notice_s = is_last ? std::max(2 * round_trip_s, kLeastProbe_s) : round_trip_s + kNotice_s;
  events_.at(now + notice_s, EventKind::kLossNoticed, s.connection, number);
}

void Network::arrive(int number) {
  Segment& s = segment(number);
  const int connection = s.connection;
  Connection& c = of(connection);
  if (s.number != c.expected) {
    c.early.push_back({s.number, s.frame, s.bytes, s.ends_frame});
    return acknowledge(number);
  }
  std::vector<int> complete;
  s.frees = s.bytes;
  ++c.expected;
  if (s.ends_frame) complete.push_back(s.frame);
  while (!c.early.empty()) {
    const auto next =
        std::find_if(c.early.begin(), c.early.end(), [&c](const Early& one) { return one.number == c.expected; });
    if (next == c.early.end()) break;
    s.frees += next->bytes;
    ++c.expected;
    if (next->ends_frame) complete.push_back(next->frame);
    c.early.erase(next);
  }
  acknowledge(number);
  for (int frame : complete) listener_.delivered(connection, frame);
}

void Network::acknowledge(int number) {
  const int connection = segment(number).connection;
  if (transport_.ack_bytes <= 0) {
    events_.at(events_.now() + transport_.delay_s, EventKind::kAckArrived, connection, number);
    return;
  }
  const int host = of(connection).to;
  pass_acknowledgement(up(host), up_lane(host), transport_.delay_s, EventKind::kAckAtDownlink, connection, number);
}

// One that finds no room is made up for by the next: as good as one that has passed, at once.
void Network::pass_acknowledgement(Link& link, int lane, double delay_s, EventKind next, int connection, int number) {
  const double passed = link.pass(events_.now(), transport_.ack_bytes);
  if (passed < 0)
    events_.at(events_.now() + delay_s, next, connection, number);
  else
    events_.in_lane(lane, passed + delay_s, next, connection, number);
}

void Network::on_acknowledgement(int number) {
  const Segment s = segment(number);
  segment(number).next = free_;
  free_ = number;
  Connection& c = of(s.connection);
  c.in_flight -= s.bytes;
  c.under_way -= s.frees;
  c.delivered += s.bytes;
  c.delivered_at = events_.now();
  if (c.control != nullptr) {
    const double now = events_.now();
    // What was sent again would tell a round trip that nobody has seen.
    if (!s.is_again)
      c.control->on_ack(
          {now, s.bytes, now - s.sent_at, c.in_flight, c.delivered, s.delivered_then, now - s.delivered_at_then});
  }
  send(s.connection, kFirstRetry_s);
  listener_.acknowledged(s.connection);
}

void Network::handle(const Event& event) {
  const int number = event.what;
  switch (event.kind) {
    case EventKind::kAtDownlink:
      return enter_downlink(number);
    case EventKind::kArrived:
      return arrive(number);
    case EventKind::kAckAtDownlink: {
      const int host = of(event.subject).from;
      return pass_acknowledgement(down(host), down_lane(host), 0, EventKind::kAckArrived, event.subject, number);
    }
    case EventKind::kAckArrived:
      return on_acknowledgement(number);
    case EventKind::kLossNoticed:
      if (of(event.subject).control != nullptr)
        of(event.subject).control->on_loss(event.time, of(event.subject).delivered);
      if (!enter_uplink(number)) lose(number);
      return;
    case EventKind::kRetry:
      of(event.subject).waits_to_retry = false;
      return send(event.subject, kNextRetry_s);
    case EventKind::kPaceReached:
      of(event.subject).waits_for_pace = false;
      return send(event.subject, kFirstRetry_s);
    default:
      return;
  }
}

}  // namespace p3::simulator
