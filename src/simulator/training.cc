#include "simulator/training.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <map>
#include <stdexcept>
#include <utility>

#include "p3/socket_stream.h"

namespace p3::simulator {

Training::Training(const Job& job)
    : job_(job),
      network_(job_, events_, *this),
      dispatcher_(job_.sender, static_cast<int>(job_.hosts.size()), events_, network_, frames_),
      machine_on_(job_.hosts.size(), -1),
      slices_of_(job_.layers.size()) {
  const size_t layers = job_.layers.size();
  for (size_t number = 0; number < job_.slices.size(); ++number)
    slices_of_[static_cast<size_t>(job_.slices[number].layer)].push_back(static_cast<int>(number));
  for (int host : job_.workers) {
    int& number = machine_on_[static_cast<size_t>(host)];
    if (number < 0 || !job_.local_aggregation) {
      number = static_cast<int>(machines_.size());
      machines_.push_back({host, {}, {}, 0});
    }
    machine(number).workers.push_back(static_cast<int>(workers_.size()));
    workers_.emplace_back();
    workers_.back().machine = number;
    for (std::vector<int>& missing : workers_.back().missing) missing.assign(layers, 0);
  }
  prepare_leaders();
  result_.ends_s.resize(workers_.size());
  result_.waited_s.assign(workers_.size(), std::vector<double>(layers, 0));
  result_.waited_to_clip_s.assign(workers_.size(), 0);
  prepare_clipping();
  running_ = warming_up_ = static_cast<int>(workers_.size());
  connect();
}

void Training::prepare_leaders() {
  pushers_.resize(job_.servers.size());
  if (!job_.leaders.empty()) led_.resize(machines_.size() * job_.servers.size());
  for (int m = 0; m < static_cast<int>(machines_.size()); ++m)
    for (int server = 0; server < static_cast<int>(job_.servers.size()); ++server) {
      const int its = leader(m, server);
      (its == Job::kServer ? pushers_[static_cast<size_t>(server)] : led_[pair(its, server)]).push_back(m);
    }
  for (int s = 0; s < static_cast<int>(job_.slices.size()); ++s) {
    unpushed_.push_back(pushes(s));
    for (int m = 0; m < static_cast<int>(machines_.size()); ++m) machine(m).unready.push_back(needed(m, s));
  }
}

// Or Job::kServer.
int Training::leader(int number, int server) const {
  if (job_.leaders.empty()) return Job::kServer;
  const auto& leaders = job_.leaders[static_cast<size_t>(server)];
  const int host = leaders[static_cast<size_t>(machines_[static_cast<size_t>(number)].host)];
  return host == Job::kServer ? Job::kServer : machine_on_[static_cast<size_t>(host)];
}

const std::vector<int>& Training::led(int number, int server) const {
  static const std::vector<int> kNobody;
  return led_.empty() ? kNobody : led_[pair(number, server)];
}

// What a machine adds up before it pushes a slice.
int Training::needed(int number, int its_slice) const {
  if (slice(its_slice).part_of != Slice::kOfAll) return 1;
  const auto& workers = machines_[static_cast<size_t>(number)].workers;
  return static_cast<int>(workers.size() + led(number, slice(its_slice).server).size());
}

// That make it complete.
int Training::pushes(int number) const {
  const Slice& its = slice(number);
  return its.part_of == Slice::kOfAll ? static_cast<int>(pushers_[static_cast<size_t>(its.server)].size()) : 1;
}

// Whether its value comes to a machine: a worker's part is there already.
bool Training::awaits(int number, int its_slice) const {
  const int worker = slice(its_slice).part_of;
  return worker == Slice::kOfAll || workers_[static_cast<size_t>(worker)].machine != number;
}

void Training::prepare_clipping() {
  slices_on_.assign(job_.servers.size(), 0);
  summed_ = slices_on_;
  for (const Slice& one : job_.slices) ++slices_on_[static_cast<size_t>(one.server)];
  if (job_.clipping == Clipping::kWait) {
    clips_before_ = 0;
    for (int m = 0; m < static_cast<int>(machines_.size()); ++m)
      for (int s = 0; s < static_cast<int>(job_.slices.size()); ++s) machine(m).needed_to_clip += awaits(m, s);
  } else if (job_.clipping == Clipping::kNorm) {
    const auto first = std::find_if(slices_of_.begin(), slices_of_.end(), [](const auto& all) { return !all.empty(); });
    clips_before_ = static_cast<int>(first - slices_of_.begin());
    const auto tell = std::count_if(slices_on_.begin(), slices_on_.end(), [](int n) { return n > 0; });
    for (Machine& one : machines_) one.needed_to_clip = static_cast<int>(tell);
  }
}

// Only what a slice will cross. But the window is that of a job whose connections are all there, and which has agreed on
// the greatest number that leaves a host.
void Training::connect() {
  const int servers = static_cast<int>(job_.servers.size()), machines = static_cast<int>(machines_.size());
  ways_.assign(machines_.size() * job_.servers.size(), kNoWay);
  std::vector<std::pair<int, int>> ends;  // of each way: hosts
  std::vector<uint64_t> leaving(job_.hosts.size(), 0);
  for (int m = 0; m < machines; ++m) {
    std::map<int, int> ways_to;  // machines, and behind those servers
    for (int server = 0; server < servers; ++server) {
      const int its_leader = leader(m, server);
      const int here = machine(m).host;
      const int there = its_leader == Job::kServer ? server_host(server) : machine(its_leader).host;
      if (here == there) continue;
      const auto [known, is_new] =
          ways_to.try_emplace(its_leader == Job::kServer ? machines + server : its_leader, kNoWay);
      if (is_new) {
        ++leaving[static_cast<size_t>(here)];
        ++leaving[static_cast<size_t>(there)];
      }
      if (slices_on_[static_cast<size_t>(server)] == 0) continue;
      if (known->second == kNoWay) {
        known->second = static_cast<int>(ends.size());
        ends.emplace_back(here, there);
      }
      way(m, server) = known->second;
    }
  }
  result_.window_bytes = window(*std::max_element(leaving.begin(), leaving.end()));
  const bool are_many = SocketStream::are_many(static_cast<uint64_t>(result_.window_bytes));
  const double retry_s = are_many ? std::chrono::duration<double>(Stream::kTryAgainAfter).count() : 0;
  for (const auto& [here, there] : ends) {  // in the order of push_connection() and value_connection()
    dispatcher_.add(network_.connect(here, there, retry_s), result_.window_bytes);
    dispatcher_.add(network_.connect(there, here, retry_s), result_.window_bytes);
  }
  if (job_.clipping == Clipping::kNorm) connect_norms();
}

// Straight from each server: of machines that push to a leader, on connections that carry nothing else.
void Training::connect_norms() {
  norm_connections_.assign(ways_.size(), kNoWay);
  for (int m = 0; m < static_cast<int>(machines_.size()); ++m)
    for (int server = 0; server < static_cast<int>(job_.servers.size()); ++server) {
      int& connection = norm_connections_[pair(m, server)];
      if (slices_on_[static_cast<size_t>(server)] == 0 || server_host(server) == machine(m).host) continue;
      if (leader(m, server) == Job::kServer) {
        connection = value_connection(way(m, server));
      } else {
        connection = network_.connect(server_host(server), machine(m).host);
        dispatcher_.add(connection, result_.window_bytes);
      }
    }
}

// What SocketStream allows a connection of a job that has agreed on the greatest of its links' rates.
double Training::window(uint64_t connections) const {
  if (job_.sender.window_bytes > 0) return job_.sender.window_bytes;
  LinkShare link;
  link.connections = connections;
  for (const Host& host : job_.hosts)
    link.bytes_per_second = std::max(link.bytes_per_second, static_cast<uint64_t>(host.up.bytes_per_s));
  const auto round_trip_us = static_cast<uint32_t>(std::lround(2e6 * job_.transport.delay_s));
  return static_cast<double>(SocketStream::bytes_under_way(link, round_trip_us));
}

Result Training::run() {
  for (int number = 0; number < static_cast<int>(workers_.size()); ++number) begin_forward(number, 0);
  while (running_ > 0) {
    if (events_.empty()) throw std::logic_error("the simulated job stands still");
    const Event event = events_.pop();
    if (event.kind == EventKind::kStepDone)
      step_done(event.subject, event.what);
    else
      network_.handle(event);
  }
  for (int host = 0; host < static_cast<int>(job_.hosts.size()); ++host) {
    result_.up.push_back(network_.up(host).use());
    result_.down.push_back(network_.down(host).use());
  }
  result_.events = events_.count();
  return std::move(result_);
}

double Training::factor(int number) const {
  const auto& factors = job_.factors[static_cast<size_t>(number)];
  return factors[static_cast<size_t>(workers_[static_cast<size_t>(number)].iteration)];
}

// After the last layer comes the backward pass. Steps of that are told by the complement of the layer's number.
void Training::begin_forward(int number, int layer) {
  Worker& one = worker(number);
  if (layer == static_cast<int>(job_.layers.size())) return begin_backward(number, layer - 1);
  const int last_round = one.iteration - 1;
  if (layer == clips_before_ && one.missing_to_clip[parity(last_round)] > 0) return wait(number, Span::kForClipping);
  if (missing(one, layer, last_round) > 0) return wait(number, layer);
  const double seconds = job_.layers[static_cast<size_t>(layer)].forward_s * factor(number);
  if (is_traced(one.iteration))
    result_.spans.push_back({Span::kForward, number, -1, layer, one.iteration, events_.now(), events_.now() + seconds});
  events_.at(events_.now() + seconds, EventKind::kStepDone, number, layer);
}

void Training::wait(int number, int layer) {
  worker(number).waits_for = layer;
  worker(number).waits_since = events_.now();
}

void Training::go_on_if_all_is_there(int number) {
  Worker& one = worker(number);
  const bool clips = one.waits_for == Span::kForClipping;
  if (one.waits_for == kNothing) return;
  const int last_round = one.iteration - 1;
  if ((clips ? one.missing_to_clip[parity(last_round)] : missing(one, one.waits_for, last_round)) > 0) return;
  const int layer = std::exchange(one.waits_for, kNothing);
  const auto w = static_cast<size_t>(number);
  if (one.iteration >= job_.warmup)
    (clips ? result_.waited_to_clip_s[w] : result_.waited_s[w][static_cast<size_t>(layer)]) +=
        events_.now() - one.waits_since;
  if (is_traced(one.iteration) && events_.now() > one.waits_since)
    result_.spans.push_back({Span::kWait, number, -1, layer, one.iteration, one.waits_since, events_.now()});
  begin_forward(number, clips ? clips_before_ : layer);
}

void Training::begin_backward(int number, int layer) {
  Worker& one = worker(number);
  if (layer + 1 == static_cast<int>(job_.layers.size()))
    one.missing_to_clip[parity(one.iteration)] += machine(one.machine).needed_to_clip;
  const double seconds = job_.layers[static_cast<size_t>(layer)].backward_s * factor(number);
  if (is_traced(one.iteration))
    result_.spans.push_back(
        {Span::kBackward, number, -1, layer, one.iteration, events_.now(), events_.now() + seconds});
  events_.at(events_.now() + seconds, EventKind::kStepDone, number, ~layer);
}

void Training::step_done(int number, int layer) {
  if (layer >= 0) return begin_forward(number, layer + 1);
  if (!job_.releases_at_end) release(number, ~layer);
  if (~layer > 0) return begin_backward(number, ~layer - 1);
  for (int late = 0; job_.releases_at_end && late < static_cast<int>(job_.layers.size()); ++late) release(number, late);
  Worker& one = worker(number);
  result_.ends_s[static_cast<size_t>(number)].push_back(events_.now());
  ++one.iteration;
  if (one.iteration == job_.warmup && --warming_up_ == 0) leave_warmup();
  if (one.iteration == job_.iterations())
    --running_;
  else
    begin_forward(number, 0);
}

void Training::leave_warmup() {
  for (int host = 0; host < static_cast<int>(job_.hosts.size()); ++host) {
    network_.up(host).forget_use();
    network_.down(host).forget_use();
  }
}

// The layer's gradients are ready.
void Training::release(int number, int layer) {
  Worker& one = worker(number);
  const int round = one.iteration;
  const std::vector<int>& slices = slices_of_[static_cast<size_t>(layer)];
  for (int s : slices) missing(one, layer, round) += awaits(one.machine, s);
  for (int s : slices)
    if (slice(s).part_of == Slice::kOfAll || slice(s).part_of == number) add(one.machine, s, round);
  dispatcher_.pump(machine(one.machine).host);
}

// One of what a machine adds up of a slice is there. Its caller pumps.
void Training::add(int number, int its_slice, int round) {
  int& unready = machine(number).unready[static_cast<size_t>(its_slice)];
  if (--unready > 0) return;
  unready = needed(number, its_slice);
  const Slice& its = slice(its_slice);
  const int its_way = way(number, its.server);
  if (its_way == kNoWay) return pushed(its_slice, round);
  leave(push_connection(its_way),
        {urgency(round, its, true), its_slice, round, number, true, its.push_bytes, its.push_bytes, 0});
}

void Training::leave(int connection, const Frame& frame) { dispatcher_.queue(connection, frames_.add(frame)); }

// One of the pushes of a slice has come to its server.
void Training::pushed(int number, int round) {
  int& unpushed = unpushed_[static_cast<size_t>(number)];
  if (--unpushed > 0) return;
  const Slice& its = slice(number);
  const auto& pushers = pushers_[static_cast<size_t>(its.server)];
  unpushed = pushes(number);
  const int home = server_host(its.server);
  const bool tells_norm = has_summed_all(its.server) && job_.clipping == Clipping::kNorm;
  std::vector<int> here;
  for (int m : pushers) {
    if (!awaits(m, number)) continue;
    if (machine(m).host == home) {
      here.push_back(m);
      continue;
    }
    tell(m, number, round);
  }
  if (tells_norm) tell_norm(its.server, round);
  if (here.size() < pushers.size()) dispatcher_.pump(home);
  for (int m : here) {
    landed(m, number, round);
    if (tells_norm) norm_landed(m, round);
  }
}

// To machines of other hosts. Its caller pumps.
void Training::tell_norm(int server, int round) {
  for (int m = 0; m < static_cast<int>(machines_.size()); ++m)
    if (const int connection = norm_connections_[pair(m, server)]; connection != kNoWay)
      leave(connection, {norm_urgency(round), Frame::kNorm, round, m, false, job_.norm_bytes, job_.norm_bytes, 0});
}

// The value of a slice leaves to a machine. Its caller pumps.
void Training::tell(int number, int its_slice, int round) {
  const Slice& its = slice(its_slice);
  leave(value_connection(way(number, its.server)),
        {urgency(round, its, false), its_slice, round, number, false, its.value_bytes, its.value_bytes, 0});
}

// With the slice that it has just summed, of a round.
bool Training::has_summed_all(int server) {
  int& summed = summed_[static_cast<size_t>(server)];
  summed = (summed + 1) % slices_on_[static_cast<size_t>(server)];
  return summed == 0;
}

// A leader first passes on what has landed.
void Training::landed(int number, int its_slice, int round) {
  const auto& led_here = led(number, slice(its_slice).server);
  for (int m : led_here) tell(m, its_slice, round);
  if (!led_here.empty()) dispatcher_.pump(machine(number).host);
  const int layer = slice(its_slice).layer;
  for (int w : machine(number).workers) {
    --missing(worker(w), layer, round);
    if (job_.clipping == Clipping::kWait) --worker(w).missing_to_clip[parity(round)];
    go_on_if_all_is_there(w);
  }
}

void Training::norm_landed(int number, int round) {
  for (int w : machine(number).workers) {
    --worker(w).missing_to_clip[parity(round)];
    go_on_if_all_is_there(w);
  }
}

void Training::delivered(int connection, int frame) {
  const Frame its = frames_[frame];
  frames_.remove(frame);
  if (its.slice == Frame::kNorm) return norm_landed(its.machine, its.round);
  if (is_traced(its.round))
    result_.spans.push_back({its.is_push ? Span::kPush : Span::kValue, network_.source(connection),
                             network_.sink(connection), its.slice, its.round, its.begun_at, events_.now()});
  if (!its.is_push) return landed(its.machine, its.slice, its.round);
  const int its_leader = leader(its.machine, slice(its.slice).server);
  if (its_leader == Job::kServer) return pushed(its.slice, its.round);
  add(its_leader, its.slice, its.round);
  dispatcher_.pump(machine(its_leader).host);
}

void Training::passed(Span::Kind link, int host, int frame, double begin, double end) {
  if (!job_.traces_links || !is_traced(frames_[frame].round) || frames_[frame].slice == Frame::kNorm) return;
  result_.spans.push_back({link, host, -1, frames_[frame].slice, frames_[frame].round, begin, end});
}

// The round in the upper half, below it the key, from 1.
uint64_t Training::urgency(int round, const Slice& its, bool is_push) const {
  const uint64_t key = job_.sender.priorities ? static_cast<uint64_t>(its.key) : 0;
  const uint64_t yields = job_.sender.pushes_first && !is_push;
  return static_cast<uint64_t>(round) << 32 | yields << 31 | (key + 1);
}

uint64_t Training::norm_urgency(int round) { return static_cast<uint64_t>(round) << 32; }

Result simulate(const Job& job) {
  check(job);
  return Training(job).run();
}

}  // namespace p3::simulator
