// Pieces of what is to be written in one call, as iovecs. Threads: plain values. Memory: borrowed, as iovecs do.
#pragma once

#include <sys/uio.h>

#include <algorithm>
#include <cstddef>

namespace p3 {

// What is left of `size` bytes at `base` after `done` of them.
inline iovec rest_of(const void* base, size_t size, size_t done) {
  return {static_cast<char*>(const_cast<void*>(base)) + done, size - done};
}

inline size_t bytes_in(const iovec* parts, int count) {
  size_t bytes = 0;
  for (int i = 0; i < count; ++i) bytes += parts[i].iov_len;
  return bytes;
}

// So long are the parts of `bytes`, each of at most `most`, that no short one is left at the end.
inline size_t equal_part_of(size_t bytes, size_t most) {
  const size_t parts = std::max<size_t>(1, bytes / most + (bytes % most > 0));
  return std::max<size_t>(1, bytes / parts + (bytes % parts > 0));
}

// A piece of at most `most` bytes, behind the first `done` ones, in no more than kParts parts.
struct Piece {
  static constexpr int kParts = 2;  // a header and its payload
  iovec parts[kParts];
  int count = 0;
  size_t bytes = 0;

  Piece(const iovec* of, int of_count, size_t done, size_t most) {
    for (int i = 0; i < of_count && count < kParts && bytes < most; ++i) {
      const size_t skipped = std::min(done, of[i].iov_len);
      done -= skipped;
      if (skipped == of[i].iov_len) continue;
      parts[count] = rest_of(of[i].iov_base, of[i].iov_len, skipped);
      parts[count].iov_len = std::min(parts[count].iov_len, most - bytes);
      bytes += parts[count++].iov_len;
    }
  }
};

}  // namespace p3
