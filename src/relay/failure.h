// What a system call says that has failed, as an exception.
#pragma once

#include <cerrno>
#include <string>
#include <system_error>

namespace p3::relay {

inline std::system_error failure(const std::string& what) { return {errno, std::generic_category(), what}; }

}  // namespace p3::relay
