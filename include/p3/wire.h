// The frame: a fixed header of 64 bytes, little-endian, then the payload. docs/protocol.md is its specification.
// Memory: plain values. Threads: pure functions.
#pragma once

#include <cstdint>
#include <string>

namespace p3 {

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "P3's wire format is little-endian and its headers are sent as they lie in memory"
#endif

enum class FrameKind : uint8_t {
  kPush = 1,   // worker to server: one slice of a gradient
  kInit = 2,   // worker to server: rank 0's first value of a slice, or another rank's wish for it (no payload)
  kValue = 3,  // server to worker: the value (or sum) of a slice after a round
  kPing = 4,   // either way: a sign of life
  kFail = 5,   // either way: the sender has failed; the payload is the text
  kBye = 6,    // either way: the sender leaves in order
};

constexpr bool carries_slice(FrameKind kind) { return kind <= FrameKind::kValue; }

struct Header {
  uint32_t magic = kMagic;
  uint8_t version = kVersion;
  FrameKind kind = FrameKind::kPing;
  uint8_t dtype = 0;     // p3::DType
  uint8_t flags = 0;     // none defined yet; must be zero
  uint32_t key = 0;      // wire key
  uint32_t slice = 0;    // index within the key
  uint64_t round = 0;    // 0 is the first value
  int32_t priority = 0;  // higher is sooner
  uint32_t payload_bytes = 0;
  uint32_t crc32c = 0;    // reserved; must be zero
  uint32_t reserved = 0;  // must be zero
  double lr = 0;          // kPush: the round's RoundScalars
  double wd = 0;
  double rescale = 0;

  static constexpr uint32_t kMagic = 0x57643350;  // "P3dW"
  static constexpr uint8_t kVersion = 1;
};
static_assert(sizeof(Header) == 64, "the header is the wire format");

constexpr uint32_t kMaxFailTextBytes = 4096;

// What is wrong with a header regardless of any agreement, or an empty string.
std::string malformed(const Header& header);

}  // namespace p3
