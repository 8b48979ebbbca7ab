#include "p3/ring_stream.h"

#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>

#include "base/epoll.h"
#include "p3/error.h"

namespace p3 {
namespace {

constexpr size_t kControlBytes = 4096;
// Made visible to the other side at this grain, so that both copy at the same time.
constexpr size_t kGrainBytes = 64 << 10;

Error system_error(ErrorKind kind, const char* call) {
  return Error(kind, std::string("shared memory between two processes: ") + call + ": " + strerror(errno));
}

}  // namespace

RingStream::Descriptors RingStream::make(size_t bytes_each_way) {
  if (bytes_each_way < 4096 || (bytes_each_way & (bytes_each_way - 1)) != 0)
    throw Error(ErrorKind::kUsage, "a ring of " + std::to_string(bytes_each_way) +
                                       " bytes: the size must be a power of two, at least 4096");
  Descriptors made;
  made.fill(-1);
  made[0] = memfd_create("p3-ring", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  bool good = made[0] >= 0 && ftruncate(made[0], static_cast<off_t>(2 * (kControlBytes + bytes_each_way))) == 0 &&
              fcntl(made[0], F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) == 0;
  for (size_t i = 1; i < made.size() && good; ++i) good = (made[i] = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) >= 0;
  if (!good) {
    const Error error = system_error(ErrorKind::kUsage, "memfd_create or eventfd");
    for (int& fd : made) close_if_open(fd);
    throw error;
  }
  return made;
}

RingStream::RingStream(int socket, const Descriptors& descriptors, bool is_maker) : socket_(socket) {
  Ring& first = is_maker ? out_ : in_;
  Ring& second = is_maker ? in_ : out_;
  first.bytes_came = descriptors[1];
  first.room_was_made = descriptors[2];
  second.bytes_came = descriptors[3];
  second.room_was_made = descriptors[4];
  try {
    map(descriptors[0]);
    char* base = static_cast<char*>(mapping_);
    for (Ring* ring : {&first, &second}) {
      ring->control = reinterpret_cast<Control*>(base);
      ring->data = base + kControlBytes;
      base += kControlBytes + capacity_;
    }
    // Both readers begin asleep: the first byte wakes them. The other side comes later, and may find bytes already.
    if (is_maker)
      for (Ring* ring : {&first, &second}) ring->control->reader_sleeps.store(1);
    read_epoll_ = epoll_create1(EPOLL_CLOEXEC);
    if (read_epoll_ < 0) throw system_error(ErrorKind::kStopped, "epoll_create1");
    for (int fd : {in_.bytes_came, socket_}) {
      epoll_event event{};
      event.events = EPOLLIN | EPOLLRDHUP;
      if (epoll_ctl(read_epoll_, EPOLL_CTL_ADD, fd, &event) < 0) throw system_error(ErrorKind::kProtocol, "epoll_ctl");
    }
  } catch (...) {
    if (mapping_ != nullptr) munmap(mapping_, mapping_bytes_);
    RingStream::close();
    throw;
  }
}

// Takes the descriptor. The seals make sure that a peer cannot pull the memory away from under a copy.
void RingStream::map(int memory) {
  struct stat status{};
  const int seals = fcntl(memory, F_GET_SEALS);
  const bool good = fstat(memory, &status) == 0 && seals >= 0 && (seals & F_SEAL_SHRINK) != 0;
  mapping_bytes_ = static_cast<size_t>(status.st_size);
  capacity_ = mapping_bytes_ / 2 - std::min(kControlBytes, mapping_bytes_ / 2);
  if (!good || capacity_ < 4096 || (capacity_ & (capacity_ - 1)) != 0 ||
      mapping_bytes_ != 2 * (kControlBytes + capacity_)) {
    ::close(memory);
    throw Error(ErrorKind::kProtocol, "the memory that a peer offered to share is not a ring");
  }
  void* mapping = mmap(nullptr, mapping_bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, memory, 0);
  const int error = errno;
  ::close(memory);
  errno = error;
  if (mapping == MAP_FAILED) throw system_error(ErrorKind::kProtocol, "mmap");
  mapping_ = mapping;
}

RingStream::~RingStream() {
  RingStream::close();
  munmap(mapping_, mapping_bytes_);
}

IoResult RingStream::write(const iovec* parts, int count) {
  Control& control = *out_.control;
  IoResult result;
  for (int i = 0; i < count; ++i) {
    const char* at = static_cast<const char*>(parts[i].iov_base);
    size_t left = parts[i].iov_len;
    while (left > 0) {
      const size_t moved = copy_in(at, left);
      at += moved;
      left -= moved;
      result.bytes += moved;
      if (moved > 0) continue;
      // Full. Ask to be woken, and look once more: a reader that made room just before does not know of the request.
      control.writer_sleeps.store(1);
      const uint64_t used = control.written.load() - control.taken.load();
      if (used > capacity_ / 2) {
        if (result.bytes == 0) result.error = EAGAIN;
        wake_reader();
        return result;
      }
      control.writer_sleeps.store(0);
    }
  }
  wake_reader();  // once for the frame, not for each grain: a waking reader may take the processor from us
  return result;
}

IoResult RingStream::read(const iovec* parts, int count) {
  Control& control = *in_.control;
  IoResult result;
  for (int i = 0; i < count; ++i) {
    char* at = static_cast<char*>(parts[i].iov_base);
    size_t left = parts[i].iov_len;
    while (left > 0) {
      const size_t moved = copy_out(at, left);
      at += moved;
      left -= moved;
      result.bytes += moved;
      if (moved > 0) continue;
      if (result.bytes > 0) return result;
      if (control.written.load() - control.taken.load() > capacity_) return {0, EPROTO, false};
      // Empty. The same dance as in write(); the event is cleared before the last look.
      note_call();
      clear_event(in_.bytes_came);
      control.reader_sleeps.store(1);
      if (control.written.load() != control.taken.load()) {
        // The event was cleared with bytes there; while there are any it must be set, or it would be no level.
        if (control.reader_sleeps.exchange(0) != 0) raise(in_.bytes_came);
        continue;
      }
      char unused;
      note_call();
      const ssize_t n = recv(socket_, &unused, 1, MSG_DONTWAIT);
      if (n > 0) return {0, EPROTO, false};  // nothing is ever sent there
      if (n < 0 && (errno == EWOULDBLOCK || errno == EINTR)) return {0, EAGAIN, false};
      const int error = n < 0 ? errno : 0;
      // The peer is gone. It may have written its last bytes between our look and its end.
      if (control.written.load() != control.taken.load()) continue;
      return {0, error, n == 0};
    }
  }
  return result;
}

// At most one grain; 0: the ring is full.
size_t RingStream::copy_in(const char* from, size_t size) {
  Control& control = *out_.control;
  const uint64_t written = control.written.load(std::memory_order_relaxed);
  const uint64_t used = written - control.taken.load(std::memory_order_acquire);
  if (used >= capacity_) return 0;
  size = std::min({size, kGrainBytes, capacity_ - static_cast<size_t>(used)});
  const size_t at = written & (capacity_ - 1);
  const size_t before_end = std::min(size, capacity_ - at);
  std::memcpy(out_.data + at, from, before_end);
  std::memcpy(out_.data, from + before_end, size - before_end);
  control.written.store(written + size);
  return size;
}

void RingStream::raise(int event) {
  note_call();
  raise_event(event);
}

void RingStream::wake_reader() {
  Control& control = *out_.control;
  if (control.reader_sleeps.load() != 0 && control.reader_sleeps.exchange(0) != 0) raise(out_.bytes_came);
}

// At most one grain; 0: the ring is empty, or its counters are nonsense.
size_t RingStream::copy_out(char* to, size_t size) {
  Control& control = *in_.control;
  const uint64_t taken = control.taken.load(std::memory_order_relaxed);
  const uint64_t used = control.written.load(std::memory_order_acquire) - taken;
  if (used == 0 || used > capacity_) return 0;
  size = std::min({size, kGrainBytes, static_cast<size_t>(used)});
  const size_t at = taken & (capacity_ - 1);
  const size_t before_end = std::min(size, capacity_ - at);
  std::memcpy(to, in_.data + at, before_end);
  std::memcpy(to + before_end, in_.data, size - before_end);
  control.taken.store(taken + size);
  // Not before half is free: a writer that is woken for each grain does nothing but wake and sleep.
  if (used - size <= capacity_ / 2 && control.writer_sleeps.load() != 0 && control.writer_sleeps.exchange(0) != 0)
    raise(in_.room_was_made);
  return size;
}

void RingStream::end_writing() { shutdown(socket_, SHUT_WR); }

void RingStream::close() {
  for (int* fd : {&socket_, &read_epoll_, &out_.bytes_came, &out_.room_was_made, &in_.bytes_came, &in_.room_was_made})
    close_if_open(*fd);
}

}  // namespace p3
