#include "base/digest.h"

#include <array>
#include <cstring>

namespace p3 {

namespace {

constexpr size_t kLanes = 8;  // a processor multiplies for several at once
constexpr uint64_t kOdd = 0x9E3779B97F4A7C15u;
using Words = std::array<uint64_t, kLanes>;

// One to one in each argument, so that no single change is lost; the bits at the top come down to be multiplied next.
uint64_t mixed(uint64_t state, uint64_t word) {
  const uint64_t product = (state ^ word) * kOdd;
  return product ^ product >> 32;
}

void add(Words& state, const unsigned char* block) {
  Words words;
  std::memcpy(words.data(), block, sizeof words);
  for (size_t lane = 0; lane < kLanes; ++lane) state[lane] = mixed(state[lane], words[lane]);
}

}  // namespace

uint64_t digest(const void* memory, size_t bytes) noexcept {
  constexpr size_t kBlock = sizeof(Words);
  const auto* at = static_cast<const unsigned char*>(memory);
  Words state{1, 2, 3, 4, 5, 6, 7, 8};
  size_t left = bytes;
  for (; left >= kBlock; left -= kBlock, at += kBlock) add(state, at);
  if (left > 0) {
    std::array<unsigned char, kBlock> padded{};
    std::memcpy(padded.data(), at, left);
    add(state, padded.data());
  }
  uint64_t whole = bytes;
  for (const uint64_t lane : state) whole = mixed(whole, lane);
  return whole;
}

}  // namespace p3
