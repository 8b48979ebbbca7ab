#include "simulator/dispatcher.h"

#include <algorithm>

#include "p3/socket_stream.h"

namespace p3::simulator {
namespace {

constexpr double kYieldingShare = 4;    // as SocketStream's
constexpr double kFullUntil = 2.0 / 3;  // of a send buffer: then the kernel says that it can be written to
constexpr double kMoment_s = 1e-9;      // so that a wake-up finds the queue drained, whatever was rounded

}  // namespace

Dispatcher::Dispatcher(const Sender& rules, double segment_bytes, int hosts, EventQueue& events, Network& network,
                       Frames& frames)
    : rules_(rules),
      segment_bytes_(segment_bytes),
      events_(events),
      network_(network),
      frames_(frames),
      hosts_(static_cast<size_t>(hosts)) {}

void Dispatcher::add(int connection, double window_bytes) {
  queues_.resize(std::max(queues_.size(), static_cast<size_t>(connection) + 1));
  of(connection).window = of(connection).bound = window_bytes;
}

void Dispatcher::queue(int connection, int frame) {
  Queue& queue = of(connection);
  queue.frames.push_back({frames_[frame].urgency, next_order_++, frame});
  std::push_heap(queue.frames.begin(), queue.frames.end(), goes_after);
  place(connection);
}

uint64_t Dispatcher::urgency(const Queue& queue) {
  if (queue.current < 0) return queue.frames.front().urgency;
  const uint64_t current = frames_[queue.current].urgency;
  if (!rules_.inherits || queue.frames.empty()) return current;
  return std::min(current, queue.frames.front().urgency);
}

// Puts a connection where it now belongs among those of its host.
void Dispatcher::place(int connection) {
  Queue& queue = of(connection);
  Host& its_host = host(network_.source(connection));
  const bool waits = has_work(queue);
  const uint64_t now = waits ? urgency(queue) : 0;
  if (rules_.yields) {
    const std::pair<uint64_t, int> at{now, connection};
    if (queue.is_waiting && !(waits && queue.waiting_at == at)) its_host.waiting.erase(queue.waiting_at);
    if (waits && !(queue.is_waiting && queue.waiting_at == at)) its_host.waiting.insert(at);
    queue.is_waiting = waits;
    queue.waiting_at = at;
  }
  const bool is_ready = waits && !queue.is_full;
  const Place at{now, rules_.least_under_way ? network_.under_way(connection) : 0, connection};
  if (queue.is_ready && !(is_ready && queue.ready_at == at)) its_host.ready.erase(queue.ready_at);
  if (is_ready && !(queue.is_ready && queue.ready_at == at)) its_host.ready.insert(at);
  queue.is_ready = is_ready;
  queue.ready_at = at;
}

void Dispatcher::pump(int number) {
  Host& its_host = host(number);
  while (!its_host.ready.empty() && !egress_is_full(number)) {
    const int chosen = choose(its_host);
    its_host.written_last = chosen;
    write(chosen);
    place(chosen);
  }
}

// Of those that are most urgent, and have the fewest bytes under way, the next after the last that was written to.
int Dispatcher::choose(Host& its_host) {
  const auto first = its_host.ready.begin();
  const auto& [urgency, under_way, connection] = *first;
  const auto next = its_host.ready.upper_bound(Place{urgency, under_way, its_host.written_last});
  if (next == its_host.ready.end() || std::get<0>(*next) != urgency || std::get<1>(*next) != under_way)
    return connection;
  return std::get<2>(*next);
}

bool Dispatcher::egress_is_full(int number) {
  if (rules_.egress_bytes <= 0) return false;
  Link& link = network_.up(number);
  if (link.waiting_bytes(events_.now()) < rules_.egress_bytes) return false;
  if (!host(number).wakes)
    events_.at(std::max(events_.now(), link.drained_to(rules_.egress_bytes)) + kMoment_s, EventKind::kEgressDrained,
               number);
  return host(number).wakes = true;
}

// As much of the most urgent frame as the socket takes; with a short egress queue one segment.
void Dispatcher::write(int connection) {
  Queue& queue = of(connection);
  if (queue.current < 0) {
    std::pop_heap(queue.frames.begin(), queue.frames.end(), goes_after);
    queue.current = queue.frames.back().frame;
    queue.frames.pop_back();
    frames_[queue.current].begun_at = events_.now();
  }
  const Host& its_host = host(network_.source(connection));
  const bool yields = rules_.yields && its_host.waiting.begin()->first < urgency(queue);
  queue.bound = yields ? queue.window / kYieldingShare : queue.window;
  Frame& frame = frames_[queue.current];
  do {
    if (network_.under_way(connection) >= queue.bound) {
      queue.is_full = true;
      return;
    }
    const double most = rules_.egress_bytes > 0 ? segment_bytes_ : piece_of(queue);
    const double bytes = std::min(most, frame.left);
    frame.left -= bytes;
    network_.write(connection, queue.current, bytes, frame.left <= 0);
  } while (frame.left > 0 && rules_.egress_bytes <= 0);
  if (frame.left <= 0) queue.current = -1;
}

double Dispatcher::piece_of(const Queue& queue) const {
  if (rules_.write_bytes > 0) return rules_.write_bytes;
  return static_cast<double>(SocketStream::piece_of(static_cast<uint64_t>(queue.bound)));
}

void Dispatcher::acknowledged(int connection) {
  Queue& queue = of(connection);
  const bool was_full = queue.is_full;
  if (was_full && network_.under_way(connection) <= kFullUntil * queue.bound) queue.is_full = false;
  if (!has_work(queue) || queue.is_full) return;
  if (was_full || rules_.least_under_way) place(connection);
  if (was_full) pump(network_.source(connection));
}

void Dispatcher::drained(int number) {
  host(number).wakes = false;
  pump(number);
}

}  // namespace p3::simulator
