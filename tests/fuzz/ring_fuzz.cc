// Shared memory whose other side writes what it likes: counters, bytes and sleeping flags, at any time. Reads and
// writes stay inside the ring, and none goes on for ever.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include "input.h"
#include "p3/error.h"
#include "p3/ring_stream.h"

namespace {

constexpr size_t kRing = 4096, kMemory = 2 * (4096 + kRing);

// A descriptor that is no ring, or one of another size: refused, never mapped beyond its end.
void offer_other_memory(p3::Input& input) {
  p3::RingStream::Descriptors descriptors = p3::RingStream::make(kRing);
  ::close(descriptors[0]);
  descriptors[0] = memfd_create("fuzz", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  const off_t bytes = input.below(2) == 0 ? static_cast<off_t>(kMemory) : static_cast<off_t>(input.below(1 << 20));
  p3::require(ftruncate(descriptors[0], bytes) == 0);
  if (input.below(2) == 0) fcntl(descriptors[0], F_ADD_SEALS, F_SEAL_SHRINK);
  int ends[2];
  p3::require(socketpair(AF_UNIX, SOCK_STREAM, 0, ends) == 0);
  try {
    p3::RingStream stream(ends[1], descriptors, false);
    char byte = 0;
    iovec part{&byte, 1};
    stream.write(&part, 1);
    stream.read(&part, 1);
  } catch (const p3::Error&) {
  }
  ::close(ends[0]);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace p3;
  Input input(data, size);
  if (input.byte() == 255) {
    offer_other_memory(input);
    return 0;
  }
  const RingStream::Descriptors made = RingStream::make(kRing);
  char* const memory = static_cast<char*>(mmap(nullptr, kMemory, PROT_READ | PROT_WRITE, MAP_SHARED, made[0], 0));
  require(memory != MAP_FAILED);
  int ends[2];
  require(socketpair(AF_UNIX, SOCK_STREAM, 0, ends) == 0);
  {
    RingStream stream(ends[1], made, input.below(2) == 0);
    for (int step = 0; step < 64 && !input.empty(); ++step) {
      const uint32_t action = input.below(4);
      if (action < 2) {  // the peer writes a counter, a flag, or anything
        static constexpr size_t kFields[] = {0, 64, 128, 192, 256};
        const size_t at = input.below(2) * (4096 + kRing) + kFields[input.below(5)];
        uint64_t value = input.number<uint64_t>();
        if (input.below(2) == 0) value %= 2 * kRing;
        std::memcpy(memory + at, &value, at % (4096 + kRing) == 128 ? 4 : sizeof value);
        if (input.byte() == 1) ::shutdown(ends[0], SHUT_WR);
        if (input.byte() == 1) (void)!::send(ends[0], "x", 1, MSG_NOSIGNAL);
        continue;
      }
      std::vector<char> first(input.below(9000)), second(input.below(200));
      const iovec parts[] = {{first.data(), first.size()}, {second.data(), second.size()}};
      const IoResult result = action == 2 ? stream.read(parts, 2) : stream.write(parts, 2);
      require(result.bytes <= first.size() + second.size());
      require(result.error == 0 || result.bytes == 0);
    }
  }
  ::close(ends[0]);
  munmap(memory, kMemory);
  return 0;
}
