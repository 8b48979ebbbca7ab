// The frames of a byte stream, however reads cut it: no byte is lost, added or moved.
#include <sys/uio.h>

#include <cerrno>
#include <memory>
#include <utility>

#include "input.h"
#include "transport/van.h"

namespace p3 {
namespace {

constexpr uint32_t kMaxPayload = 4096;

// Gives what the input says, in pieces of the sizes that it says.
class Bytes : public Stream {
 public:
  Bytes(std::vector<char> content, std::vector<char> cuts) : content_(std::move(content)), cuts_(std::move(cuts)) {}

  IoResult read(const iovec* parts, int count) override {
    if (given_ == content_.size()) return {0, 0, true};
    const size_t cut = cuts_.empty() ? 0 : static_cast<unsigned char>(cuts_[cut_++ % cuts_.size()]);
    size_t allowed = cut == 0 ? content_.size() : cut;
    IoResult result;
    for (int i = 0; i < count; ++i) {
      size_t size = parts[i].iov_len < allowed ? parts[i].iov_len : allowed;
      if (size > content_.size() - given_) size = content_.size() - given_;
      if (size > 0) std::memcpy(parts[i].iov_base, content_.data() + given_, size);
      given_ += size;
      allowed -= size;
      result.bytes += size;
    }
    return result;
  }
  IoResult write(const iovec*, int) override { return {0, EAGAIN, false}; }
  int read_fd() const override { return -1; }
  int write_fd() const override { return -1; }
  uint32_t write_event() const override { return 0; }
  void end_writing() override {}
  void close() override {}

 private:
  const std::vector<char> content_, cuts_;
  size_t given_ = 0, cut_ = 0;
};

}  // namespace
}  // namespace p3

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace p3;
  Input input(data, size);
  const bool checksums = input.byte() & 1;
  std::vector<char> cuts = input.bytes(input.below(16));
  // Frames that mostly make sense, so that what follows them is looked at as well.
  std::vector<char> content;
  while (!input.empty() && content.size() < 32 * kMaxPayload) {
    Header header;
    header.kind = static_cast<FrameKind>(1 + input.below(15));
    header.slice = input.byte();
    header.payload_bytes = carries_slice(header.kind) ? input.below(300) : 0;
    if (header.kind == FrameKind::kFields) header.payload_bytes = 8 * input.below(20);
    const size_t mutated = input.byte();
    if (mutated < sizeof header) reinterpret_cast<uint8_t*>(&header)[mutated] = input.byte();
    const std::vector<char> payload = input.bytes(header.payload_bytes < 300 ? header.payload_bytes : input.below(300));
    if (checksums && mutated != 255 && payload.size() == header.payload_bytes)
      header.crc32c = checksum_of(header, payload.data());
    const char* bytes = reinterpret_cast<const char*>(&header);
    content.insert(content.end(), bytes, bytes + sizeof header);
    content.insert(content.end(), payload.begin(), payload.end());
  }

  NodeOptions options;
  options.checksums = checksums;
  Van van(0, std::make_unique<Bytes>(content, std::move(cuts)), "a peer", 0, options, /*is_bounded=*/false);
  std::vector<char> payload, seen;
  while (van.read_some() == Van::Progress::kMoved) {
    for (Van::Event event = van.next(); event != Van::Event::kNothing; event = van.next()) {
      const Header& header = van.received_header();
      if (event == Van::Event::kHeader) {
        if (!malformed(header, checksums).empty() || header.payload_bytes > kMaxPayload) return 0;
        payload = std::vector<char>(header.payload_bytes);
        van.payload_goes_to(payload.data());
        continue;
      }
      const char* bytes = reinterpret_cast<const char*>(&header);
      seen.insert(seen.end(), bytes, bytes + sizeof header);
      seen.insert(seen.end(), payload.begin(), payload.end());
      require(seen.size() <= content.size() && std::memcmp(seen.data(), content.data(), seen.size()) == 0);
      if (!van.is_intact()) return 0;
    }
  }
  return 0;
}
