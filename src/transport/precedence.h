// Pushes before values, on the link of a machine whose worker and server are two processes.
//
// Where gradients are clipped by their global norm, nobody can use a value before the last push of its round has been
// summed. So a worker tells the servers of its machine while pushes of a round wait for the link, and they keep back values
// of that round and later ones that go to other machines. So does a worker itself with those that it passes on to its group.
// Values of rounds before, the norm, and all else go on.
//
// Whether pushes wait is known to who writes: a socket has taken less than was offered. So where the link keeps up, nothing
// is told, and nothing kept back.
// Threads: none of its own; the Transport's lock.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <optional>

#include "p3/wire.h"

namespace p3 {

// A worker's pushes that are to leave its machine.
class WaitingPushes {
 public:
  void queued(uint64_t round) { ++count_[round]; }
  void left(uint64_t round) {
    const auto found = count_.find(round);
    if (found != count_.end() && --found->second == 0) count_.erase(found);
  }

  // What is to be told now, if that is something new. `blocked`: the round of a push that the link has not taken.
  std::optional<Header> news(std::optional<uint64_t> blocked = {}) {
    const uint64_t oldest = count_.empty() ? kNone : count_.begin()->first;
    if (told_ == oldest || (told_ == kNone && !blocked)) return {};
    Header header;
    header.kind = FrameKind::kYield;
    header.round = oldest == kNone ? told_ : oldest;
    header.part = oldest != kNone;
    told_ = oldest;
    return header;
  }

 private:
  static constexpr uint64_t kNone = 0;  // rounds with pushes are counted from 1

  std::map<uint64_t, uint64_t> count_;  // by round
  uint64_t told_ = kNone;
};

// What the workers of its machine have told a server, by van, or a worker itself.
class Precedence {
 public:
  static constexpr int kItself = -1;  // in place of a van

  void told(int van, const Header& header) {
    if (header.part != 0)
      rounds_[van] = header.round;
    else
      rounds_.erase(van);
    note();
  }
  void gone(int van) {
    rounds_.erase(van);
    note();
  }
  bool holds_back(uint64_t round) const { return first_ && !is_over_ && round >= *first_; }
  // This node leaves: from here on nothing is kept back.
  void end() { is_over_ = true; }

 private:
  void note() {
    first_.reset();
    for (const auto& [van, round] : rounds_) first_ = first_ ? std::min(*first_, round) : round;
  }

  std::map<int, uint64_t> rounds_;
  std::optional<uint64_t> first_;  // the oldest of them
  bool is_over_ = false;
};

}  // namespace p3
