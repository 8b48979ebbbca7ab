// Reused, aligned buffers, by exact size: slices have one size but for the last of each key. What may have any size is
// taken with room to spare, roomy(), so that few sizes come up.
// Threads: any. Memory: what was given back is kept for the next round and freed with the pool.
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <unordered_map>
#include <vector>

namespace p3 {

class BufferPool {
 public:
  static constexpr size_t kAlignment = 64;  // a cache line and the widest vector

  BufferPool() = default;
  BufferPool(const BufferPool&) = delete;
  BufferPool& operator=(const BufferPool&) = delete;
  ~BufferPool();

  // Never null, also for 0 bytes. Contents are undefined. Throws std::bad_alloc.
  void* take(size_t bytes);
  void give_back(void* buffer, size_t bytes);

  // At least so many bytes, and less than a quarter more: four sizes between a power of two and the next.
  static size_t roomy(size_t bytes);

  uint64_t bytes_in_use() const;
  uint64_t peak_bytes() const;

 private:
  mutable std::mutex mutex_;
  std::unordered_map<size_t, std::vector<void*>> free_;
  uint64_t in_use_ = 0, peak_ = 0;
};

}  // namespace p3
