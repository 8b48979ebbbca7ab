#include "relay/tap.h"

#include <fcntl.h>
#include <linux/if.h>
#include <linux/if_arp.h>
#include <linux/if_tun.h>
#include <sched.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "relay/failure.h"

namespace p3::relay {
namespace {

// Locally administered; two bytes of the host's number follow.
constexpr unsigned char kAddress[] = {0x02, 'p', '3', 0};

}  // namespace

void enter(const std::string& space) {
  const int fd = open(space.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0 || setns(fd, CLONE_NEWNET) != 0) throw failure("entering " + space);
  close(fd);
}

int open_tap(int host) {
  const int fd = open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC);
  if (fd < 0) throw failure("opening /dev/net/tun");
  ifreq card{};
  std::strcpy(card.ifr_name, "eth0");
  card.ifr_flags = IFF_TAP | IFF_NO_PI | IFF_VNET_HDR;
  if (ioctl(fd, TUNSETIFF, &card) != 0) throw failure("making a TAP device");
  if (ioctl(fd, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4) != 0) throw failure("asking a TAP device for whole segments");
  card.ifr_hwaddr.sa_family = ARPHRD_ETHER;
  auto* address = reinterpret_cast<unsigned char*>(card.ifr_hwaddr.sa_data);
  std::copy(std::begin(kAddress), std::end(kAddress), address);
  address[4] = static_cast<unsigned char>(host >> 8);
  address[5] = static_cast<unsigned char>(host);
  if (ioctl(fd, SIOCSIFHWADDR, &card) != 0) throw failure("giving a TAP device its address");
  return fd;
}

int host_of(const unsigned char* address) {
  if (!std::equal(std::begin(kAddress), std::end(kAddress), address)) return -1;
  return address[4] << 8 | address[5];
}

bool is_for_all(const unsigned char* address) { return (address[0] & 1) != 0; }

}  // namespace p3::relay
