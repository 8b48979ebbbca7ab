// An eventfd as a flag: raised by any thread or process, cleared by who waits for it.
#pragma once

#include <unistd.h>

#include <cerrno>
#include <cstdint>

namespace p3 {

inline void raise_event(int fd) {
  const uint64_t one = 1;
  while (::write(fd, &one, sizeof one) < 0 && errno == EINTR) {
  }
}

inline void clear_event(int fd) {
  uint64_t value;
  while (::read(fd, &value, sizeof value) < 0 && errno == EINTR) {
  }
}

}  // namespace p3
