// The other end of a core under test: sends frames that mostly make sense, each with some of its fields changed.
#pragma once

#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <memory>
#include <utility>
#include <vector>

#include "input.h"
#include "p3/codec.h"
#include "p3/socket_stream.h"
#include "p3/wire.h"
#include "plan/rows.h"
#include "wire/top_k.h"

namespace p3 {

constexpr int kHangMs = 20000;  // nothing takes so long; a core that does has hung
constexpr int kMomentMs = 20;

inline NodeOptions fuzz_node(const char* label, bool checksums) {
  NodeOptions made;
  made.label = label;
  made.checksums = checksums;
  made.heartbeat_s = 0.005;  // a frame that is cut short is waited for as long
  made.timeout_s = 5;
  made.max_held_bytes = 4096;
  return made;
}

// A payload of rows of that partition: mostly sound, in any coding.
inline std::vector<char> rows_payload(Input& input, const KeyPlan& plan, uint32_t partition, size_t row_bytes) {
  const RowRange range = partition_at(plan, partition % slice_count(plan));
  std::vector<int64_t> ids;
  const uint32_t chosen = input.number<uint32_t>();
  for (uint64_t i = 0; i < range.count; ++i)
    if (chosen >> i % 32 & 1) ids.push_back(static_cast<int64_t>(range.first + i));
  const auto pieces = cut_rows(plan, range, ids.data(), 0, ids.size(), row_bytes > 0 && input.below(2) == 1);
  RowsPiece piece = pieces[input.below(static_cast<uint32_t>(pieces.size()))];
  piece.header.touched_rows = static_cast<uint32_t>(ids.size());
  std::vector<char> payload(piece.payload_bytes(row_bytes));
  write_rows(piece, ids.data(), row_bytes, payload.data(), [&](void* to, uint64_t) { input.take(to, row_bytes); });
  for (uint8_t changes = input.byte(); changes > 200; changes = input.byte())
    payload[input.below(static_cast<uint32_t>(payload.size()))] = static_cast<char>(input.byte());
  return payload;
}

// A payload of kTopK, of a slice with so many elements: mostly sound.
inline std::vector<char> top_k_payload(Input& input, size_t elements) {
  std::vector<size_t> offsets;
  const uint32_t chosen = input.number<uint32_t>();
  for (size_t i = 0; i < elements; ++i)
    if (chosen >> i % 32 & 1) offsets.push_back(i);
  std::vector<char> payload(top_k_bytes(offsets.size(), elements));
  TopKWriter writer(payload.data(), offsets.size(), elements);
  for (size_t offset : offsets) writer.add(offset, input.number<float>());
  for (uint8_t changes = input.byte(); changes > 200; changes = input.byte())
    payload[input.below(static_cast<uint32_t>(payload.size()))] = static_cast<char>(input.byte());
  return payload;
}

// A payload of kLargest, of a slice with so many elements: mostly sound.
inline std::vector<char> largest_payload(Input& input, const Compression& compression, size_t elements) {
  std::vector<float> gradient(elements), residual(elements);
  for (float& value : gradient) value = static_cast<float>(input.byte());
  std::vector<char> payload(encoded_bytes(compression, DType::kFloat32, elements));
  encode(compression, gradient.data(), residual.data(), payload.data(), elements);
  for (uint8_t changes = input.byte(); changes > 200; changes = input.byte())
    payload[input.below(static_cast<uint32_t>(payload.size()))] = static_cast<char>(input.byte());
  return payload;
}

class FuzzPeer {
 public:
  // The core's end.
  std::unique_ptr<Stream> connect() {
    int ends[2];
    require(socketpair(AF_UNIX, SOCK_STREAM, 0, ends) == 0);
    fd_ = ends[0];
    return std::make_unique<SocketStream>(ends[1], 128 << 10);
  }
  FuzzPeer() = default;
  FuzzPeer(FuzzPeer&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  ~FuzzPeer() {
    if (fd_ >= 0) ::close(fd_);
  }

  // Where the core does not read, what does not fit is lost: that is for it to find out.
  void send(Input& input, Header header, const std::vector<char>& payload, bool checksums) {
    header.payload_bytes = static_cast<uint32_t>(payload.size());
    uint8_t field = input.byte();
    for (; field >= 128; field = input.byte())
      reinterpret_cast<uint8_t*>(&header)[field % sizeof header] = input.byte();
    if (checksums && field != 1 && header.payload_bytes == payload.size() && has_checksum(header.kind))
      header.crc32c = checksum_of(header, payload.data());
    send_bytes(&header, sizeof header);
    send_bytes(payload.data(), payload.size());
  }
  void end() { ::shutdown(fd_, SHUT_WR); }
  // Gives the core a moment to say more than that it is there, if it is going to, and throws that away.
  void await_answer() {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::milliseconds(kMomentMs);
    pollfd event{fd_, POLLIN, 0};
    while (std::chrono::steady_clock::now() < deadline && poll(&event, 1, kMomentMs) > 0) {
      Header header;
      const ssize_t came = recv(fd_, &header, sizeof header, MSG_DONTWAIT);
      if (came != static_cast<ssize_t>(sizeof header) || header.kind != FrameKind::kPing) return read();
    }
  }
  // Throws away what has come.
  void read() {
    char bytes[4096];
    while (recv(fd_, bytes, sizeof bytes, MSG_DONTWAIT) > 0) continue;
  }

 private:
  void send_bytes(const void* bytes, size_t size) { (void)!::send(fd_, bytes, size, MSG_NOSIGNAL | MSG_DONTWAIT); }

  int fd_ = -1;
};

inline bool becomes_readable(int fd) {
  pollfd event{fd, POLLIN, 0};
  int ready;
  do ready = poll(&event, 1, kHangMs);  // libFuzzer's own alarms interrupt it
  while (ready < 0 && errno == EINTR);
  return ready > 0;
}

}  // namespace p3
