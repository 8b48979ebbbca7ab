// What has gone wrong between the nodes of a job: each failure with its fields, and the sentence made of them, here alone.
// `label` is who tells, "worker 2 (10.0.0.5)"; `peer` whom it is about.
// Threads: pure functions.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "p3/error.h"
#include "p3/optimizer.h"
#include "p3/wire.h"

namespace p3 {

// The numbers of one round, as who pushed first brought them; all who push must bring the same, to the bit.
struct RoundNumbers {
  int first = -1;  // who that was; -1: nobody yet
  RoundScalars scalars;
  SharedFields fields;

  // Returns who contradicts `who`, or -1.
  int note(int who, const RoundScalars& its, const SharedFields& its_fields);
  RoundSettings settings() const { return {scalars, fields}; }
};

// What is waited for, from a peer but for kGradient.
struct Awaited {
  enum class What {
    kRound,       // the value of a round, by this node
    kGradient,    // this node's own gradient of a round, which is still being copied to where the core reads it
    kPush,        // a push, by others who have pushed
    kFirstValue,  // a key's first value, by others
  } what = What::kRound;
  std::string key;
  uint64_t round = 0;  // but for kFirstValue
};

// " while waiting for round 3 of key 'w'", " while the gradient of round 3 of key 'w' was still being copied on this
// worker", " while others push round 3 of key 'w'"; empty if nothing is.
std::string clause(const std::optional<Awaited>& awaited);

// A connection has ended. `error`: errno, or 0; `last_round`: that the node has completed, 0: none.
Error peer_lost(const std::string& label, const std::string& peer, int error, const std::optional<Awaited>& awaited,
                uint64_t last_round);
// Nothing has come for so long. `others_too`: nor from anyone else.
Error peer_silent(const std::string& label, const std::string& peer, double silence_s, bool others_too,
                  const std::optional<Awaited>& awaited, uint64_t last_round);
// It has taken nothing for so long of what waits for it.
Error peer_reads_nothing(const std::string& label, const std::string& peer, double silence_s, bool others_too,
                         uint64_t waiting_bytes);
// A server, or the leader of the machine, has said goodbye while it is needed.
Error peer_left(const std::string& label, const std::string& peer, const std::optional<Awaited>& awaited);
// A worker has said goodbye while others wait for it.
Error left_too_early(const std::string& label, const std::string& worker, const Awaited& awaited);
// A frame that no agreement could make right. `what`: as malformed() tells.
Error frame_malformed(const std::string& label, const std::string& peer, const std::string& what);
// A frame that is `what` by what was agreed. `key`: its name, if it is known.
Error frame_refused(const std::string& label, const std::string& peer, const Header& header, const std::string& what,
                    const std::optional<std::string>& key);
// Two workers gave the round different numbers. `optimizer`: of the key, where it is known, to name the fields.
Error scalars_differ(const std::string& label, const std::string& worker, const RoundSettings& settings,
                     const std::string& other, const RoundSettings& other_settings, uint64_t round,
                     const std::string& key, const Optimizer* optimizer = nullptr);

}  // namespace p3
