// A digest of memory, to see whether anybody has written to it. Not for files or other machines: it is this one's order
// of bytes, and any release may have another one.
//
// Threads: any. Memory: borrows it for the call.
#pragma once

#include <cstddef>
#include <cstdint>

namespace p3 {

// Changes with any one byte, and with the places of words that change them, wherever the memory lies.
uint64_t digest(const void* memory, size_t bytes) noexcept;

}  // namespace p3
