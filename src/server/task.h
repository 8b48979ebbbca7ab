// What a shard has to work on, and what comes of it.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "base/buffer_pool.h"
#include "p3/captured.h"
#include "p3/wire.h"
#include "transport/transport.h"

namespace p3 {

class Shard;

struct Task {
  enum class Kind {
    kFrame,    // a frame has come
    kCatchUp,  // the first frame of a worker that has entered the job has: it asks for the value
    kAgain,    // a push has come of a round that is over: its sender lacks the value
    kResume,   // nothing borrows from the shard any more, or a time has come that it waits for
  } kind = Kind::kFrame;
  Shard* shard = nullptr;
  int worker = -1;
  Header header{};
  SharedFields fields{};      // of a push: what it goes by
  PooledBuffer payload{};     // empty: none, or it lies in the value already
  uint32_t nth_init = 0;      // kInit: of this worker
  uint32_t incarnation = 0;   // which process of that rank sent it, counted from 1
  bool has_departed = false;  // instead of a push of a worker that has
  uint64_t held_bytes = 0;    // that the transport was told of
};

struct Reply {
  const char* problem = nullptr;          // what is wrong with the task's frame; then nothing else counts
  int contradicts = -1;                   // so does a worker whose numbers of the round differ
  bool is_summed = false;                 // the frame counts in its round
  std::optional<Header> published{};      // a round is complete: the header of its value
  std::vector<CapturedArray> captured{};  // for the snapshot that the frame asked for
  std::vector<Transport::Outgoing> frames{};
};

}  // namespace p3
