// The frames that ask for the same of keys of different kinds.
// Memory: plain values. Threads: pure functions.
#pragma once

#include "p3/wire.h"

namespace p3 {

struct FrameKinds {
  FrameKind push, fetch, store;
  // Fetch and store reach the value (part 0), too, and every worker may store; else they reach states alone, which
  // worker 0 stores.
  bool reach_value;
};
constexpr FrameKinds kSliceFrames{FrameKind::kPush, FrameKind::kFetch, FrameKind::kStore, false};
constexpr FrameKinds kRowsFrames{FrameKind::kPushRows, FrameKind::kFetchRows, FrameKind::kStoreRows, true};

// Whether a frame of a round is its sender's last of its shard. `payload`: null if it has none.
bool ends_round(const Header& header, const void* payload);

}  // namespace p3
