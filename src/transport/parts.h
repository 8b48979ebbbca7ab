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
