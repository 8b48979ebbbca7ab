// CRC32C (Castagnoli, reflected), which every frame that carries a slice has if the job wants checksums.
//
//   uint32_t crc = crc32c(0, header, sizeof header);
//   crc = crc32c(crc, payload, bytes);                // goes on where the last call ended
//
// By the processor's own instruction where there is one (SSE4.2: found out at run time; ARM: at compile time), in three
// interleaved streams, because one instruction waits for the last: docs/decisions.md has the rates.
// Threads, memory: pure functions.
#pragma once

#include <cstddef>
#include <cstdint>

namespace p3 {

uint32_t crc32c(uint32_t crc, const void* data, size_t bytes);

// The same byte by byte, from a table: on other processors, and to compare with.
uint32_t crc32c_by_table(uint32_t crc, const void* data, size_t bytes);

}  // namespace p3
