// A digest tells of every change, and of nothing else.
#include "base/digest.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <set>
#include <vector>

namespace p3 {
namespace {

std::vector<unsigned char> noise(size_t bytes) {
  std::mt19937 random(static_cast<unsigned>(bytes));
  std::vector<unsigned char> made(bytes);
  for (unsigned char& one : made) one = static_cast<unsigned char>(random());
  return made;
}

TEST(Digest, ChangesWithEveryBit) {
  for (const size_t bytes : {1, 7, 8, 63, 64, 65, 200}) {
    std::vector<unsigned char> memory = noise(bytes);
    std::set<uint64_t> seen{digest(memory.data(), bytes)};
    for (size_t bit = 0; bit < 8 * bytes; ++bit) {
      const auto mask = static_cast<unsigned char>(1u << (bit % 8));
      memory[bit / 8] ^= mask;
      EXPECT_TRUE(seen.insert(digest(memory.data(), bytes)).second) << bytes << " bytes, bit " << bit;
      memory[bit / 8] ^= mask;
    }
  }
}

TEST(Digest, ChangesWithTheOrder) {
  std::vector<unsigned char> memory = noise(1000);
  const uint64_t before = digest(memory.data(), memory.size());
  for (const size_t other : {size_t{8}, size_t{64}, size_t{128}, size_t{936}}) {
    std::vector<unsigned char> swapped = memory;
    std::swap_ranges(swapped.begin(), swapped.begin() + 8, swapped.begin() + static_cast<std::ptrdiff_t>(other));
    EXPECT_NE(digest(swapped.data(), swapped.size()), before) << other;
  }
}

TEST(Digest, ChangesWithEverySignOfEveryNumber) {
  for (const size_t count : {2, 4, 16, 64, 1000}) {
    std::vector<double> numbers(count, 1.0);
    std::set<uint64_t> seen;
    for (const double each : {1.0, -1.0, 2.0}) {
      std::fill(numbers.begin(), numbers.end(), each);
      EXPECT_TRUE(seen.insert(digest(numbers.data(), count * sizeof(double))).second) << count << " times " << each;
    }
    numbers[0] = -numbers[0];
    EXPECT_TRUE(seen.insert(digest(numbers.data(), count * sizeof(double))).second);
    numbers[count - 1] = -numbers[count - 1];
    EXPECT_TRUE(seen.insert(digest(numbers.data(), count * sizeof(double))).second);
  }
}

TEST(Digest, IsOfTheBytesAloneWhereverTheyLie) {
  for (const size_t bytes : {0, 3, 64, 777}) {
    const std::vector<unsigned char> memory = noise(bytes);
    const uint64_t expected = digest(memory.data(), bytes);
    std::vector<unsigned char> elsewhere(bytes + 8);
    for (size_t shift = 0; shift < 8; ++shift) {
      std::copy(memory.begin(), memory.end(), elsewhere.begin() + static_cast<std::ptrdiff_t>(shift));
      EXPECT_EQ(digest(elsewhere.data() + shift, bytes), expected);
    }
  }
}

TEST(Digest, ChangesWithTheLength) {
  const std::vector<unsigned char> zeros(130);
  std::set<uint64_t> seen;
  for (size_t bytes = 0; bytes <= zeros.size(); ++bytes) seen.insert(digest(zeros.data(), bytes));
  EXPECT_EQ(seen.size(), zeros.size() + 1);
}

}  // namespace
}  // namespace p3
