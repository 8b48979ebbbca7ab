// The seam between vans and the operating system: a non-blocking, ordered, reliable byte stream.
// Threads: one reader and one writer at a time, which may be different threads.
#pragma once

#include <sys/uio.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>

namespace p3 {

class LinkRate;

struct IoResult {
  size_t bytes = 0;
  int error = 0;         // errno; EAGAIN: nothing can move now. With bytes > 0 it is 0.
  bool end = false;      // read: the peer closed its side
  bool emptied = false;  // read: nothing more was there
};

class Stream {
 public:
  virtual ~Stream() = default;
  Stream() = default;
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  // Takes as many bytes as fit. Fewer than asked means: full, wait for the write event.
  virtual IoResult write(const iovec* parts, int count) = 0;
  virtual IoResult read(const iovec* parts, int count) = 0;
  // The reader has no use for less than so many bytes, at least 1, or the end: until this is called again the read event
  // need not come before they are there. It may, and always does when they are. Called by the reader.
  virtual void await(size_t /*bytes*/) {}

  // For epoll. The read event is a level (EPOLLIN while read() may move bytes or report the end), the write event an
  // edge (when write() may move bytes again after it was full).
  virtual int read_fd() const = 0;
  virtual int write_fd() const = 0;
  virtual uint32_t write_event() const = 0;

  // The other end is a process of this machine, which shares its link to others.
  virtual bool is_local() const { return false; }

  // Before the first write: with the other streams of this process. Those that stay on the machine have no part in it.
  virtual void share_link(LinkRate*) {}

  // Whether the host's own queue may have had no room for what write() has taken. Linux keeps that in the socket, and if
  // nothing is in flight whose acknowledgement would make it try again, it waits 0.2 s, and then 0.5 s.
  virtual bool may_stand_still() const { return false; }
  // So long after a write, of a stream that may stand still: whatever does is sent. True: it must be asked once more after
  // that time, as something is still on its way. Called by the writer.
  static constexpr std::chrono::milliseconds kTryAgainAfter{20};
  virtual bool try_again() { return false; }

  // Some of what write() was last offered is being sent, though not counted yet: the next write must begin with the
  // same bytes. Called by the writer.
  virtual bool holds_unwritten() const { return false; }

  // Before the first write: where the system calls of both sides are counted from here on, but for those inside OpenSSL.
  void count_calls_in(std::atomic<uint64_t>* calls) { calls_ = calls; }

  // No more writes; the peer reads what was written, then the end.
  virtual void end_writing() = 0;
  // Closes the descriptors and nothing else. Safe in the child of a fork.
  virtual void close() = 0;

 protected:
  void note_call() const {
    if (calls_ != nullptr) calls_->fetch_add(1, std::memory_order_relaxed);
  }

 private:
  std::atomic<uint64_t>* calls_ = nullptr;
};

}  // namespace p3
