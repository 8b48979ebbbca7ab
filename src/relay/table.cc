#include "relay/table.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "relay/failure.h"

namespace p3::relay {

void Table::make(const std::string& path, int hosts) {
  const int fd = open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
  if (fd < 0) throw failure("making " + path);
  const bool is_made = ftruncate(fd, static_cast<off_t>(sizeof(HostRecord)) * hosts) == 0;
  close(fd);
  if (!is_made) throw failure("making " + path);
}

Table::Table(const std::string& path) {
  const int fd = open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (fd < 0) throw failure("opening " + path);
  struct stat status{};
  void* memory = MAP_FAILED;
  if (fstat(fd, &status) == 0)
    memory = mmap(nullptr, static_cast<size_t>(status.st_size), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  const int error = errno;
  close(fd);
  errno = error;
  if (memory == MAP_FAILED) throw failure("mapping " + path);
  records_ = static_cast<HostRecord*>(memory);
  hosts_ = static_cast<int>(static_cast<size_t>(status.st_size) / sizeof(HostRecord));
}

Table::~Table() { munmap(records_, sizeof(HostRecord) * static_cast<size_t>(hosts_)); }

}  // namespace p3::relay
