// The payload of kTopK: some elements of a slice of float32, by their offsets. docs/protocol.md is its specification.
//
//   payload = count values offsets      count: uint32; values: float32; offsets: ascending, of 16 bits, or of 32 in a
//                                       slice of more than 65,536 elements
//
// Threads: pure functions. Memory: the caller's, of any alignment. `elements`: of the whole slice.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace p3 {

inline size_t top_k_offset_bytes(size_t elements) { return elements <= 65536 ? sizeof(uint16_t) : sizeof(uint32_t); }

constexpr size_t kTopKHeadBytes = sizeof(uint32_t);

inline size_t top_k_bytes(size_t count, size_t elements) {
  return kTopKHeadBytes + count * (sizeof(float) + top_k_offset_bytes(elements));
}

// Whether so many elements take fewer bytes so than the whole slice does.
inline bool is_worth_top_k(size_t count, size_t elements) {
  return top_k_bytes(count, elements) < elements * sizeof(float);
}

// Of a sound payload.
inline uint32_t top_k_count(const void* payload) {
  uint32_t count;
  std::memcpy(&count, payload, sizeof count);
  return count;
}

// Whether a payload can have so many bytes.
bool can_be_top_k(size_t bytes, size_t elements);
// What is wrong with a payload of so many bytes, which can_be_top_k(), or null.
const char* problem_with_top_k(const void* payload, size_t bytes, size_t elements);

namespace detail {
template <typename Offset, typename Visit>
void each_of_top_k(const char* payload, Visit visit) {
  const uint32_t count = top_k_count(payload);
  const char* const values = payload + kTopKHeadBytes;
  const char* const offsets = values + count * sizeof(float);
  for (size_t i = 0; i < count; ++i) {
    float value;
    Offset offset;
    std::memcpy(&value, values + i * sizeof value, sizeof value);
    std::memcpy(&offset, offsets + i * sizeof offset, sizeof offset);
    visit(static_cast<size_t>(offset), value);
  }
}
}  // namespace detail

// visit(offset, value) for each, of a sound payload, in the order of offsets.
template <typename Visit>
void each_of_top_k(const void* payload, size_t elements, Visit visit) {
  const auto* bytes = static_cast<const char*>(payload);
  if (top_k_offset_bytes(elements) == sizeof(uint16_t)) return detail::each_of_top_k<uint16_t>(bytes, visit);
  detail::each_of_top_k<uint32_t>(bytes, visit);
}

class TopKWriter {
 public:
  // `payload` of top_k_bytes(count, elements); add() is to be called `count` times.
  TopKWriter(void* payload, size_t count, size_t elements)
      : offset_bytes_(top_k_offset_bytes(elements)),
        value_(static_cast<char*>(payload) + kTopKHeadBytes),
        offset_(value_ + count * sizeof(float)) {
    const auto head = static_cast<uint32_t>(count);
    std::memcpy(payload, &head, sizeof head);
  }
  void add(size_t offset, float value) {
    const auto written = static_cast<uint32_t>(offset);  // little-endian, so that its first bytes are the short form
    std::memcpy(value_, &value, sizeof value);
    if (offset_bytes_ == sizeof(uint16_t))  // of a constant size each, for which no function is called
      std::memcpy(offset_, &written, sizeof(uint16_t));
    else
      std::memcpy(offset_, &written, sizeof(uint32_t));
    value_ += sizeof value;
    offset_ += offset_bytes_;
  }

 private:
  const size_t offset_bytes_;
  char* value_;
  char* offset_;
};

}  // namespace p3
