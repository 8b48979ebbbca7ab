#include "relay/relay.h"

#include <poll.h>
#include <sched.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "relay/failure.h"
#include "relay/tap.h"

namespace p3::relay {
namespace {

// No more often than that are packets handed over that come one by one: as a card interrupts its host.
constexpr int64_t kTick = 100'000;
constexpr int64_t kSecond = 1'000'000'000;
constexpr int kFramesInTurn = 64;  // of one host, before the others'

int64_t clock_now() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return int64_t{now.tv_sec} * kSecond + now.tv_nsec;
}

// A link does not wait for a processor. What may not be had is done without.
void be_punctual() {
  prctl(PR_SET_TIMERSLACK, 1UL, 0UL, 0UL, 0UL);
  setpriority(PRIO_PROCESS, 0, -20);
}

}  // namespace

Relay::Relay(const std::string& table, const std::vector<std::string>& spaces)
    : table_(table), incoming_(Frame::kMostBytes) {
  for (int host = 0; host < table_.hosts(); ++host) {
    enter(spaces[static_cast<size_t>(host)]);
    HostRecord& record = table_[host];
    hosts_.push_back({record, Direction(record.up), Direction(record.down)});
    cards_.push_back({open_tap(host), POLLIN, 0});
  }
  enter(spaces.back());
}

Relay::~Relay() {
  for (const pollfd& card : cards_) close(card.fd);
}

void Relay::run() {
  be_punctual();
  for (int64_t now = clock_now(); wait(now);) {
    now = clock_now();
    deliver(now);
  }
}

// Until something is due or has come, which is taken. False: nothing ever will.
bool Relay::wait(int64_t now) {
  const int64_t left = events_.empty() ? 0 : std::max(events_.front().time - now, kTick);
  const timespec timeout{left / kSecond, left % kSecond};
  const int ready = ppoll(cards_.data(), cards_.size(), events_.empty() ? nullptr : &timeout, nullptr);
  if (ready < 0 && errno != EINTR) throw failure("waiting for frames");
  if (ready <= 0) return true;
  for (size_t host = 0; host < hosts_.size(); ++host) {
    if (cards_[host].revents & POLLIN) take(host);
    if (cards_[host].revents & (POLLERR | POLLNVAL)) cards_[host].fd = -1;  // taken away; poll ignores it
  }
  return std::any_of(cards_.begin(), cards_.end(), [](const pollfd& card) { return card.fd >= 0; });
}

void Relay::take(size_t host) {
  Host& from = hosts_[host];
  for (int i = 0; i < kFramesInTurn; ++i) {
    const ssize_t size = read(cards_[host].fd, incoming_.data(), incoming_.size());
    if (size <= 0) return;
    const auto frame = Frame::of(incoming_.data(), static_cast<size_t>(size));
    if (frame == nullptr || from.record.is_cut) continue;
    const int64_t now = clock_now();
    for (int packet = 0; packet < frame->packets(); ++packet)
      if (const auto time = from.up.pass(now, frame->bytes_of(packet), frame->is_ip()))
        at(*time, Place::kSwitch, frame, packet, host);
  }
}

// All that is due, each at its own time, however late it is now.
void Relay::deliver(int64_t now) {
  while (!events_.empty() && events_.front().time <= now) {
    Event event = next();
    if (event.place == Place::kSwitch)
      at_switch(event);
    else
      at_host(event, now);
  }
  for (size_t host = 0; host < hosts_.size(); ++host) hand_over(host);
}

void Relay::at_switch(const Event& event) {
  const uint8_t* address = event.frame->destination();
  const int one = host_of(address);
  if (one >= 0 && static_cast<size_t>(one) < hosts_.size()) go_down(event, static_cast<size_t>(one));
  if (!is_for_all(address)) return;
  for (size_t host = 0; host < hosts_.size(); ++host)
    if (host != event.host) go_down(event, host);
}

void Relay::go_down(const Event& event, size_t host) {
  Host& to = hosts_[host];
  if (to.record.is_cut) return;
  if (const auto time = to.down.pass(event.time, event.frame->bytes_of(event.packet), event.frame->is_ip()))
    at(*time, Place::kHost, event.frame, event.packet, host);
}

void Relay::at_host(Event& event, int64_t now) {
  Host& host = hosts_[event.host];
  const auto late = static_cast<uint64_t>(now - event.time);
  if (late > host.record.late_ns) host.record.late_ns = late;
  if (host.frame == event.frame && host.first + host.count == event.packet) {
    ++host.count;
    return;
  }
  hand_over(event.host);
  host.frame = std::move(event.frame);
  host.first = event.packet;
  host.count = 1;
}

// A host whose card is down takes nothing; neither would a real one.
void Relay::hand_over(size_t host) {
  Host& to = hosts_[host];
  if (to.frame == nullptr) return;
  outgoing_.clear();
  to.frame->append_to(outgoing_, to.first, to.count);
  to.frame = nullptr;
  [[maybe_unused]] const ssize_t written = write(cards_[host].fd, outgoing_.data(), outgoing_.size());
}

void Relay::at(int64_t time, Place place, std::shared_ptr<const Frame> frame, int packet, size_t host) {
  events_.push_back({time, count_++, std::move(frame), packet, static_cast<uint16_t>(host), place});
  std::push_heap(events_.begin(), events_.end(), is_later);
}

bool Relay::is_later(const Event& one, const Event& other) {
  return one.time > other.time || (one.time == other.time && one.order > other.order);
}

Relay::Event Relay::next() {
  std::pop_heap(events_.begin(), events_.end(), is_later);
  Event event = std::move(events_.back());
  events_.pop_back();
  return event;
}

}  // namespace p3::relay
