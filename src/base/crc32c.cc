#include "base/crc32c.h"

#include <array>
#include <cstring>

#if defined(__x86_64__)
#include <nmmintrin.h>
#define P3_CRC32C_TARGET __attribute__((target("sse4.2")))
#elif defined(__ARM_FEATURE_CRC32)
#include <arm_acle.h>
#define P3_CRC32C_TARGET
#endif

namespace p3 {
namespace {

constexpr uint32_t kPolynomial = 0x82f63b78;  // reflected

using Table = std::array<uint32_t, 256>;

constexpr Table make_table() {
  Table table{};
  for (uint32_t i = 0; i < 256; ++i) {
    uint32_t crc = i;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ (crc & 1 ? kPolynomial : 0);
    table[i] = crc;
  }
  return table;
}

constexpr Table kTable = make_table();

#ifdef P3_CRC32C_TARGET

// Each of three neighbouring blocks is one stream. Short enough for a slice to have many, long enough for putting the
// streams together (once in three blocks) to cost little.
constexpr size_t kBlockBytes = 1024;

// What a remainder becomes when kBlockBytes zeros follow it. That is linear, so four tables, one for each of its bytes,
// hold all there is to know.
using Shift = std::array<Table, 4>;

Shift make_shift() {
  Shift shift{};
  for (uint32_t bit = 0; bit < 32; ++bit) {
    uint32_t crc = uint32_t{1} << bit;
    for (size_t i = 0; i < kBlockBytes; ++i) crc = (crc >> 8) ^ kTable[crc & 0xff];
    Table& table = shift[bit / 8];
    for (uint32_t byte = 0; byte < 256; ++byte)
      if (byte >> bit % 8 & 1) table[byte] ^= crc;
  }
  return shift;
}

const Shift kShift = make_shift();

uint32_t over_zeros(uint32_t crc) {
  return kShift[0][crc & 0xff] ^ kShift[1][crc >> 8 & 0xff] ^ kShift[2][crc >> 16 & 0xff] ^ kShift[3][crc >> 24];
}

P3_CRC32C_TARGET inline uint64_t step(uint64_t crc, const char* at) {
  uint64_t word;
  std::memcpy(&word, at, sizeof word);
#if defined(__x86_64__)
  return _mm_crc32_u64(crc, word);
#else
  return __crc32cd(static_cast<uint32_t>(crc), word);
#endif
}

P3_CRC32C_TARGET uint32_t by_instruction(uint32_t crc, const void* data, size_t bytes) {
  const char* at = static_cast<const char*>(data);
  uint64_t first = ~crc;
  for (; bytes >= 3 * kBlockBytes; bytes -= 3 * kBlockBytes, at += 3 * kBlockBytes) {
    uint64_t second = 0, third = 0;
    for (const char* const end = at + kBlockBytes; at < end; at += sizeof(uint64_t)) {
      first = step(first, at);
      second = step(second, at + kBlockBytes);
      third = step(third, at + 2 * kBlockBytes);
    }
    at -= kBlockBytes;
    first = over_zeros(over_zeros(static_cast<uint32_t>(first)) ^ static_cast<uint32_t>(second)) ^ third;
  }
  for (; bytes >= sizeof(uint64_t); bytes -= sizeof(uint64_t), at += sizeof(uint64_t)) first = step(first, at);
  return crc32c_by_table(~static_cast<uint32_t>(first), at, bytes);
}

bool has_instruction() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("sse4.2");
#else
  return true;
#endif
}

using Function = uint32_t (*)(uint32_t, const void*, size_t);
const Function kBest = has_instruction() ? by_instruction : crc32c_by_table;

#else
constexpr auto kBest = crc32c_by_table;
#endif

}  // namespace

uint32_t crc32c(uint32_t crc, const void* data, size_t bytes) { return kBest(crc, data, bytes); }

uint32_t crc32c_by_table(uint32_t crc, const void* data, size_t bytes) {
  crc = ~crc;
  for (const auto* at = static_cast<const unsigned char*>(data); bytes > 0; --bytes, ++at)
    crc = (crc >> 8) ^ kTable[(crc ^ *at) & 0xff];
  return ~crc;
}

}  // namespace p3
