#include "api.h"

#include <dlfcn.h>

#include <algorithm>
#include <iterator>
#include <memory>
#include <stdexcept>
#include <type_traits>

namespace p3 {

const MXNetApi* MXNetApi::find(const std::string& library) {
  void* loaded = dlopen(library.c_str(), RTLD_NOW | RTLD_NOLOAD);
  if (!loaded) throw std::runtime_error("MXNet's library " + library + " is not loaded in this process");
  auto api = std::make_unique<MXNetApi>();
  const auto look_up = [&](auto& function, const char* name) {
    function = reinterpret_cast<std::decay_t<decltype(function)>>(dlsym(loaded, name));
    if (!function) throw std::runtime_error(library + " has no function " + name + "; P3 needs MXNet 1.9.1");
  };
  look_up(api->MXGetLastError, "MXGetLastError");
  look_up(api->MXEnginePushAsyncND, "MXEnginePushAsyncND");
  look_up(api->MXNDArrayCreate, "MXNDArrayCreate");
  look_up(api->MXNDArrayDetach, "MXNDArrayDetach");
  look_up(api->MXNDArrayFree, "MXNDArrayFree");
  look_up(api->MXNDArrayToDLPack, "MXNDArrayToDLPack");
  look_up(api->MXNDArrayCallDLPackDeleter, "MXNDArrayCallDLPackDeleter");
  look_up(api->MXNDArrayGetShapeEx, "MXNDArrayGetShapeEx");
  look_up(api->MXNDArrayGetDType, "MXNDArrayGetDType");
  look_up(api->MXNDArrayGetContext, "MXNDArrayGetContext");
  look_up(api->MXNDArrayGetData, "MXNDArrayGetData");
  look_up(api->MXNDArraySaveRawBytes, "MXNDArraySaveRawBytes");
  look_up(api->MXNDArrayGetStorageType, "MXNDArrayGetStorageType");
  look_up(api->NNGetOpHandle, "NNGetOpHandle");
  look_up(api->MXImperativeInvoke, "MXImperativeInvoke");
  api->check(api->NNGetOpHandle("_copyto", &api->copy_to));
  api->check(api->NNGetOpHandle("_copy", &api->identity));
  api->check(api->NNGetOpHandle("Cast", &api->cast));
  return api.release();
}

void MXNetApi::check(int status) const {
  if (status != 0) throw std::runtime_error(MXGetLastError());
}

bool MXNetApi::same_shape(NDArrayHandle left, NDArrayHandle right) const {
  // MXNet answers in one buffer per thread, so the first shape must be copied before the second is asked for.
  constexpr int kMaxDimensions = 32;  // MXNet's own limit
  int left_shape[kMaxDimensions];
  int dimensions = 0;
  const int* shape = nullptr;
  check(MXNDArrayGetShapeEx(left, &dimensions, &shape));
  const int left_dimensions = std::min(dimensions, kMaxDimensions);
  std::copy_n(shape, std::max(left_dimensions, 0), left_shape);
  check(MXNDArrayGetShapeEx(right, &dimensions, &shape));
  return dimensions == left_dimensions && std::equal(left_shape, left_shape + std::max(dimensions, 0), shape);
}

bool MXNetApi::same_type(NDArrayHandle left, NDArrayHandle right) const {
  int left_type = 0, right_type = 0;
  check(MXNDArrayGetDType(left, &left_type));
  check(MXNDArrayGetDType(right, &right_type));
  return left_type == right_type;
}

bool MXNetApi::in_cpu_memory(NDArrayHandle array) const {
  int type = 0, id = 0;
  check(MXNDArrayGetContext(array, &type, &id));
  return type == 1 || type == 3 || type == 5;  // cpu, cpu_pinned, cpu_shared
}

bool MXNetApi::is_dense(NDArrayHandle array) const {
  int storage = 0;
  check(MXNDArrayGetStorageType(array, &storage));
  return storage == 0;
}

// MXNet's `_copyto` leaves an array that is held in a blocked oneDNN layout there. The next forward pass then brings it
// to the plain layout in an operation that it queues while it runs: behind a wait for the array that the script may
// have queued meanwhile. So asnumpy() could read the array in the midst of that, and crash. Operators that compute
// their output begin it anew in the plain layout; they know one device only. Of these not `_copy`: it asks for scratch
// memory, so all copies would wait for each other, and layers for copies, in the order in which they were queued.
void MXNetApi::copy(NDArrayHandle source, NDArrayHandle destination) const {
  constexpr const char* kTypes[] = {"float32", "float64", "float16", "uint8", "int32", "int8", "int64", "bool"};
  int type = 0;
  check(MXNDArrayGetDType(destination, &type));
  const bool computes = is_dense(destination) && in_cpu_memory(source) && in_cpu_memory(destination) &&
                        type < static_cast<int>(std::size(kTypes));
  const char *parameter = "dtype", *type_name = computes ? kTypes[type] : nullptr;
  int outputs = 1;
  NDArrayHandle* destinations = &destination;
  check(MXImperativeInvoke(computes ? cast : copy_to, 1, &source, &outputs, &destinations, computes ? 1 : 0, &parameter,
                           &type_name));
}

std::shared_ptr<void> MXNetApi::keep(NDArrayHandle array) const {
  NDArrayHandle kept = nullptr;
  check(MXNDArrayDetach(array, &kept));
  return {kept, MXNDArrayFree};
}

void* MXNetApi::address_of(NDArrayHandle array) const {
  BorrowedTensor* tensor = nullptr;
  if (MXNDArrayToDLPack(array, &tensor) != 0) return nullptr;
  static char nothing[8];  // an empty array may have no memory, and null means something else to the core
  void* address = tensor->data ? static_cast<char*>(tensor->data) + tensor->byte_offset : nothing;
  MXNDArrayCallDLPackDeleter(tensor);
  return address;
}

void* MXNetApi::values_of(NDArrayHandle array) const {
  void* values = nullptr;
  check(MXNDArrayGetData(array, &values));
  return values;
}

}  // namespace p3
