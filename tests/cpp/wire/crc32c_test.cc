#include "base/crc32c.h"

#include <gtest/gtest.h>

#include <chrono>
#include <random>
#include <vector>

namespace p3 {
namespace {

// RFC 3720, B.4, and the check value of the catalogue of CRCs.
TEST(Crc32c, KnownValues) {
  std::vector<unsigned char> ascending(32), descending(32);
  for (unsigned i = 0; i < 32; ++i) descending[31 - i] = ascending[i] = static_cast<unsigned char>(i);
  const std::vector<std::pair<std::vector<unsigned char>, uint32_t>> known = {
      {{}, 0},
      {{'1', '2', '3', '4', '5', '6', '7', '8', '9'}, 0xe3069283},
      {std::vector<unsigned char>(32, 0), 0x8a9136aa},
      {std::vector<unsigned char>(32, 0xff), 0x62a8ab43},
      {ascending, 0x46dd794e},
      {descending, 0x113fdb5c},
  };
  for (const auto& [bytes, crc] : known) {
    EXPECT_EQ(crc32c(0, bytes.data(), bytes.size()), crc);
    EXPECT_EQ(crc32c_by_table(0, bytes.data(), bytes.size()), crc);
  }
}

TEST(Crc32c, InstructionAndTableAgreeForEveryLengthAndAlignment) {
  std::mt19937 random(1);
  std::vector<unsigned char> bytes(1 << 15);
  for (auto& byte : bytes) byte = static_cast<unsigned char>(random());
  for (int i = 0; i < 2000; ++i) {
    const size_t start = random() % 64, size = i < 64 ? static_cast<size_t>(i) : random() % (bytes.size() - start);
    const auto seed = static_cast<uint32_t>(random());
    ASSERT_EQ(crc32c(seed, &bytes[start], size), crc32c_by_table(seed, &bytes[start], size)) << start << ' ' << size;
  }
}

TEST(Crc32c, PartsAddUpToTheWhole) {
  std::vector<char> bytes(10000, 'p');
  const uint32_t whole = crc32c(0, bytes.data(), bytes.size());
  for (size_t cut : {0u, 1u, 79u, 80u, 3072u, 9999u})
    EXPECT_EQ(crc32c(crc32c(0, bytes.data(), cut), &bytes[cut], bytes.size() - cut), whole) << cut;
}

TEST(Crc32c, AnyFlippedBitShows) {
  std::vector<char> bytes(4000, 'p');
  const uint32_t whole = crc32c(0, bytes.data(), bytes.size());
  for (size_t bit = 0; bit < bytes.size() * 8; bit += 7) {
    bytes[bit / 8] = static_cast<char>(bytes[bit / 8] ^ 1 << bit % 8);
    EXPECT_NE(crc32c(0, bytes.data(), bytes.size()), whole) << bit;
    bytes[bit / 8] = static_cast<char>(bytes[bit / 8] ^ 1 << bit % 8);
  }
}

// Not a check: --gtest_also_run_disabled_tests prints the rates over one slice, which the caches hold.
TEST(Crc32c, DISABLED_Rates) {
  std::vector<char> slice(200000, 'p');
  for (const auto& [name, function] : {std::pair{"best", crc32c}, std::pair{"table", crc32c_by_table}}) {
    const auto start = std::chrono::steady_clock::now();
    uint32_t crc = 0;
    constexpr int kTimes = 2000;
    for (int i = 0; i < kTimes; ++i) crc = function(crc, slice.data(), slice.size());
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    printf("%s: %.2f GB/s (%08x)\n", name, kTimes * static_cast<double>(slice.size()) / seconds / 1e9, crc);
  }
}

}  // namespace
}  // namespace p3
