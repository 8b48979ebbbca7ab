// A Stream over TLS 1.3 on a TCP socket: without its key nobody can read or alter what crosses the network.
//
// Both ends have a key for this connection alone, an external PSK that the control plane derives from the job's secret
// and the nonces of the handshake; ECDHE adds forward secrecy. So there are no certificates.
//
// Threads: as every Stream. OpenSSL's object is for one thread at a time, so reader and writer take turns with it, for
//          at most one batch; the writer's system calls are outside.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "p3/socket_stream.h"
#include "p3/thread_annotations.h"

struct ssl_st;  // OpenSSL's SSL

namespace p3 {

class TlsStream : public SocketStream {
 public:
  static constexpr size_t kKeyBytes = 32;
  static bool built_in();  // whether this build has OpenSSL

  // Owns `fd`, even if it throws: Error(kUsage) without OpenSSL in this build. `bytes_per_key`: after so many bytes the
  // writer takes a new key, far below what AES-GCM allows (RFC 8446, 5.5).
  TlsStream(int fd, int notsent_low_water_bytes, const std::string& key, bool connects,
            uint64_t bytes_per_key = uint64_t{64} << 30);
  ~TlsStream() override;

  // One step; call it again when the socket is ready for what it returns. Before anything else. Throws
  // Error(kProtocol): the other end has another key, or does not speak TLS.
  enum class Wait { kNothing, kRead, kWrite };
  Wait handshake();
  // With how many keys it has written so far. The writer's thread.
  uint64_t keys() const { return keys_; }

  IoResult write(const iovec* parts, int count) override;
  IoResult read(const iovec* parts, int count) override;
  // Nothing: the socket holds records, of which nobody knows how many make so many bytes.
  void await(size_t) override {}
  int read_fd() const override { return read_epoll_; }
  bool holds_unwritten() const override { return sealed_bytes_ > 0; }
  void close() override;

 private:
  struct FreeSsl {
    void operator()(ssl_st* ssl) const;
  };

  void seal(const iovec* parts, int count, size_t skip) P3_EXCLUDES(mutex_);
  void set_buffered(bool buffered);

  const std::string key_;
  const uint64_t bytes_per_key_;
  Mutex mutex_;
  std::unique_ptr<ssl_st, FreeSsl> ssl_ P3_GUARDED_BY(mutex_);

  // Writer: records on their way into the socket, and the bytes in them, which count as written when all have left.
  std::vector<char> sealed_;
  size_t sealed_sent_ = 0;
  size_t sealed_bytes_ = 0;
  uint64_t bytes_with_key_ = 0;
  uint64_t keys_ = 1;

  // Reader. No socket event reports bytes that OpenSSL has buffered: an eventfd does, so that readable stays a level.
  int buffered_event_ = -1;
  int read_epoll_ = -1;
  bool buffered_ = false;
  IoResult last_word_;  // an end or an error that came after bytes
};

}  // namespace p3
