#include "api.h"

#include <dlfcn.h>

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
  look_up(api->MXNDArrayDetach, "MXNDArrayDetach");
  look_up(api->MXNDArrayFree, "MXNDArrayFree");
  look_up(api->MXNDArrayToDLPack, "MXNDArrayToDLPack");
  look_up(api->MXNDArrayCallDLPackDeleter, "MXNDArrayCallDLPackDeleter");
  look_up(api->MXNDArrayGetShapeEx, "MXNDArrayGetShapeEx");
  look_up(api->MXNDArrayGetDType, "MXNDArrayGetDType");
  look_up(api->MXNDArrayGetContext, "MXNDArrayGetContext");
  look_up(api->MXNDArrayGetData, "MXNDArrayGetData");
  look_up(api->MXNDArraySaveRawBytes, "MXNDArraySaveRawBytes");
  look_up(api->MXNDArrayLoadFromRawBytes, "MXNDArrayLoadFromRawBytes");
  look_up(api->NNGetOpHandle, "NNGetOpHandle");
  look_up(api->MXImperativeInvoke, "MXImperativeInvoke");
  look_up(api->MXNDArrayGetStorageType, "MXNDArrayGetStorageType");
  api->check(api->NNGetOpHandle("_copyto", &api->copyto));
  api->check(api->NNGetOpHandle("_copy", &api->copy));
  api->check(api->NNGetOpHandle("Cast", &api->cast));
  return api.release();
}

void MXNetApi::check(int status) const {
  if (status != 0) throw std::runtime_error(MXGetLastError());
}

std::shared_ptr<void> MXNetApi::keep(NDArrayHandle array) const {
  NDArrayHandle kept = nullptr;
  check(MXNDArrayDetach(array, &kept));
  return {kept, [free = MXNDArrayFree](void* handle) { free(handle); }};
}

void* MXNetApi::address_of(NDArrayHandle array) const {
  BorrowedTensor* tensor = nullptr;
  if (MXNDArrayToDLPack(array, &tensor) != 0) return nullptr;
  static char nothing[8];  // an empty array may have no memory, and null means something else to the core
  void* address = tensor->data ? static_cast<char*>(tensor->data) + tensor->byte_offset : nothing;
  MXNDArrayCallDLPackDeleter(tensor);
  return address;
}

}  // namespace p3
