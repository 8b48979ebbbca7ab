// What went wrong, as a value: the text is made where all facts are known, and travels unchanged.
#pragma once

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>

namespace p3 {

enum class ErrorKind {
  kUsage,         // the caller broke this interface's contract
  kDisagreement,  // nodes of the job contradict each other
  kPeerLost,      // a connection closed or broke
  kPeerSilent,    // a connection is open, and nothing came for timeout_s
  kProtocol,      // a peer sent what the protocol does not allow
  kRemote,        // another node failed and said so
  kStopped,       // this node was closed while work was pending
};

// What an error is about, as far as that is known; its text says the same in words.
struct Subject {
  std::string peer{};  // "server 0 (10.0.0.8)"
  std::string key{};
  std::optional<uint64_t> round{};
};

class Error : public std::runtime_error {
 public:
  Error(ErrorKind kind, const std::string& text, Subject subject = {})
      : std::runtime_error(text), kind_(kind), subject_(std::move(subject)) {}
  ErrorKind kind() const { return kind_; }
  const Subject& subject() const { return subject_; }

 private:
  ErrorKind kind_;
  Subject subject_;
};

}  // namespace p3
