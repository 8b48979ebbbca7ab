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
};

constexpr bool is_known(DType type) { return static_cast<uint8_t>(type) <= 6; }
constexpr bool is_float(DType type) { return static_cast<uint8_t>(type) <= 2; }

constexpr size_t size_of(DType type) {
  switch (type) {
    case DType::kUint8:
    case DType::kInt8:
      return 1;
    case DType::kFloat16:
      return 2;
    case DType::kFloat32:
    case DType::kInt32:
      return 4;
    case DType::kFloat64:
    case DType::kInt64:
      return 8;
  }
  return 0;
}

constexpr const char* name_of(DType type) {
  switch (type) {
    case DType::kFloat32:
      return "float32";
    case DType::kFloat64:
      return "float64";
    case DType::kFloat16:
      return "float16";
    case DType::kUint8:
      return "uint8";
    case DType::kInt32:
      return "int32";
    case DType::kInt8:
      return "int8";
    case DType::kInt64:
      return "int64";
  }
  return "unknown";
}

// Half precision is summed and updated in float32 and rounded once, at the end.
constexpr DType sum_type(DType type) { return type == DType::kFloat16 ? DType::kFloat32 : type; }

}  // namespace p3
