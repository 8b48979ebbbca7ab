#include "engine.h"

#include <algorithm>
#include <memory>
#include <utility>

namespace p3 {

namespace {

// The engine's type, as MXNet 1.9 lays it out.
struct EngineContext {
  int32_t device_type;
  int32_t device_id;
};
constexpr EngineContext kCpu{1, 0};
constexpr int kCpuPrioritized = 3;  // a queue by priority with threads of its own; any other is FIFO behind compute

constexpr bool is_cpu_memory(int device_type) {
  return device_type == 1 || device_type == 3 || device_type == 5;  // cpu, cpu_pinned, cpu_shared
}

}  // namespace

void MXNetEngine::init(Worker* worker, const Key& key, Priority priority) const {
  enqueue(worker, key, priority, "first value", nullptr, key.landing,
          [worker, handle = key.handle, priority](const Operation& operation) {
            void* landing = operation.output_address();
            worker->init(handle, landing, landing, priority.in_queues,
                         [done = operation.completion()](const Error* error, bool) { done(error); });
          });
}

void MXNetEngine::push(Worker* worker, const Key& key, NDArrayHandle gradient, const RoundScalars& scalars,
                       Priority priority) const {
  enqueue(worker, key, priority, "gradient", gradient, key.landing,
          [worker, handle = key.handle, priority, scalars](const Operation& operation) {
            operation.with_input(priority, [worker, handle, priority, scalars, landing = operation.output_address()](
                                               const void* source, Operation::Completion done) {
              worker->push(handle, source, landing, priority.in_queues, scalars,
                           [done = std::move(done)](const Error* error, bool) { done(error); });
            });
          });
}

// It reads the landing array, so it runs between the pushes, which write it.
void MXNetEngine::capture(Worker* worker, const Key& key, uint64_t snapshot, const std::shared_ptr<char>& residual,
                          Priority priority, Worker::Done done) const {
  struct Told {
    ~Told() {  // nobody has, as the engine drops what would read an array whose round has failed
      const Error dropped(ErrorKind::kStopped, "key '" + name + "' was not captured, as a round of it has failed");
      if (done) done(&dropped, false);
    }
    std::string name;
    Worker::Done done;
  };
  const auto told = std::make_shared<Told>();
  told->name = key.name;
  told->done = std::move(done);
  enqueue(worker, key, priority, "landing array", key.landing, nullptr,
          [worker, handle = key.handle, snapshot, residual, told](const Operation& operation) {
            worker->capture(handle, snapshot, reinterpret_cast<float*>(residual.get()),
                            [residual, told](const Error* error, bool updated) {
                              std::exchange(told->done, nullptr)(error, updated);
                            });
            operation.completion()(nullptr);
          });
}

// From here the operation belongs to the engine. The input is a const variable, the output a mutable one.
void MXNetEngine::enqueue(Worker* worker, const Key& key, Priority priority, const char* input_word,
                          NDArrayHandle input, NDArrayHandle output, Work work) const {
  auto owner = std::make_unique<Operation>(api_, worker, key, input_word, std::move(work));
  if (output) api_->check(api_->MXNDArrayDetach(output, &owner->output_));
  if (input) api_->check(api_->MXNDArrayDetach(input, &owner->input_));

  Operation* operation = owner.release();
  api_->check(api_->MXEnginePushAsyncND(&Operation::run, operation, &Operation::release, &kCpu, &input, input ? 1 : 0,
                                        &output, output ? 1 : 0, &kCpuPrioritized, priority.in_engine, key.name.c_str(),
                                        false));
}

MXNetEngine::Operation::~Operation() {
  if (input_) api_->MXNDArrayFree(input_);
  if (output_) api_->MXNDArrayFree(output_);
}

// On a thread of the engine, once the input is ready and nobody uses the output. Only enqueues.
void MXNetEngine::Operation::run(void*, void* on_complete, void* param) {
  auto* operation = static_cast<Operation*>(param);
  operation->on_complete_ = *static_cast<OnComplete*>(on_complete);
  operation->has_run_ = true;
  const Work work = std::move(operation->work_);  // it may outlive the operation
  try {
    work(*operation);
  } catch (const Error& error) {
    operation->fail(error);
  } catch (const std::exception& error) {
    operation->fail(Error(ErrorKind::kUsage, "key '" + operation->key_.name + "': " + error.what()));
  }
}

const void* MXNetEngine::Operation::input_address() const {
  const void* address = api_->address_of(input_);
  if (!address)
    throw Error(ErrorKind::kUsage, std::string("the ") + input_word_ + " of key '" + key_.name +
                                       "' is held in a blocked oneDNN layout, which P3 cannot read in place; give "
                                       "it a copy of the array");
  return address;
}

void* MXNetEngine::Operation::output_address() const {
  void* address = api_->address_of(output_);
  if (!address)
    throw Error(ErrorKind::kUsage, "the landing array of key '" + key_.name +
                                       "' was moved into a blocked oneDNN layout; only P3 may write it");
  return address;
}

void MXNetEngine::Operation::with_input(Priority priority,
                                        std::function<void(const void* input, Completion completion)> use) const {
  if (const void* address = api_->address_of(input_)) return use(address, completion());

  NDArrayHandle input = input_;
  NDArrayHandle* copies = nullptr;
  int count = 0;  // MXNet makes the array, in the plain layout
  api_->check(api_->MXImperativeInvoke(api_->copy, 1, &input, &count, &copies, 0, nullptr, nullptr));
  const std::unique_ptr<void, int (*)(NDArrayHandle)> copy(copies[0], api_->MXNDArrayFree);

  // This operation ends with the one that reads the copy: also if the engine drops that, as the copy has failed.
  struct Ending {
    ~Ending() {
      const Error dropped(ErrorKind::kUsage, what + " was not sent: MXNet could not copy it");
      if (completion) completion(&dropped);
    }
    std::string what;
    Completion completion;
  };
  const auto ending = std::make_shared<Ending>();
  ending->what = std::string("the ") + input_word_ + " of key '" + key_.name + "'";
  ending->completion = completion();
  MXNetEngine(api_).enqueue(worker_, key_, priority, input_word_, copy.get(), nullptr,
                            [use = std::move(use), ending](const Operation& copied) {
                              use(copied.input_address(), [ending, end = copied.completion()](const Error* error) {
                                std::exchange(ending->completion, nullptr)(error);
                                end(error);
                              });
                            });
}

MXNetEngine::Operation::Completion MXNetEngine::Operation::completion() const {
  return [complete = on_complete_](const Error* error) { complete.call(complete.engine, complete.param, error); };
}

void MXNetEngine::Operation::fail(const Error& error) const {
  worker_->fail(error);
  completion()(&error);
}

// The engine's deleter. It skips an operation whose input failed, and then this is all we hear of it; without a word
// to the servers the other workers would wait for this worker's gradient.
void MXNetEngine::Operation::release(void* param) {
  const std::unique_ptr<Operation> operation(static_cast<Operation*>(param));
  if (operation->has_run_) return;
  operation->worker_->fail(Error(ErrorKind::kUsage, std::string(operation->input_word_) + " of key '" +
                                                        operation->key_.name +
                                                        "' failed on this worker: the MXNet operation that computes "
                                                        "it raised an error, which MXNet reports at the next wait"));
}

void MXNetEngine::skip(Worker* worker, const Key& key, Priority priority, Worker::Done done) const {
  void* landing = api_->address_of(key.landing);
  if (!landing)
    throw std::runtime_error("the landing array of key '" + key.name +
                             "' was moved into a blocked oneDNN layout; only P3 may write it");
  // The script may give up waiting, and drop the array, while the core still writes there.
  worker->skip(key.handle, landing, priority.in_queues,
               [kept = api_->keep(key.landing), done = std::move(done)](const Error* error, bool updated) {
                 done(error, updated);
               });
}

// MXNet's `_copyto` leaves an array that is held in a blocked oneDNN layout there. The next forward pass then brings it
// to the plain layout in an operation that it queues while it runs: behind a wait for the array that the script may have
// queued meanwhile. So asnumpy() could read the array in the midst of that, and crash. Operators that compute their
// output begin it anew in the plain layout; they know one device only.
void MXNetEngine::copy(NDArrayHandle source, NDArrayHandle destination) const {
  constexpr int kDense = 0;
  constexpr const char* kTypes[] = {"float32", "float64", "float16", "uint8", "int32", "int8", "int64", "bool"};
  int storage = kDense, to = 0;
  api_->check(api_->MXNDArrayGetStorageType(destination, &storage));
  api_->check(api_->MXNDArrayGetDType(destination, &to));
  int outputs = 1;
  NDArrayHandle* destinations = &destination;
  if (storage != kDense || !in_cpu_memory(source) || !in_cpu_memory(destination)) {
    api_->check(api_->MXImperativeInvoke(api_->copyto, 1, &source, &outputs, &destinations, 0, nullptr, nullptr));
  } else if (same_type(source, destination)) {
    api_->check(api_->MXImperativeInvoke(api_->copy, 1, &source, &outputs, &destinations, 0, nullptr, nullptr));
  } else {
    const char *name = "dtype", *type = kTypes[to];
    api_->check(api_->MXImperativeInvoke(api_->cast, 1, &source, &outputs, &destinations, 1, &name, &type));
  }
}

bool MXNetEngine::same_type(NDArrayHandle left, NDArrayHandle right) const {
  int left_type = 0, right_type = 0;
  api_->check(api_->MXNDArrayGetDType(left, &left_type));
  api_->check(api_->MXNDArrayGetDType(right, &right_type));
  return left_type == right_type;
}

bool MXNetEngine::same_shape(NDArrayHandle left, NDArrayHandle right) const {
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
