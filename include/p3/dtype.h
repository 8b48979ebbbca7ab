// Element types. The codes are MXNet's, so no table translates between the two.
#pragma once

#include <cstddef>
#include <cstdint>

namespace p3 {

enum class DType : uint8_t {
  kFloat32 = 0,
  kFloat64 = 1,
  kFloat16 = 2,
  kUint8 = 3,
  kInt32 = 4,
  kInt8 = 5,
  kInt64 = 6,
  kBfloat16 = 12,
};

constexpr bool is_known(DType type) { return static_cast<uint8_t>(type) <= 6 || type == DType::kBfloat16; }
constexpr bool is_float(DType type) { return static_cast<uint8_t>(type) <= 2 || type == DType::kBfloat16; }
constexpr bool is_half(DType type) { return type == DType::kFloat16 || type == DType::kBfloat16; }

namespace detail {
// By code; 7 to 11 are none of ours.
constexpr size_t kSizes[] = {4, 8, 2, 1, 4, 1, 8, 0, 0, 0, 0, 0, 2};
constexpr const char* kNames[] = {"float32", "float64", "float16", "uint8", "int32", "int8",    "int64",
                                  nullptr,   nullptr,   nullptr,   nullptr, nullptr, "bfloat16"};
}  // namespace detail

constexpr size_t size_of(DType type) { return is_known(type) ? detail::kSizes[static_cast<size_t>(type)] : 0; }
constexpr const char* name_of(DType type) {
  return is_known(type) ? detail::kNames[static_cast<size_t>(type)] : "unknown";
}

// Half precision is summed and updated in float32 and rounded once, at the end.
constexpr DType sum_type(DType type) { return is_half(type) ? DType::kFloat32 : type; }

}  // namespace p3
