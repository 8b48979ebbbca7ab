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

struct MXNetApi {
  const char* (*MXGetLastError)();
  int (*MXEnginePushAsyncND)(void (*)(void*, void*, void*), void*, void (*)(void*), const void*, NDArrayHandle*, int,
                             NDArrayHandle*, int, const void*, int, const char*, bool);
  int (*MXNDArrayDetach)(NDArrayHandle, NDArrayHandle*);
  int (*MXNDArrayFree)(NDArrayHandle);
  int (*MXNDArrayToDLPack)(NDArrayHandle, BorrowedTensor**);
  int (*MXNDArrayCallDLPackDeleter)(BorrowedTensor*);
  int (*MXNDArrayGetShapeEx)(NDArrayHandle, int*, const int**);
  int (*MXNDArrayGetDType)(NDArrayHandle, int*);
  int (*MXNDArrayGetContext)(NDArrayHandle, int*, int*);
  int (*MXNDArrayGetData)(NDArrayHandle, void**);
  int (*MXNDArraySaveRawBytes)(NDArrayHandle, size_t*, const char**);
  int (*MXNDArrayLoadFromRawBytes)(const void*, size_t, NDArrayHandle*);
  int (*NNGetOpHandle)(const char*, void**);
  int (*MXImperativeInvoke)(void*, int, NDArrayHandle*, int*, NDArrayHandle**, int, const char**, const char**);
  int (*MXNDArrayGetStorageType)(NDArrayHandle, int*);
  // Operators.
  void* copyto;
  void* copy;
  void* cast;

  // `library` is the path of the libmxnet that this process has loaded. One per process and never freed: queued
  // operations use it until the process ends.
  static const MXNetApi* find(const std::string& library);

  void check(int status) const;

  // Another handle of the array: its memory stays as long as that does.
  std::shared_ptr<void> keep(NDArrayHandle array) const;

  // Null if the array is held in a blocked oneDNN layout. Does not wait: for dense arrays that the running operation
  // holds.
  void* address_of(NDArrayHandle array) const;
};

}  // namespace p3
