// What has come of each slice of a dense key, in memory that no script writes to, and what has left encoded: for the heir of
// a server that is lost. Values are received here, so that one which comes only in part spoils no gradient that may have to
// be sent again, as both may lie in one array.
// Memory:  the key's value once more; where compression keeps what it leaves out, the encoded gradient of the round.
// Threads: the receiver's; begin() with the Worker's lock held, while no answer is due; note_sent() by who sends, and again
//          when that has been stopped.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "p3/wire.h"
#include "transport/van.h"

namespace p3 {

class KeptValues {
 public:
  // Before an operation whose answers are values.
  void begin(uint32_t slices, size_t bytes) {
    bytes_.resize(std::max<size_t>(bytes, 1));
    slices_.resize(slices);
    for (Slice& slice : slices_) slice.sent.clear();
  }

  char* at(size_t offset) { return bytes_.data() + offset; }

  // It has landed, or left the value as it was. `settings`: of its round.
  void note(const Header& answer, Claimed what, bool is_first_value, const RoundSettings& settings) {
    Slice& slice = slices_[answer.slice];
    slice.what = what;
    slice.round = answer.round;
    slice.inits += is_first_value;
    slice.settings = settings;
    slice.is_owed = false;  // a server that has answered needs to know no more
  }

  // See Way::claim() and Way::owed(). If part of the next value has come, the bytes are torn; nobody needs them then, as
  // no server sends that one before all have this one.
  Frame claim(uint32_t index, size_t offset, size_t bytes) {
    if (index >= slices_.size() || slices_[index].what == Claimed::kNothing) return {nothing_claimed()};
    slices_[index].is_owed = slices_[index].what != Claimed::kRoundAlone;
    return bytes > kClaimedAtOnce || !slices_[index].is_owed ? claim_without_value(slices_[index])
                                                             : owed(index, offset, bytes);
  }
  Frame owed(uint32_t index, size_t offset, size_t bytes) {
    if (index >= slices_.size() || !std::exchange(slices_[index].is_owed, false)) return {nothing_claimed()};
    Frame frame = claim_without_value(slices_[index]);
    frame.header.encoding = static_cast<uint8_t>(Encoding::kPlain);
    frame.header.payload_bytes = static_cast<uint32_t>(bytes);
    frame.payload = bytes_.data() + offset;
    return frame;
  }

  void note_sent(uint32_t index, const void* encoded, size_t bytes) {
    const auto* const from = static_cast<const char*>(encoded);
    slices_[index].sent.assign(from, from + bytes);
  }
  // Of a frame that was encoded: the bytes that it had then.
  Frame again(Frame frame) const {
    const std::vector<char>& sent = slices_[frame.header.slice].sent;
    if (frame.encoder == nullptr || sent.empty()) return frame;
    frame.encoder = nullptr;
    frame.payload = sent.data();
    return frame;
  }

 private:
  struct Slice {
    Claimed what = Claimed::kNothing;
    bool is_owed = false;
    uint64_t round = 0;
    uint32_t inits = 0;
    RoundSettings settings{};
    std::vector<char> sent{};
  };

  static Frame claim_without_value(const Slice& slice) {
    Frame frame{nothing_claimed()};
    frame.header.part = static_cast<uint8_t>(slice.what);
    frame.header.round = slice.round;
    frame.header.scalars = slice.settings.scalars;
    frame.fields = slice.settings.fields;
    frame.goes_by_fields = true;
    set_inits(frame.header, slice.inits);
    return frame;
  }

  std::vector<char> bytes_;
  std::vector<Slice> slices_;
};

}  // namespace p3
