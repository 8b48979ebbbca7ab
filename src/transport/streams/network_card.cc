#include "transport/streams/network_card.h"

#include <ifaddrs.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <cstring>
#include <fstream>
#include <sstream>

namespace p3 {
namespace {

// As /proc/self/net/dev has them: eight of what came, then what left.
constexpr int kFieldsBeforeBytesSent = 8;

// IPv4's as IPv6 has it, since a socket of IPv6 may have it so.
std::optional<in6_addr> address_of(const sockaddr& one) {
  if (one.sa_family == AF_INET6) return reinterpret_cast<const sockaddr_in6&>(one).sin6_addr;
  if (one.sa_family != AF_INET) return std::nullopt;
  in6_addr mapped{};
  mapped.s6_addr[10] = mapped.s6_addr[11] = 0xff;
  std::memcpy(&mapped.s6_addr[12], &reinterpret_cast<const sockaddr_in&>(one).sin_addr, sizeof(in_addr));
  return mapped;
}

bool is_same_address(const sockaddr& one, const sockaddr& other) {
  const auto first = address_of(one), second = address_of(other);
  return first && second && std::memcmp(&*first, &*second, sizeof(in6_addr)) == 0;
}

// getsockname or getpeername.
NetworkCard with_address(int (*name_of)(int, sockaddr*, socklen_t*), int fd) {
  sockaddr_storage address{};
  socklen_t length = sizeof address;
  ifaddrs* all = nullptr;
  if (name_of(fd, reinterpret_cast<sockaddr*>(&address), &length) != 0 || getifaddrs(&all) != 0) return {};
  NetworkCard found;
  for (const ifaddrs* one = all; one != nullptr && !found.is_known(); one = one->ifa_next)
    if (one->ifa_addr != nullptr && is_same_address(*one->ifa_addr, reinterpret_cast<const sockaddr&>(address)))
      found = NetworkCard(std::string(one->ifa_name, std::strcspn(one->ifa_name, ":")));  // eth0:1 is a name of eth0
  freeifaddrs(all);
  return found;
}

}  // namespace

NetworkCard NetworkCard::of(int fd) { return with_address(getsockname, fd); }

NetworkCard NetworkCard::of_peer(int fd) { return with_address(getpeername, fd); }

// Not in /sys, which may show the cards of another network namespace.
std::optional<uint64_t> NetworkCard::bytes_sent() const {
  std::ifstream all("/proc/thread-self/net/dev");
  for (std::string line; std::getline(all, line);) {
    const size_t colon = line.find(':');
    if (colon == std::string::npos || line.substr(0, colon).substr(line.find_first_not_of(' ')) != name_) continue;
    std::istringstream fields(line.substr(colon + 1));
    uint64_t value = 0;
    for (int i = 0; i <= kFieldsBeforeBytesSent; ++i) fields >> value;
    if (fields) return value;
  }
  return std::nullopt;
}

}  // namespace p3
