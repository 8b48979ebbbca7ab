// The frame: a fixed header of 80 bytes, little-endian, then the payload. docs/protocol.md is its specification.
// Memory: plain values. Threads: pure functions.
#pragma once

#include <cstdint>
#include <string>

#include "p3/optimizer.h"

namespace p3 {

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "P3's wire format is little-endian and its headers are sent as they lie in memory"
#endif

enum class FrameKind : uint8_t {
  kPush = 1,   // worker to server: one slice of a gradient
  kInit = 2,   // worker to server: rank 0's first value of a slice, or another rank's request for it (no payload)
  kValue = 3,  // server to worker: the value (or sum) of a slice after a round
  kPing = 4,   // either way: a heartbeat
  kFail = 5,   // either way: the sender has failed; the payload is the text
  kBye = 6,    // either way: the sender leaves normally
  kFetch = 7,  // worker to server: the request for one part of a slice (see Optimizer::state_count)
  kStore = 8,  // worker 0 to server: new content for that part
  kPart = 9,   // server to worker: the part that was fetched; without payload: it was stored, or captured
  // Of keys of rows; their payload begins with a RowsHeader (rows.h), and Header::slice is the partition.
  kPushRows = 10,   // worker to server: rows of a gradient. Header::part 1: send back the result
  kRows = 11,       // server to worker: rows after a round; to a worker that wants none: an empty last frame
  kFetchRows = 12,  // worker to server: the request for rows of a part; answered by kPart frames: values, in order
  kStoreRows = 13,  // worker to server: new content for rows of a part; answered by kPart without payload
  // Of every key.
  kCapture = 14,  // worker 0 to server: copy the value and all state for a snapshot; answered by kPart without payload
  // Of a connection.
  kFields = 15,  // either way: what pushes behind it go by: FieldValues of the optimizer; empty: those announced
  kYield = 16,   // worker, to servers of its machine: part 1: pushes of `round` wait for the link; 0: none do
  // Of slices.
  kChange = 17,  // server to worker: what the worker adds to the value of a slice that it has; always encoded
  kClaim = 18,   // worker to the heir of a server that is lost: what has come here of a slice of that one (Claimed)
  kAsk = 19,     // heir to worker: the request for the value of a slice that it has claimed; answered by kClaim
};

constexpr bool is_push(FrameKind kind) { return kind == FrameKind::kPush || kind == FrameKind::kPushRows; }
constexpr bool carries_slice(FrameKind kind) {
  return kind <= FrameKind::kValue || (kind >= FrameKind::kFetch && kind <= FrameKind::kCapture) ||
         (kind >= FrameKind::kChange && kind <= FrameKind::kAsk);
}
constexpr bool has_checksum(FrameKind kind) { return carries_slice(kind) || kind == FrameKind::kFields; }

// How the elements of a payload are written. The type itself is the one agreed on: docs/protocol.md.
enum class Encoding : uint8_t {
  kPlain = 0,     // as they lie in memory
  kFloat16 = 1,   // float32 elements rounded to float16, times a scale of the slice, which comes first
  kTwoBit = 2,    // float32 elements as one of -threshold, 0, +threshold, 16 to each 4 bytes
  kAbsent = 3,    // none: kPush: this worker has nothing to add; kValue: no worker had, and the value stays
  kOneBit = 4,    // float32 elements as one of two means, which come first; 8 elements to a byte
  kTopK = 5,      // some float32 elements with their offsets; of any size below the plain one (wire/top_k.h)
  kBfloat16 = 6,  // float32 elements rounded to bfloat16
  kEightBit = 7,  // float32 elements as multiples of a scale of their block, which comes first: from -127 to 127
  kFourBit = 8,   // the same, from -7 to 7
  kLargest = 9,   // the largest float32 elements of a slice, in few bits, with their offsets
};
constexpr Encoding kLastEncoding = Encoding::kLargest;

struct Header {
  uint32_t magic = kMagic;
  uint8_t version = kVersion;
  FrameKind kind = FrameKind::kPing;
  uint8_t dtype = 0;     // p3::DType
  uint8_t encoding = 0;  // p3::Encoding of the payload
  uint32_t key = 0;      // wire key
  uint32_t slice = 0;    // index within the key
  uint64_t round = 0;    // 0 is the first value
  int32_t priority = 0;  // higher is sooner
  uint32_t payload_bytes = 0;
  uint32_t crc32c = 0;     // checksum_of() a frame that has_checksum(), if the job wants them; else zero
  uint8_t part = 0;        // kFetch, kStore, kPart: which array of the slice; pushes, values: docs/protocol.md
                           // kInit: InitPart
  uint8_t of_machine = 0;  // 1: pushes: the sum of all workers of the sender's machine; kValue, kChange, kRows: for all
  uint16_t contributors = 0;  // of_machine, pushes: how many of them had a gradient
  RoundScalars scalars{};     // kPush: what the optimizer needs of this round; kCapture: `updates`, see snapshot_of()

  static constexpr uint32_t kMagic = 0x57643350;  // "P3dW"
  static constexpr uint8_t kVersion = 8;
};
static_assert(sizeof(Header) == 80, "the header is the wire format");

// Header::part: the optimizer's states are numbered from 1. And of what is float32 beside the value: its master, if it is of
// half precision; the exact value, if only encoded changes of it leave the server; or what encoded sums have left out.
constexpr uint8_t kMaster = 255;
constexpr uint8_t kLeftOut = 254;

constexpr uint32_t kMaxFailTextBytes = 4096;

// Of a push for a key with staleness: whether its worker has taken its last step; with a quorum, whether it stands aside.
// Who has no gradient for this round alone says so by Header::part 1 of a slice, and by no rows of a partition, where `part`
// says something else.
inline bool is_last_step(const Header& push) {
  const bool is_absent = push.encoding == static_cast<uint8_t>(Encoding::kAbsent);
  return is_absent && (push.kind == FrameKind::kPushRows || push.part == 0);
}

// Of an answer to such a push: the value holds all pushes of all workers up to this round. With a quorum: all of the
// worker's own, so it is the push's round, or a lower one if that was late.
inline void set_least_clock(Header& answer, uint64_t round) { answer.scalars.schedule = static_cast<double>(round); }
inline uint64_t least_clock(const Header& answer) {
  const double round = answer.scalars.schedule;
  return round >= 0 && round < 0x1p53 ? static_cast<uint64_t>(round) : 0;
}

// RoundScalars::updates of a push of rows for a key with staleness whose worker has no gradient for this round alone: a push
// that has one is an update, though perhaps of no row of the partition.
constexpr double kNoUpdate = 1;

// Of a push without a gradient: whether its worker takes part in the round all the same. Of a gathered key that says who
// has nothing to add to another worker's part, but numbers; of a key of norms, who has not taken its last step.
inline bool goes_on(const Header& push) { return push.part == 1; }

// Of a heartbeat between a node and the scheduler: the link of the node's machine, what it carries as far as the node
// knows and how many of its connections the node fills; and, on the way back, what all windows of the job go by: the
// greatest of both over all machines. Zeros: not known yet; a number above the most that makes sense is read as zero.
struct LinkShare {
  uint64_t bytes_per_second = 0, connections = 0;
};
constexpr double kMostBytesPerSecond = 1e12, kMostConnections = 1e6;
inline void set_link_share(Header& ping, const LinkShare& link) {
  ping.scalars.lr = static_cast<double>(link.bytes_per_second);
  ping.scalars.wd = static_cast<double>(link.connections);
}
inline LinkShare link_share(const Header& ping) {
  const auto whole = [](double value, double most) {
    return value >= 0 && value <= most ? static_cast<uint64_t>(value) : uint64_t{0};
  };
  return {whole(ping.scalars.lr, kMostBytesPerSecond), whole(ping.scalars.wd, kMostConnections)};
}

// kInit: what the value is that it asks for, or brings.
enum class InitPart : uint8_t {
  kOfAll = 0,
  kHandedOver = 1,  // not all workers ask for it, see Worker::hand_over()
  kRoundAlone = 2,  // of use to nobody who asks so, see Worker::ask_for_round_alone()
};

// kClaim: what its worker has of the slice. But for the last one `round` is the last one of which something came, and
// `scalars` are that round's. A value of so few bytes comes along; a larger one, with all of that once more, when the heir
// asks for it, which it does of one worker, or when this one leaves.
constexpr size_t kClaimedAtOnce = 1024;
enum class Claimed : uint8_t {
  kValue = 0,         // the value of that round
  kStayed = 1,        // the round left it as it was
  kSumOfNothing = 2,  // so it did, and other slices of the key have a sum in that round (docs/protocol.md)
  kNothing = 3,       // nothing has come
  kRoundAlone = 4,    // the round, and not its value, see Worker::ask_for_round_alone()
};
// Header::key of a worker's last claim: kNothing of all other slices that a server had, whose rank is in Header::slice.
constexpr uint32_t kNoKey = 0xffffffff;
// And how many first values have come: by so many the priority is less than the greatest, so that claims leave before all
// else.
constexpr int32_t kMostUrgent = INT32_MAX;
inline uint32_t inits_of(const Header& claim) {
  return static_cast<uint32_t>(int64_t{kMostUrgent} - int64_t{claim.priority});
}
inline void set_inits(Header& claim, uint32_t count) {
  claim.priority = static_cast<int32_t>(int64_t{kMostUrgent} - int64_t{count});
}
inline Header nothing_claimed() {
  Header claim;
  claim.kind = FrameKind::kClaim;
  claim.encoding = static_cast<uint8_t>(Encoding::kAbsent);
  claim.part = static_cast<uint8_t>(Claimed::kNothing);
  set_inits(claim, 0);
  return claim;
}

// What is wrong with a header whatever was agreed for its key, or an empty string. `checksums`: slices have them.
std::string malformed(const Header& header, bool checksums);

// kCapture: for which snapshot, by its round as the script counts; those up to kLastSnapshot are exact as float64.
constexpr uint64_t kLastSnapshot = uint64_t{1} << 53;
inline uint64_t snapshot_of(const Header& capture) { return static_cast<uint64_t>(capture.scalars.updates); }

// CRC32C of the header, except for the checksum itself, and of the payload as it is sent.
uint32_t checksum_of(Header header, const void* payload);

}  // namespace p3
