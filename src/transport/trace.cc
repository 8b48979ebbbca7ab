#include "p3/trace.h"

#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>

#include "base/epoll.h"

namespace p3 {
namespace {

std::atomic<uint64_t> next_id{1};

}  // namespace

Recorder::Recorder(int fd) : id_(next_id++), fd_(fd) { write_bytes(kTraceMagic, sizeof kTraceMagic); }

Recorder::~Recorder() { close(); }

void Recorder::record(const TraceEvent& event) {
  Chunk& chunk = own_chunk();
  const uint32_t count = chunk.count.load(std::memory_order_relaxed);
  chunk.events[count] = event;
  chunk.count.store(count + 1, std::memory_order_release);  // close() may be reading what lies before
  if (count + 1 < kChunkEvents) return;
  MutexLock lock(mutex_);
  write(chunk);
  chunk.count.store(0, std::memory_order_relaxed);
}

void Recorder::close() {
  MutexLock lock(mutex_);
  for (auto& [thread, chunk] : chunks_) write(*chunk);
  TraceEvent end;
  end.time_ns = std::chrono::nanoseconds(Clock::now().time_since_epoch()).count();
  end.kind = TraceKind::kEnd;
  write_bytes(&end, sizeof end);
  close_if_open(fd_);
}

Recorder::Chunk& Recorder::own_chunk() {
  thread_local uint64_t owner = 0;
  thread_local Chunk* own = nullptr;
  if (owner != id_) {
    MutexLock lock(mutex_);
    auto& chunk = chunks_[std::this_thread::get_id()];
    if (chunk == nullptr) chunk = std::make_unique<Chunk>();
    own = chunk.get();
    owner = id_;
  }
  return *own;
}

void Recorder::write(const Chunk& chunk) {
  write_bytes(chunk.events, chunk.count.load(std::memory_order_acquire) * sizeof(TraceEvent));
}

void Recorder::write_bytes(const void* data, size_t size) {
  const char* next = static_cast<const char*>(data);
  while (fd_ >= 0 && size > 0) {
    const ssize_t written = ::write(fd_, next, size);
    if (written >= 0) {
      next += written;
      size -= static_cast<size_t>(written);
    } else if (errno != EINTR) {
      std::fprintf(stderr, "p3: a file of P3_TRACE cannot be written: %s. The trace ends here.\n", strerror(errno));
      close_if_open(fd_);
    }
  }
}

}  // namespace p3
