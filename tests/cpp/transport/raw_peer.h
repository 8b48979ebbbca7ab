// The other end of a van, played by the test byte by byte: to see what really leaves, and to send what no node would.
#pragma once

#include <gtest/gtest.h>
#include <linux/tcp.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "p3/node.h"
#include "p3/socket_stream.h"
#include "p3/wire.h"

namespace p3 {

constexpr int kDeadlineMs = 20000;

// Longer than any test lasts, however slow or often stopped the machine is.
constexpr double kForeverS = 10'000;

// Of a node to which time means nothing: no heartbeat comes between frames, and nobody counts as dead.
inline NodeOptions timeless(const std::string& label) {
  NodeOptions made;
  made.label = label;
  made.timeout_s = kForeverS;
  made.heartbeat_s = kForeverS / 10;
  return made;
}

// Two ends of one connection: {ours, the core's}. Small buffers make the van as slow as the test reads.
// `address_of_host`: of the end that accepts, in the host's order of bytes.
inline std::pair<int, int> tcp_pair(int buffer_bytes = 0, in_addr_t address_of_host = INADDR_LOOPBACK,
                                    int segment_bytes = 0) {
  const int listener = socket(AF_INET, SOCK_STREAM, 0);
  const int client = socket(AF_INET, SOCK_STREAM, 0);
  if (buffer_bytes > 0) {
    for (int fd : {listener, client}) {
      setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &buffer_bytes, sizeof buffer_bytes);
      setsockopt(fd, SOL_SOCKET, SO_RCVBUF, &buffer_bytes, sizeof buffer_bytes);
    }
  }
  if (segment_bytes > 0) {
    for (int fd : {listener, client}) setsockopt(fd, IPPROTO_TCP, TCP_MAXSEG, &segment_bytes, sizeof segment_bytes);
  }
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(address_of_host);
  socklen_t length = sizeof address;
  EXPECT_EQ(bind(listener, reinterpret_cast<sockaddr*>(&address), length), 0);
  EXPECT_EQ(listen(listener, 1), 0);
  EXPECT_EQ(getsockname(listener, reinterpret_cast<sockaddr*>(&address), &length), 0);
  EXPECT_EQ(connect(client, reinterpret_cast<sockaddr*>(&address), length), 0);
  const int server = accept(listener, nullptr, nullptr);
  ::close(listener);
  return {client, server};
}

// As to another machine: that of the second end is an address that no network card here has.
inline std::pair<int, int> far_tcp_pair() { return tcp_pair(0, INADDR_LOOPBACK + 1); }

inline std::pair<int, int> unix_pair() {
  int ends[2];
  EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, ends), 0);
  return {ends[0], ends[1]};
}

// The core's end of a pair as a node takes it.
inline std::unique_ptr<Stream> stream_of(int fd) { return std::make_unique<SocketStream>(fd, 128 << 10); }

class RawPeer {
 public:
  explicit RawPeer(int fd) : fd_(fd) {}
  ~RawPeer() { close(); }
  RawPeer(const RawPeer&) = delete;
  RawPeer(RawPeer&& other) noexcept : payload(std::move(other.payload)), fd_(std::exchange(other.fd_, -1)) {}

  RawPeer& operator=(RawPeer&& other) noexcept {
    close();
    payload = std::move(other.payload);
    fd_ = std::exchange(other.fd_, -1);
    return *this;
  }

  void close() {
    if (fd_ >= 0) ::close(fd_);
    fd_ = -1;
  }

  void send(const Header& header, const void* data = nullptr) {
    send_bytes(&header, sizeof header);
    if (header.payload_bytes > 0) send_bytes(data, header.payload_bytes);
  }

  void send_bytes(const void* data, size_t size) {
    const char* at = static_cast<const char*>(data);
    while (size > 0) {
      const ssize_t n = ::send(fd_, at, size, MSG_NOSIGNAL);
      if (n <= 0) return;  // the core has closed; the test looks at why
      at += n;
      size -= static_cast<size_t>(n);
    }
  }

  // The next frame, but heartbeats only if asked for, its payload in `payload`. False at the end of the connection or the
  // deadline.
  bool receive(Header& header, bool heartbeats = false) {
    do {
      if (!receive_bytes(&header, sizeof header)) return false;
      payload.resize(header.payload_bytes);
      if (!receive_bytes(payload.data(), payload.size())) return false;
    } while (header.kind == FrameKind::kPing && !heartbeats);
    return true;
  }

  Header must_receive() {
    Header header;
    EXPECT_TRUE(receive(header)) << "no frame came";
    return header;
  }

  // The text of the kFail frame that must come, whatever comes before it.
  std::string receive_failure() {
    Header header;
    while (receive(header))
      if (header.kind == FrameKind::kFail) return {payload.begin(), payload.end()};
    return "the connection ended without a reason";
  }

  bool readable(int timeout_ms) {
    pollfd poll_fd{fd_, POLLIN, 0};
    return poll(&poll_fd, 1, timeout_ms) > 0;
  }

  std::vector<char> payload;

 private:
  bool receive_bytes(void* data, size_t size) {
    char* at = static_cast<char*>(data);
    while (size > 0) {
      if (!readable(kDeadlineMs)) return false;
      const ssize_t n = recv(fd_, at, size, 0);
      if (n <= 0) return false;
      at += n;
      size -= static_cast<size_t>(n);
    }
    return true;
  }

  int fd_;
};

// Until `holds`, or the deadline; says which.
template <typename Predicate>
bool eventually(Predicate holds) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::milliseconds(kDeadlineMs);
  while (!holds()) {
    if (std::chrono::steady_clock::now() > deadline) return false;
    std::this_thread::yield();
  }
  return true;
}

// Waits for an eventfd as the owner of a node would.
inline bool wait_readable(int fd) {
  pollfd poll_fd{fd, POLLIN, 0};
  return poll(&poll_fd, 1, kDeadlineMs) > 0;
}

}  // namespace p3
