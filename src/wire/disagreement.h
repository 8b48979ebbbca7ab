// What nodes that are not in step are told, by whoever sees it first: a server, or the leader of their machine.
#pragma once

#include <cstdint>
#include <string>

#include "p3/error.h"
#include "p3/optimizer.h"
#include "p3/wire.h"

namespace p3 {

// The numbers of one round, as who pushed first brought them; all who push must bring the same, to the bit.
struct RoundNumbers {
  int first = -1;  // who that was; -1: nobody yet
  RoundScalars scalars;

  // Returns who contradicts `who`, or -1.
  int note(int who, const RoundScalars& its);
};

// "push round 3 of key 'w'"
std::string push_of(const std::string& key, uint64_t round);
// "wait for its value of key 'w'"
std::string init_of(const std::string& key);

// `label` sees that `worker` has ended while others do what `waiting` says.
Error left_too_early(const std::string& label, const std::string& worker, const std::string& waiting);

// `label` sees that two workers gave the round different numbers.
Error scalars_differ(const std::string& label, const std::string& worker, const RoundScalars& scalars,
                     const std::string& other, const RoundScalars& other_scalars, uint64_t round,
                     const std::string& key);

// `label` was sent a frame by `peer` that it does not take. `key`: what the error calls its key.
Error slice_refused(const std::string& label, const std::string& peer, const Header& header, const std::string& what,
                    const std::string& key);

}  // namespace p3
