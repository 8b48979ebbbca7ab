// What a fuzzer's bytes mean: a sequence of choices, zeros once they are used up. Every target reads from one of these.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

namespace p3 {

// Of what must hold for any input.
inline void require(bool holds) {
  if (!holds) abort();
}

class Input {
 public:
  Input(const uint8_t* data, size_t size) : at_(data), left_(size) {}

  bool empty() const { return left_ == 0; }
  uint8_t byte() { return number<uint8_t>(); }
  // 0 .. limit - 1
  uint32_t below(uint32_t limit) { return limit <= 256 ? byte() % limit : number<uint32_t>() % limit; }

  template <typename T>
  T number() {
    T value{};
    take(&value, sizeof value);
    return value;
  }

  void take(void* to, size_t size) {
    const size_t there = size < left_ ? size : left_;
    if (there > 0) std::memcpy(to, at_, there);
    if (there < size) std::memset(static_cast<char*>(to) + there, 0, size - there);
    at_ += there;
    left_ -= there;
  }

  // Exactly so long, for the address sanitizer to see who goes beyond.
  std::vector<char> bytes(size_t size) {
    std::vector<char> taken(size);
    take(taken.data(), size);
    return taken;
  }

 private:
  const uint8_t* at_;
  size_t left_;
};

}  // namespace p3
