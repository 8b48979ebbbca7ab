// What goes first, wherever slices queue: the older round, then the higher priority.
//
// The round comes first because workers are never quite in step. One that is ahead pushes early layers of the next round
// while others still wait for late layers of this one; by priority alone it would drift ahead by a whole backward pass.
// Threads: plain values.
#pragma once

#include <cstdint>
#include <limits>
#include <tuple>

#include "p3/wire.h"

namespace p3 {

struct Urgency {
  uint64_t round = 0;
  int32_t priority = 0;  // higher is sooner, as in MXNet's KVStore

  bool is_sooner_than(const Urgency& other) const {
    return std::tie(round, other.priority) < std::tie(other.round, priority);
  }
};

// Heartbeats, whose round is news and no place in a queue, go before everything, and so does what links are told; among
// these the first one first. Goodbyes go behind.
inline Urgency urgency_of(const Header& header) {
  constexpr uint64_t kLastRound = std::numeric_limits<uint64_t>::max();
  if (header.kind == FrameKind::kPing || header.kind == FrameKind::kYield)
    return {0, std::numeric_limits<int32_t>::max()};
  return {header.kind == FrameKind::kBye ? kLastRound : header.round, header.priority};
}

}  // namespace p3
