// The switch of a lab, and all links to it: carries frames from host to host as fast, as late and as surely as the links'
// table says, on any kernel that has TAP devices.
//
// A host's `eth0` is a TAP device. A packet passes up the link of its sender, then down that of its receiver, each a
// Direction: its turn, a bounded queue, a delay, losses. ARP is never lost: no real path has it from end to end.
// Threads: one.
#pragma once

#include <poll.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "relay/direction.h"
#include "relay/frame.h"
#include "relay/table.h"

namespace p3::relay {

class Relay {
 public:
  // Makes the hosts' cards. `spaces`: the network namespaces of the hosts, and the one where the relay stays. Throws
  // std::system_error.
  Relay(const std::string& table, const std::vector<std::string>& spaces);
  ~Relay();
  Relay(const Relay&) = delete;
  Relay& operator=(const Relay&) = delete;

  // Until the process ends; or all cards are gone.
  void run();

 private:
  enum class Place : uint8_t { kSwitch, kHost };  // where a packet is then

  struct Event {
    int64_t time;
    uint64_t order;
    std::shared_ptr<const Frame> frame;
    int32_t packet;
    uint16_t host;  // that it comes from, or goes to
    Place place;
  };

  struct Host {
    HostRecord& record;
    Direction up, down;
    // What is handed over next: packets of one frame behind each other.
    std::shared_ptr<const Frame> frame = nullptr;
    int first = 0, count = 0;
  };

  bool wait(int64_t now);
  void take(size_t host);
  void deliver(int64_t now);
  void at_switch(const Event& event);
  void at_host(Event& event, int64_t now);
  void go_down(const Event& event, size_t host);
  void hand_over(size_t host);
  void at(int64_t time, Place place, std::shared_ptr<const Frame> frame, int packet, size_t host);
  Event next();
  static bool is_later(const Event& one, const Event& other);

  Table table_;
  std::vector<Host> hosts_;
  std::vector<pollfd> cards_;  // of each host
  std::vector<char> incoming_;
  std::vector<uint8_t> outgoing_;
  std::vector<Event> events_;  // a heap, the earliest first
  uint64_t count_ = 0;
};

}  // namespace p3::relay
