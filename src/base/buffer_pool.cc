#include "base/buffer_pool.h"

#include <algorithm>
#include <cstdlib>
#include <new>

namespace p3 {

BufferPool::~BufferPool() {
  for (auto& [bytes, buffers] : free_)
    for (void* buffer : buffers) std::free(buffer);
}

void* BufferPool::take(size_t bytes) {
  MutexLock lock(mutex_);
  std::vector<void*>& available = free_[bytes];
  void* buffer;
  if (available.empty()) {
    const size_t rounded = (std::max<size_t>(bytes, 1) + kAlignment - 1) / kAlignment * kAlignment;
    buffer = std::aligned_alloc(kAlignment, rounded);
    if (buffer == nullptr) throw std::bad_alloc();
  } else {
    buffer = available.back();
    available.pop_back();
  }
  in_use_ += bytes;
  peak_ = std::max(peak_, in_use_);
  return buffer;
}

void BufferPool::give_back(void* buffer, size_t bytes) {
  MutexLock lock(mutex_);
  in_use_ -= bytes;
  if (reuses_)
    free_[bytes].push_back(buffer);
  else
    std::free(buffer);
}

size_t BufferPool::roomy(size_t bytes) {
  size_t step = kAlignment;
  while (bytes > 8 * step) step *= 2;
  return (bytes + step - 1) / step * step;
}

}  // namespace p3
