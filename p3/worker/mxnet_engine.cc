#include "mxnet_engine.h"

#include <dlfcn.h>

#include <algorithm>
#include <memory>
#include <stdexcept>
#include <type_traits>
#include <utility>

namespace p3 {

namespace {

// The engine's types, as MXNet 1.9 lays them out.
struct EngineContext {
  int32_t device_type;
  int32_t device_id;
};
constexpr EngineContext kCpu{1, 0};
constexpr int kCpuPrioritized = 3;  // a queue by priority with threads of its own; any other is FIFO behind compute

// Copied by value: the one that the engine hands out is gone when the callback returns.
struct OnComplete {
  void (*call)(void* engine, void* param, const std::runtime_error* error);
  void* engine;
  void* param;
  void operator()(const std::runtime_error* error) const { call(engine, param, error); }
};

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

constexpr bool is_cpu_memory(int device_type) {
  return device_type == 1 || device_type == 3 || device_type == 5;  // cpu, cpu_pinned, cpu_shared
}

}  // namespace

struct MXNetEngine::Api {
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
  int (*NNGetOpHandle)(const char*, void**);
  int (*MXImperativeInvoke)(void*, int, NDArrayHandle*, int*, NDArrayHandle**, int, const char**, const char**);
  void* copyto;  // the operator

  void check(int status) const {
    if (status != 0) throw std::runtime_error(MXGetLastError());
  }

  // Null if the array is held in a blocked oneDNN layout. Does not wait: for arrays that the running operation holds.
  void* address_of(NDArrayHandle array) const {
    BorrowedTensor* tensor = nullptr;
    if (MXNDArrayToDLPack(array, &tensor) != 0) return nullptr;
    static char nothing[8];  // an empty array may have no memory, and null means something else to the core
    void* address = tensor->data ? static_cast<char*>(tensor->data) + tensor->byte_offset : nothing;
    MXNDArrayCallDLPackDeleter(tensor);
    return address;
  }
};

// One operation from push to the deleter, which the engine calls last, whether it ran or was skipped.
struct MXNetEngine::Operation {
  enum class Kind { kInit, kPush };

  const Api* api;
  Worker* worker;
  Kind kind;
  int key;
  std::string name;
  int32_t priority;
  int engine_priority;
  RoundScalars scalars;
  NDArrayHandle input = nullptr;  // the gradient
  NDArrayHandle landing = nullptr;
  bool has_run = false;

  ~Operation() {
    if (input) api->MXNDArrayFree(input);
    if (landing) api->MXNDArrayFree(landing);
  }

  const char* input_word() const { return kind == Kind::kPush ? "gradient" : "first value"; }

  void fail(const OnComplete& done, const std::string& text) const {
    const Error error(ErrorKind::kUsage, text);
    worker->fail(error);
    done(&error);
  }
};

MXNetEngine::MXNetEngine(const std::string& library) {
  void* loaded = dlopen(library.c_str(), RTLD_NOW | RTLD_NOLOAD);
  if (!loaded) throw std::runtime_error("MXNet's library " + library + " is not loaded in this process");
  auto api = std::make_unique<Api>();
  const auto find = [&](auto& function, const char* name) {
    function = reinterpret_cast<std::decay_t<decltype(function)>>(dlsym(loaded, name));
    if (!function) throw std::runtime_error(library + " has no function " + name + "; P3 needs MXNet 1.9.1");
  };
  find(api->MXGetLastError, "MXGetLastError");
  find(api->MXEnginePushAsyncND, "MXEnginePushAsyncND");
  find(api->MXNDArrayDetach, "MXNDArrayDetach");
  find(api->MXNDArrayFree, "MXNDArrayFree");
  find(api->MXNDArrayToDLPack, "MXNDArrayToDLPack");
  find(api->MXNDArrayCallDLPackDeleter, "MXNDArrayCallDLPackDeleter");
  find(api->MXNDArrayGetShapeEx, "MXNDArrayGetShapeEx");
  find(api->MXNDArrayGetDType, "MXNDArrayGetDType");
  find(api->MXNDArrayGetContext, "MXNDArrayGetContext");
  find(api->NNGetOpHandle, "NNGetOpHandle");
  find(api->MXImperativeInvoke, "MXImperativeInvoke");
  api->check(api->NNGetOpHandle("_copyto", &api->copyto));
  api_ = api.release();  // queued operations use it until the process ends
}

void MXNetEngine::init(Worker* worker, const Key& key) const {
  enqueue(new Operation{api_, worker, Operation::Kind::kInit, key.handle, key.name, key.priority, key.engine_priority,
                        RoundScalars{}, nullptr, key.landing},
          nullptr);
}

void MXNetEngine::push(Worker* worker, const Key& key, NDArrayHandle gradient, const RoundScalars& scalars) const {
  enqueue(new Operation{api_, worker, Operation::Kind::kPush, key.handle, key.name, key.priority, key.engine_priority,
                        scalars, nullptr, key.landing},
          gradient);
}

// From here the operation belongs to the engine. The input is a const variable, the landing array a mutable one.
void MXNetEngine::enqueue(Operation* operation, NDArrayHandle input) const {
  std::unique_ptr<Operation> owner(operation);
  NDArrayHandle landing = std::exchange(owner->landing, nullptr);  // the caller's until we have a handle of our own
  api_->check(api_->MXNDArrayDetach(landing, &owner->landing));
  if (input) api_->check(api_->MXNDArrayDetach(input, &owner->input));

  owner.release();
  api_->check(api_->MXEnginePushAsyncND(&run, operation, &release, &kCpu, &input, input ? 1 : 0, &landing, 1,
                                        &kCpuPrioritized, operation->engine_priority, operation->name.c_str(), false));
}

// On a thread of the engine, once the input is ready and nobody uses the landing array. Only enqueues.
void MXNetEngine::run(void*, void* on_complete, void* param) {
  auto* operation = static_cast<Operation*>(param);
  const OnComplete done = *static_cast<OnComplete*>(on_complete);
  operation->has_run = true;

  void* input = operation->input ? operation->api->address_of(operation->input) : nullptr;
  void* landing = operation->api->address_of(operation->landing);
  if (operation->input && !input) {
    operation->fail(done, "the gradient of key '" + operation->name +
                              "' is held in a blocked oneDNN layout, which P3 cannot read in place; set "
                              "P3_STAGE_GRADIENTS=1 on every worker to have MXNet copy such arrays first");
    return;
  }
  if (!landing) {
    operation->fail(done, "the landing array of key '" + operation->name +
                              "' was moved into a blocked oneDNN layout; only P3 may write it");
    return;
  }

  // `done` must come last: it may release the operation.
  const auto complete = [done](const Error* error, bool) { done(error); };
  if (operation->kind == Operation::Kind::kPush)
    operation->worker->push(operation->key, input, landing, operation->priority, operation->scalars, complete);
  else
    operation->worker->init(operation->key, landing, landing, operation->priority, complete);
}

// The engine's deleter. It skips an operation whose input failed, and then this is all we hear of it; without a word
// to the servers the other workers would wait for this worker's gradient.
void MXNetEngine::release(void* param) {
  const std::unique_ptr<Operation> operation(static_cast<Operation*>(param));
  if (operation->has_run) return;
  operation->worker->fail(Error(ErrorKind::kUsage, std::string(operation->input_word()) + " of key '" +
                                                       operation->name +
                                                       "' failed on this worker: the MXNet operation that computes it "
                                                       "raised an error, which MXNet reports at the next wait"));
}

void MXNetEngine::skip(Worker* worker, const Key& key, Worker::Done done) const {
  void* landing = api_->address_of(key.landing);
  if (!landing)
    throw std::runtime_error("the landing array of key '" + key.name +
                             "' was moved into a blocked oneDNN layout; only P3 may write it");
  worker->skip(key.handle, landing, key.priority, std::move(done));
}

void MXNetEngine::copy(NDArrayHandle source, NDArrayHandle destination) const {
  int outputs = 1;
  NDArrayHandle* destinations = &destination;
  api_->check(api_->MXImperativeInvoke(api_->copyto, 1, &source, &outputs, &destinations, 0, nullptr, nullptr));
}

bool MXNetEngine::alike(NDArrayHandle left, NDArrayHandle right) const {
  int left_type = 0, right_type = 0;
  api_->check(api_->MXNDArrayGetDType(left, &left_type));
  api_->check(api_->MXNDArrayGetDType(right, &right_type));
  if (left_type != right_type) return false;

  // MXNet answers in one buffer per thread, so the first shape must be copied before the second is asked for.
  constexpr int kMaxDimensions = 32;  // MXNet's own limit
  int left_shape[kMaxDimensions];
  int dimensions = 0;
  const int* shape = nullptr;
  api_->check(api_->MXNDArrayGetShapeEx(left, &dimensions, &shape));
  const int left_dimensions = std::min(dimensions, kMaxDimensions);
  std::copy_n(shape, std::max(left_dimensions, 0), left_shape);
  api_->check(api_->MXNDArrayGetShapeEx(right, &dimensions, &shape));
  return dimensions == left_dimensions && std::equal(left_shape, left_shape + std::max(dimensions, 0), shape);
}

bool MXNetEngine::in_cpu_memory(NDArrayHandle array) const {
  int device_type = 0, device_id = 0;
  api_->check(api_->MXNDArrayGetContext(array, &device_type, &device_id));
  return is_cpu_memory(device_type);
}

}  // namespace p3
