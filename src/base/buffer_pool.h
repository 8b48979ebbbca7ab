// Reused, aligned buffers, by exact size: slices have one size but for the last of each key. What may have any size is
// taken with room to spare, roomy(), so that few sizes come up.
// Threads: any. Memory: what was given back is kept for the next round and freed with the pool, unless it is not to be
//         reused, as what stays for long has sizes of its own.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <unordered_map>
#include <vector>

#include "p3/thread_annotations.h"

namespace p3 {

class BufferPool {
 public:
  static constexpr size_t kAlignment = 64;  // a cache line and the widest vector

  explicit BufferPool(bool reuses = true) : reuses_(reuses) {}
  BufferPool(const BufferPool&) = delete;
  BufferPool& operator=(const BufferPool&) = delete;
  ~BufferPool();

  // Never null, also for 0 bytes. Contents are undefined. Throws std::bad_alloc.
  void* take(size_t bytes);
  void give_back(void* buffer, size_t bytes);

  // At least so many bytes, and less than a quarter more: four sizes between a power of two and the next.
  static size_t roomy(size_t bytes);

  uint64_t bytes_in_use() const {
    MutexLock lock(mutex_);
    return in_use_;
  }
  uint64_t peak_bytes() const {
    MutexLock lock(mutex_);
    return peak_;
  }

 private:
  const bool reuses_;
  mutable Mutex mutex_;
  std::unordered_map<size_t, std::vector<void*>> free_ P3_GUARDED_BY(mutex_);
  uint64_t in_use_ P3_GUARDED_BY(mutex_) = 0;
  uint64_t peak_ P3_GUARDED_BY(mutex_) = 0;
};

// A buffer that goes back to its pool by itself, or none.
class PooledBuffer {
 public:
  PooledBuffer() = default;
  PooledBuffer(BufferPool& pool, size_t bytes) : PooledBuffer(pool, pool.take(bytes), bytes) {}
  // Takes over a buffer of the pool; null: none.
  PooledBuffer(BufferPool& pool, void* data, size_t bytes) : data_(data, {&pool, bytes}) {}

  explicit operator bool() const { return data_ != nullptr; }
  void* data() const { return data_.get(); }
  size_t bytes() const { return data_ == nullptr ? 0 : data_.get_deleter().bytes; }
  // The caller's from now on.
  void* release() { return data_.release(); }
  void give_back() { data_.reset(); }

 private:
  struct GiveBack {
    BufferPool* pool;
    size_t bytes;
    void operator()(void* data) const { pool->give_back(data, bytes); }
  };

  std::unique_ptr<void, GiveBack> data_;
};

}  // namespace p3
