// What the loops over epoll have in common, and eventfds as flags: raised by any thread or process, cleared by who waits.
#pragma once

#include <sys/epoll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <string>

#include "p3/error.h"

namespace p3 {

// The result of a system call; Error(kUsage) if it has failed.
inline int checked(int result, const char* call) {
  if (result < 0) throw Error(ErrorKind::kUsage, std::string(call) + ": " + strerror(errno));
  return result;
}

// `context` comes back in the events; null: the wake-up.
inline void add_to_epoll(int epoll, int fd, uint32_t events, void* context) {
  epoll_event event{};
  event.events = events;
  event.data.ptr = context;
  checked(epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event), "epoll_ctl");
}

inline void raise_event(int fd) {
  const uint64_t one = 1;
  while (::write(fd, &one, sizeof one) < 0 && errno == EINTR) continue;
}

inline void clear_event(int fd) {
  uint64_t value;
  while (::read(fd, &value, sizeof value) < 0 && errno == EINTR) continue;
}

inline void close_if_open(int& fd) {
  if (fd >= 0) ::close(fd);
  fd = -1;
}

// As many as a clock can count from now on, if `value` is more, or no number.
inline std::chrono::steady_clock::duration seconds(double value) {
  constexpr double kMost = 1e9;
  const std::chrono::duration<double> clamped(value < kMost ? value : kMost);
  return std::chrono::duration_cast<std::chrono::steady_clock::duration>(clamped);
}

inline int milliseconds(double value_s) { return std::max(1, static_cast<int>(value_s * 1e3)); }

}  // namespace p3
