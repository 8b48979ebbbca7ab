#include "p3/tls_stream.h"

#include "p3/error.h"

#ifdef P3_HAS_OPENSSL

#include <openssl/bio.h>
#include <openssl/err.h>
#include <openssl/ssl.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "base/epoll.h"

namespace p3 {
namespace {

// Encrypted in one turn and then handed to the kernel in one call: few system calls, and short turns at the SSL object.
constexpr size_t kBatchBytes = 64 << 10;
// Around the records of a batch, at most.
constexpr size_t kOverheadBytes = 512;
constexpr char kIdentity[] = "p3";
// Both have the hash that an external PSK is bound to, SHA-256.
constexpr char kCiphers[] = "TLS_AES_128_GCM_SHA256:TLS_CHACHA20_POLY1305_SHA256";

std::string reason() {
  const unsigned long code = ERR_get_error();
  const char* text = code == 0 ? nullptr : ERR_reason_error_string(code);
  return text == nullptr ? "the connection was closed" : text;
}

Error usage(const char* what) { return Error(ErrorKind::kUsage, "TLS: " + std::string(what) + ": " + reason()); }

const std::string& key_of(SSL* ssl) { return *static_cast<const std::string*>(SSL_get_app_data(ssl)); }

unsigned client_key(SSL* ssl, const char*, char* identity, unsigned size, unsigned char* key, unsigned key_size) {
  if (size < sizeof kIdentity || key_size < key_of(ssl).size()) return 0;
  std::memcpy(identity, kIdentity, sizeof kIdentity);
  std::memcpy(key, key_of(ssl).data(), key_of(ssl).size());
  return static_cast<unsigned>(key_of(ssl).size());
}

unsigned server_key(SSL* ssl, const char* identity, unsigned char* key, unsigned key_size) {
  if (std::strcmp(identity, kIdentity) != 0 || key_size < key_of(ssl).size()) return 0;
  std::memcpy(key, key_of(ssl).data(), key_of(ssl).size());
  return static_cast<unsigned>(key_of(ssl).size());
}

// One for each connection: they are few, and none of OpenSSL's state is shared then.
SSL* new_ssl(bool connects) {
  const std::unique_ptr<SSL_CTX, decltype(&SSL_CTX_free)> context(
      SSL_CTX_new(connects ? TLS_client_method() : TLS_server_method()), SSL_CTX_free);
  if (!context || SSL_CTX_set_min_proto_version(context.get(), TLS1_3_VERSION) != 1 ||
      SSL_CTX_set_ciphersuites(context.get(), kCiphers) != 1)
    throw usage("OpenSSL has no TLS 1.3");
  SSL_CTX_set_num_tickets(context.get(), 0);  // no session is ever resumed
  // A stranger in between could answer with a certificate instead of the key: none is trusted. The
  // accepting side has none to show, and so can only go by the key.
  if (connects) SSL_CTX_set_verify(context.get(), SSL_VERIFY_PEER, nullptr);
  SSL_CTX_set_read_ahead(context.get(), 1);
  SSL_CTX_set_default_read_buffer_len(context.get(), kBatchBytes);
#ifdef SSL_OP_IGNORE_UNEXPECTED_EOF
  // Frames and control messages have goodbyes of their own: one way may end here as on a bare socket.
  SSL_CTX_set_options(context.get(), SSL_OP_IGNORE_UNEXPECTED_EOF);
#endif
  if (connects)
    SSL_CTX_set_psk_client_callback(context.get(), client_key);
  else
    SSL_CTX_set_psk_server_callback(context.get(), server_key);
  SSL* ssl = SSL_new(context.get());
  if (ssl == nullptr) throw usage("SSL_new");
  return ssl;
}

// Of a call of OpenSSL that moved nothing, right behind it.
IoResult outcome(SSL* ssl, int returned) {
  const int system_error = errno;
  switch (SSL_get_error(ssl, returned)) {
    case SSL_ERROR_WANT_READ:
    case SSL_ERROR_WANT_WRITE:
      return {0, EAGAIN, false};
    case SSL_ERROR_ZERO_RETURN:
      return {0, 0, true};
    case SSL_ERROR_SYSCALL:  // without an error: a bare end, as OpenSSL 1.1.1 has it
      return {0, system_error, system_error == 0};
    default:
      return {0, EBADMSG, false};
  }
}

}  // namespace

void TlsStream::FreeSsl::operator()(ssl_st* ssl) const { SSL_free(ssl); }

bool TlsStream::built_in() { return true; }

TlsStream::TlsStream(int fd, int notsent_low_water_bytes, const std::string& key, bool connects, uint64_t bytes_per_key)
    : SocketStream(fd, notsent_low_water_bytes), key_(key), bytes_per_key_(bytes_per_key) {
  if (key.size() != kKeyBytes) throw Error(ErrorKind::kUsage, "TLS: a key has 32 bytes");
  ssl_.reset(new_ssl(connects));
  SSL_set_app_data(ssl_.get(), const_cast<std::string*>(&key_));
  BIO* in = BIO_new_fd(fd, BIO_NOCLOSE);
  BIO* out = BIO_new_fd(fd, BIO_NOCLOSE);
  if (in == nullptr || out == nullptr) throw usage("BIO_new");
  SSL_set0_rbio(ssl_.get(), in);
  SSL_set0_wbio(ssl_.get(), out);
  if (connects)
    SSL_set_connect_state(ssl_.get());
  else
    SSL_set_accept_state(ssl_.get());
  buffered_event_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  read_epoll_ = buffered_event_ < 0 ? -1 : epoll_create1(EPOLL_CLOEXEC);
  bool good = read_epoll_ >= 0;
  for (int one : {buffered_event_, fd}) {
    epoll_event event{};
    event.events = EPOLLIN | EPOLLRDHUP;
    good = good && epoll_ctl(read_epoll_, EPOLL_CTL_ADD, one, &event) == 0;
  }
  if (good) return;
  const std::string text = strerror(errno);
  TlsStream::close();
  throw Error(ErrorKind::kUsage, "TLS: eventfd or epoll: " + text);
}

TlsStream::~TlsStream() { TlsStream::close(); }

TlsStream::Wait TlsStream::handshake() {
  MutexLock lock(mutex_);
  ERR_clear_error();
  const int returned = SSL_do_handshake(ssl_.get());
  if (returned != 1) {
    const int wanted = SSL_get_error(ssl_.get(), returned);
    if (wanted == SSL_ERROR_WANT_READ) return Wait::kRead;
    if (wanted == SSL_ERROR_WANT_WRITE) return Wait::kWrite;
    const bool has_ended = wanted == SSL_ERROR_ZERO_RETURN || wanted == SSL_ERROR_SYSCALL;
    throw Error(has_ended ? ErrorKind::kPeerLost : ErrorKind::kProtocol, "TLS: " + reason());
  }
  // That is: by the key. With VERIFY_PEER nothing else can have been accepted; this does not rest on it.
  if (SSL_session_reused(ssl_.get()) != 1) throw Error(ErrorKind::kProtocol, "TLS: the other end did not use the key");
  // From here on records are sent by us: without SIGPIPE, and several in one call.
  SSL_set0_wbio(ssl_.get(), BIO_new(BIO_s_mem()));
  set_buffered(SSL_has_pending(ssl_.get()) != 0);
  return Wait::kNothing;
}

IoResult TlsStream::write(const iovec* parts, int count) {
  IoResult result;
  while (true) {
    if (sealed_.empty()) {
      seal(parts, count, result.bytes);
      if (sealed_.empty()) return result;  // all is written
    }
    const iovec rest{sealed_.data() + sealed_sent_, sealed_.size() - sealed_sent_};
    const IoResult sent = SocketStream::write(&rest, 1);
    sealed_sent_ += sent.bytes;
    if (sealed_sent_ < sealed_.size()) {
      if (result.bytes == 0) result.error = sent.error == 0 ? EAGAIN : sent.error;
      return result;
    }
    result.bytes += std::exchange(sealed_bytes_, 0);
    sealed_.clear();
    sealed_sent_ = 0;
  }
}

// Encrypts the next batch, behind the first `skip` bytes: no more than goes to the kernel at once, for what is encrypted
// cannot be overtaken either.
void TlsStream::seal(const iovec* parts, int count, size_t skip) {
  MutexLock lock(mutex_);
  const size_t batch = std::min(kBatchBytes, piece_bytes() - kOverheadBytes);
  for (int i = 0; i < count && sealed_bytes_ < batch; ++i) {
    const size_t skipped = std::min(skip, parts[i].iov_len);
    skip -= skipped;
    const size_t size = std::min(parts[i].iov_len - skipped, batch - sealed_bytes_);
    if (size == 0) continue;
    size_t written = 0;
    ERR_clear_error();
    // Into memory: both fail only where the reader has ended the session, and says so itself.
    if (bytes_with_key_ >= bytes_per_key_) {
      if (SSL_key_update(ssl_.get(), SSL_KEY_UPDATE_NOT_REQUESTED) != 1) break;
      bytes_with_key_ = 0;
      ++keys_;
    }
    if (SSL_write_ex(ssl_.get(), static_cast<const char*>(parts[i].iov_base) + skipped, size, &written) != 1) break;
    sealed_bytes_ += written;
    bytes_with_key_ += written;
  }
  BIO* records = SSL_get_wbio(ssl_.get());
  sealed_.resize(BIO_ctrl_pending(records));
  if (!sealed_.empty()) BIO_read(records, sealed_.data(), static_cast<int>(sealed_.size()));
}

IoResult TlsStream::read(const iovec* parts, int count) {
  if (last_word_.end || last_word_.error != 0) return last_word_;
  MutexLock lock(mutex_);
  IoResult result;
  for (int i = 0; i < count; ++i) {
    char* at = static_cast<char*>(parts[i].iov_base);
    for (size_t left = parts[i].iov_len; left > 0;) {
      size_t moved = 0;
      ERR_clear_error();
      errno = 0;
      const int returned = SSL_read_ex(ssl_.get(), at, left, &moved);
      if (returned == 1) {
        at += moved;
        left -= moved;
        result.bytes += moved;
        continue;
      }
      const IoResult now = outcome(ssl_.get(), returned);
      const bool over = now.error != EAGAIN;
      if (over) last_word_ = now;
      set_buffered(over);
      return result.bytes > 0 ? result : now;
    }
  }
  set_buffered(SSL_has_pending(ssl_.get()) != 0);
  return result;
}

void TlsStream::set_buffered(bool buffered) {
  if (buffered == std::exchange(buffered_, buffered)) return;
  note_call();
  if (buffered)
    raise_event(buffered_event_);
  else
    clear_event(buffered_event_);
}

void TlsStream::close() {
  close_if_open(buffered_event_);
  close_if_open(read_epoll_);
  SocketStream::close();
}

}  // namespace p3

#else  // built without OpenSSL

namespace p3 {

bool TlsStream::built_in() { return false; }

TlsStream::TlsStream(int fd, int notsent_low_water_bytes, const std::string& key, bool, uint64_t bytes_per_key)
    : SocketStream(fd, notsent_low_water_bytes), key_(key), bytes_per_key_(bytes_per_key) {
  throw Error(ErrorKind::kUsage, "TLS: P3 was built without OpenSSL");
}

TlsStream::~TlsStream() = default;
void TlsStream::FreeSsl::operator()(ssl_st*) const {}
TlsStream::Wait TlsStream::handshake() { return Wait::kNothing; }
IoResult TlsStream::write(const iovec* parts, int count) { return SocketStream::write(parts, count); }
IoResult TlsStream::read(const iovec* parts, int count) { return SocketStream::read(parts, count); }
void TlsStream::close() { SocketStream::close(); }

}  // namespace p3

#endif
