// What went wrong, as a value: the text is made where all facts are known, and travels unchanged.
#pragma once

#include <stdexcept>
#include <string>

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

class Error : public std::runtime_error {
 public:
  Error(ErrorKind kind, const std::string& text) : std::runtime_error(text), kind_(kind) {}
  ErrorKind kind() const { return kind_; }

 private:
  ErrorKind kind_;
};

}  // namespace p3
