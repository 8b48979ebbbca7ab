#include "simulator/dispatcher.h"

#include <algorithm>

namespace p3::simulator {
namespace {

constexpr double kFullUntil = 2.0 / 3;  // of a send buffer: then the kernel says that it can be written to
// SocketStream writes up to a window at once. But here a piece passes each link as a whole, and in the lab, where the larger
// pieces have made no iteration longer, it does not.
constexpr double kLeastPiece = 8 << 10, kPiecesPerWindow = 4;  // or a whole window

}  // namespace

Dispatcher::Dispatcher(const Sender& rules, int hosts, EventQueue& events, Network& network, Frames& frames)
    : rules_(rules), events_(events), network_(network), frames_(frames), hosts_(static_cast<size_t>(hosts)) {}

void Dispatcher::add(int connection, double window_bytes) {
  queues_.resize(std::max(queues_.size(), static_cast<size_t>(connection) + 1));
  of(connection).window = window_bytes;
}

void Dispatcher::queue(int connection, int frame) {
  Queue& queue = of(connection);
  if (frames_[frame].is_push) ++host(network_.source(connection)).pushes[frames_[frame].round];
  queue.frames.push_back({frames_[frame].urgency, next_order_++, frame});
  std::push_heap(queue.frames.begin(), queue.frames.end(), goes_after);
  place(connection);
}

uint64_t Dispatcher::urgency(const Queue& queue) {
  return queue.current < 0 ? queue.frames.front().urgency : frames_[queue.current].urgency;
}

// Puts a connection where it now belongs among those of its host.
void Dispatcher::place(int connection) {
  Queue& queue = of(connection);
  Host& its_host = host(network_.source(connection));
  const bool is_ready = has_work(queue) && !queue.is_full;
  const Place at{is_ready ? urgency(queue) : 0, connection};
  if (queue.is_ready && !(is_ready && queue.ready_at == at)) its_host.ready.erase(queue.ready_at);
  if (is_ready && !(queue.is_ready && queue.ready_at == at)) its_host.ready.insert(at);
  queue.is_ready = is_ready;
  queue.ready_at = at;
}

void Dispatcher::pump(int number) {
  Host& its_host = host(number);
  while (!its_host.ready.empty()) {
    const int chosen = choose(its_host);
    if (rules_.pushes_first && must_yield(its_host, chosen)) return;  // a push's acknowledgement comes back to this
    its_host.written_last = chosen;
    write(chosen);
    place(chosen);
  }
}

// Of those that are most urgent, the next after the last that was written to.
int Dispatcher::choose(Host& its_host) {
  const auto& [urgency, connection] = *its_host.ready.begin();
  const auto next = its_host.ready.upper_bound(Place{urgency, its_host.written_last});
  return next == its_host.ready.end() || next->first != urgency ? connection : next->second;
}

bool Dispatcher::must_yield(const Host& its_host, int connection) {
  const Queue& queue = of(connection);
  const Frame& next = frames_[queue.current >= 0 ? queue.current : queue.frames.front().frame];
  const bool is_value = !next.is_push && next.slice != Frame::kNorm;
  return is_value && !its_host.pushes.empty() && its_host.pushes.begin()->first <= next.round;
}

// As much of the most urgent frame as the socket takes.
void Dispatcher::write(int connection) {
  Queue& queue = of(connection);
  if (queue.current < 0) {
    std::pop_heap(queue.frames.begin(), queue.frames.end(), goes_after);
    queue.current = queue.frames.back().frame;
    queue.frames.pop_back();
    frames_[queue.current].begun_at = events_.now();
  }
  Frame& frame = frames_[queue.current];
  do {
    if (network_.under_way(connection) >= queue.window) {
      queue.is_full = true;
      return;
    }
    const double bytes = std::min(piece_of(queue), frame.left);
    frame.left -= bytes;
    network_.write(connection, queue.current, bytes, frame.left <= 0);
  } while (frame.left > 0);
  queue.current = -1;
  if (!frame.is_push) return;
  auto& pushes = host(network_.source(connection)).pushes;
  const auto of_round = pushes.find(frame.round);
  if (--of_round->second == 0) pushes.erase(of_round);
}

double Dispatcher::piece_of(const Queue& queue) const {
  if (rules_.write_bytes > 0) return rules_.write_bytes;
  return std::max(std::min(kLeastPiece, queue.window), queue.window / kPiecesPerWindow);
}

void Dispatcher::acknowledged(int connection) {
  Queue& queue = of(connection);
  if (!queue.is_full || network_.under_way(connection) > kFullUntil * queue.window) return;
  queue.is_full = false;
  if (!has_work(queue)) return;
  place(connection);
  pump(network_.source(connection));
}

}  // namespace p3::simulator
