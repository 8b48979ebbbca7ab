// A Stream through memory that two processes of one machine share: a bounded ring each way.
//
// One copy into the ring and one out of it, both in user space and, as the ring is small, in the cache: about a third
// of the processor time of a loopback socket. Bounded, because what lies in the ring is below the priority queue.
//
// The maker creates the memory (an unnamed memfd: nothing to leave behind, whatever kills the processes) and passes all
// descriptors to the other side over a connected AF_UNIX socket, which then carries nothing more: its end only says
// that the peer is gone. A side that finds its ring empty (or full) says so in the shared memory and sleeps; the other
// wakes it through an eventfd. A busy ring makes no system calls.
#pragma once

#include <sys/epoll.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "p3/stream.h"

namespace p3 {

class RingStream : public Stream {
 public:
  // memory; then the eventfds "bytes came" and "room was made" of the maker's outgoing ring; then of its incoming one.
  using Descriptors = std::array<int, 5>;

  // Throws Error(kUsage) where the kernel lacks what this needs. `bytes_each_way` is a power of two, at least 4096.
  static Descriptors make(size_t bytes_each_way);

  // Owns the socket and the descriptors, also if it throws: Error(kProtocol) if the memory is not what make() makes.
  RingStream(int socket, const Descriptors& descriptors, bool is_maker);
  ~RingStream() override;

  bool is_local() const override { return true; }
  IoResult write(const iovec* parts, int count) override;
  IoResult read(const iovec* parts, int count) override;
  int read_fd() const override { return read_epoll_; }
  int write_fd() const override { return out_.room_was_made; }
  uint32_t write_event() const override { return EPOLLIN; }
  void end_writing() override;
  void close() override;

 private:
  // In the shared memory; each cache line is written by one side alone, except for the sleeping flags.
  struct Control {
    alignas(64) std::atomic<uint64_t> written;  // bytes since the start; by the writer
    alignas(64) std::atomic<uint64_t> taken;    // by the reader
    alignas(64) std::atomic<uint32_t> reader_sleeps;
    alignas(64) std::atomic<uint32_t> writer_sleeps;
  };
  static_assert(std::atomic<uint64_t>::is_always_lock_free && std::atomic<uint32_t>::is_always_lock_free);

  struct Ring {
    Control* control = nullptr;
    char* data = nullptr;
    int bytes_came = -1;
    int room_was_made = -1;
  };

  size_t copy_in(const char* from, size_t size);
  size_t copy_out(char* to, size_t size);
  void wake_reader();
  void raise(int event);
  void map(int memory);

  int socket_;
  int read_epoll_ = -1;
  Ring out_, in_;
  void* mapping_ = nullptr;
  size_t mapping_bytes_ = 0;
  size_t capacity_ = 0;  // of each ring, a power of two
};

}  // namespace p3
