// Network cards that are files: what a host sends by one is read from it, and what is written to it, the host receives.
#pragma once

#include <string>

namespace p3::relay {

// Makes this thread's network namespace the one that is mounted at a path. This and the next throw std::system_error.
void enter(const std::string& space);

// A new card `eth0` of this thread's network namespace, of the host of that number. Its checksums and the cutting of long
// segments are left to the reader. It does not block, and is not inherited.
int open_tap(int host);

// The number of the host that has such a card; -1: none. `address`: of six bytes.
int host_of(const unsigned char* address);
bool is_for_all(const unsigned char* address);

}  // namespace p3::relay
