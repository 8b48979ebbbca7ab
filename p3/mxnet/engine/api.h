// MXNet's C API, as much of it as P3 uses. Nothing here links to MXNet: the functions are looked up in the library
// that Python has loaded.
// Errors: check() throws MXNet's own text as std::runtime_error.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

namespace p3 {

using NDArrayHandle = void*;

// The head of DLPack's DLManagedTensor.
struct BorrowedTensor {
  void* data;
  int32_t device[2];
  int32_t dimensions;
  uint8_t type[4];
  int64_t* shape;
  int64_t* strides;
  uint64_t byte_offset;
};

// Where an operation of the engine runs, as MXNet 1.9 lays it out.
struct EngineContext {
  int32_t device_type;
  int32_t device_id;
};
constexpr EngineContext kCpu{1, 0};

struct MXNetApi {
  const char* (*MXGetLastError)();
  int (*MXEnginePushAsyncND)(void (*)(void*, void*, void*), void*, void (*)(void*), const void*, NDArrayHandle*, int,
                             NDArrayHandle*, int, const void*, int, const char*, bool);
  int (*MXNDArrayCreate)(const uint32_t*, uint32_t, int, int, int, NDArrayHandle*);
  int (*MXNDArrayDetach)(NDArrayHandle, NDArrayHandle*);
  int (*MXNDArrayFree)(NDArrayHandle);
  int (*MXNDArrayToDLPack)(NDArrayHandle, BorrowedTensor**);
  int (*MXNDArrayCallDLPackDeleter)(BorrowedTensor*);
  int (*MXNDArrayGetShapeEx)(NDArrayHandle, int*, const int**);
  int (*MXNDArrayGetDType)(NDArrayHandle, int*);
  int (*MXNDArrayGetContext)(NDArrayHandle, int*, int*);
  int (*MXNDArrayGetData)(NDArrayHandle, void**);
  int (*MXNDArraySaveRawBytes)(NDArrayHandle, size_t*, const char**);
  int (*MXNDArrayGetStorageType)(NDArrayHandle, int*);
  int (*NNGetOpHandle)(const char*, void**);
  int (*MXImperativeInvoke)(void*, int, NDArrayHandle*, int*, NDArrayHandle**, int, const char**, const char**);
  // Operators.
  void* copy_to;
  void* identity;
  void* cast;

  // `library` is the path of the libmxnet that this process has loaded. One per process and never freed: queued
  // operations use it until the process ends.
  static const MXNetApi* find(const std::string& library);

  void check(int status) const;

  // Cheap: no wait and no allocation.
  bool same_shape(NDArrayHandle left, NDArrayHandle right) const;
  bool same_type(NDArrayHandle left, NDArrayHandle right) const;
  bool in_cpu_memory(NDArrayHandle array) const;
  bool is_dense(NDArrayHandle array) const;

  // MXNet's own copy, as engine work: also to another device, storage type or element type, and to an array that is
  // held in a blocked layout, which is in the plain one afterwards.
  void copy(NDArrayHandle source, NDArrayHandle destination) const;

  // Another handle of the array: its memory stays as long as that does.
  std::shared_ptr<void> keep(NDArrayHandle array) const;

  // These do not wait: for arrays that the running operation holds.
  // Of a dense one; null if it is held in a blocked oneDNN layout.
  void* address_of(NDArrayHandle array) const;
  // Of the values of a row_sparse one.
  void* values_of(NDArrayHandle array) const;
};

}  // namespace p3
