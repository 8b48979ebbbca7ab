// A network card of this machine: how many bytes have left through it, those of other processes too.
// Threads: as any value. Memory: it keeps a name.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>

namespace p3 {

class NetworkCard {
 public:
  // The one that has the local address of a connected socket. Without a name, if none is found or it is no IP socket.
  static NetworkCard of(int fd);
  // The one that has the address of its other end: none, unless that is on this machine.
  static NetworkCard of_peer(int fd);

  NetworkCard() = default;
  explicit NetworkCard(std::string name) : name_(std::move(name)) {}

  bool is_known() const { return !name_.empty(); }
  // Since the card came up, with all headers; it may begin anew. Reads a file of the kernel's: some ten microseconds.
  std::optional<uint64_t> bytes_sent() const;

 private:
  std::string name_;
};

}  // namespace p3
