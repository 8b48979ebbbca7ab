#include "engine.h"

#include <cstring>

namespace p3 {

namespace {

constexpr int kCpuPrioritized = 3;  // a queue by priority with threads of its own; any other is FIFO behind compute

// Calls `done` exactly once: with `dropped`, unless somebody has called it before all have let go of this.
class CalledOnce {
 public:
  CalledOnce(Worker::Done done, Error dropped) : done_(std::move(done)), dropped_(std::move(dropped)) {}
  ~CalledOnce() {
    if (done_) done_(&dropped_, false);
  }
  CalledOnce(const CalledOnce&) = delete;
  CalledOnce& operator=(const CalledOnce&) = delete;

  void call(const Error* error, bool updated) { std::exchange(done_, nullptr)(error, updated); }

 private:
  Worker::Done done_;
  const Error dropped_;
};

}  // namespace

void MXNetKey::init(NDArrayHandle value, Priority priority) {
  enqueue(priority, "first value", value, landing_, [this, priority](const Operation& operation) {
    void* landing = landing_address(operation.output());
    const void* first = operation.input() ? operation.input_address() : landing;
    worker_.init(handle_, first, landing, priority.in_queues, operation.done());
  });
}

void MXNetKey::push(NDArrayHandle gradient, const RoundSettings& settings, Priority priority) {
  enqueue(priority, "gradient", gradient, landing_, [this, settings, priority](const Operation& operation) {
    void* landing = landing_address(operation.output());
    operation.with_input([this, settings, priority, landing](const void* source, Worker::Done done) {
      worker_.push(handle_, source, landing, priority.in_queues, settings, std::move(done));
    });
  });
}

// The round holds the buffer's memory, but not its variable in MXNet's engine: what copies to it could not run then.
std::shared_ptr<MXNetKey::Arrival> MXNetKey::push_arriving(NDArrayHandle buffer, const RoundSettings& settings,
                                                           Priority priority) {
  const void* const source = api_.address_of(buffer);
  auto arrival = std::make_shared<Arrival>();
  enqueue(priority, "gradient", nullptr, landing_,
          [this, arrival, source, kept = api_.keep(buffer), settings, priority](const Operation& operation) {
            void* landing = landing_address(operation.output());
            const auto push = [&] {
              worker_.push(
                  handle_, source, landing, priority.in_queues, settings,
                  [kept, end = operation.done()](const Error* error, bool updated) { end(error, updated); },
                  /*gated=*/true);
            };
            arrival->begin(push, [this](uint64_t elements) { worker_.ready(handle_, elements); });
          });
  return arrival;
}

// If a copy has failed, the engine drops this, and release() tells the job.
void MXNetKey::arrived(std::shared_ptr<Arrival> arrival, NDArrayHandle buffer, uint64_t elements, Priority priority) {
  enqueue(priority, "gradient", buffer, nullptr,
          [this, arrival = std::move(arrival), elements](const Operation& operation) {
            arrival->note(elements, [this](uint64_t known) { worker_.ready(handle_, known); });
            operation.done()(nullptr, true);
          });
}

void MXNetKey::skip(Priority priority, Worker::Done done) {
  // The script may give up waiting, and drop the array, while the core still writes there.
  worker_.skip(
      handle_, landing_address(landing_), priority.in_queues,
      [kept = api_.keep(landing_), landed = note_skip(), done = std::move(done)](const Error* error, bool updated) {
        landed();
        done(error, updated);
      });
}

void MXNetKey::leave_out(Priority priority) {
  enqueue(priority, "", nullptr, landing_, [this, priority, landed = note_skip()](const Operation& operation) {
    worker_.skip(
        handle_, landing_address(operation.output()), priority.in_queues,
        [this, key = shared_from_this(), landed, end = operation.done()](const Error* error, bool updated) {
          landed();
          if (!error && updated)
            worker_.fail(misuse("another worker has pushed key '" + name_ +
                                "' in a step in which this one has not: where gradients are clipped by their global "
                                "norm, all push the same keys"));
          end(error, updated);
        },
        /*gated=*/false, /*goes_on=*/true);
  });
}

void MXNetKey::wait_for(NDArrayHandle array, Priority priority) {
  enqueue(priority, "norm before a round", array, landing_,
          [](const Operation& operation) { operation.done()(nullptr, true); });
}

std::function<void()> MXNetKey::note_skip() {
  return [] {};
}

// It reads the landing array, so it runs between the pushes, which write it. The engine drops what would read an array
// whose round has failed.
void MXNetKey::capture(uint64_t snapshot, std::shared_ptr<char> residual, Priority priority, Worker::Done done) {
  const auto told = std::make_shared<CalledOnce>(
      std::move(done), Error(ErrorKind::kStopped, "key '" + name_ + "' was not captured, as a round of it has failed"));
  enqueue(priority, "landing array", landing_, nullptr,
          [this, snapshot, residual = std::move(residual), told](const Operation& operation) {
            worker_.capture(handle_, snapshot, reinterpret_cast<float*>(residual.get()),
                            [residual, told](const Error* error, bool updated) { told->call(error, updated); });
            operation.done()(nullptr, false);
          });
}

void MXNetKey::gather(std::vector<int64_t> ids, NDArrayHandle source, NDArrayHandle destination, uint64_t row_bytes,
                      Priority priority) {
  enqueue(priority, "value", source, destination, [this, ids = std::move(ids), row_bytes](const Operation& operation) {
    const auto* from = static_cast<const char*>(operation.input_address());
    auto* to = static_cast<char*>(api_.values_of(operation.output()));
    for (size_t i = 0; i < ids.size(); ++i)
      std::memcpy(to + i * row_bytes, from + static_cast<uint64_t>(ids[i]) * row_bytes, row_bytes);
    operation.done()(nullptr, true);
  });
}

// From here the operation belongs to the engine. The input is a const variable, the output a mutable one.
void MXNetKey::enqueue(Priority priority, const char* input_word, NDArrayHandle input, NDArrayHandle output,
                       Work work) {
  auto operation =
      std::make_unique<Operation>(shared_from_this(), priority, input_word, input, output, std::move(work));
  api_.check(api_.MXEnginePushAsyncND(&Operation::run, operation.release(), &Operation::release, &kCpu, &input,
                                      input ? 1 : 0, &output, output ? 1 : 0, &kCpuPrioritized, priority.in_engine,
                                      name_.c_str(), false));
}

void* MXNetKey::landing_address(NDArrayHandle landing) const {
  void* address = api_.address_of(landing);
  if (!address)
    throw misuse("the landing array of key '" + name_ +
                 "' was moved into a blocked oneDNN layout; only P3 may write it");
  return address;
}

Error MXNetKey::misuse(const std::string& what) const {
  return Error(ErrorKind::kUsage, worker_.label() + ": " + what);
}

MXNetKey::Operation::Operation(std::shared_ptr<MXNetKey> key, Priority priority, const char* input_word,
                               NDArrayHandle input, NDArrayHandle output, Work work)
    : key_(std::move(key)),
      priority_(priority),
      input_word_(input_word),
      input_(input ? key_->api_.keep(input) : nullptr),
      output_(output ? key_->api_.keep(output) : nullptr),
      work_(std::move(work)) {}

// On a thread of the engine, once the input is ready and nobody uses the output. Only enqueues.
void MXNetKey::Operation::run(void*, void* on_complete, void* param) {
  auto* operation = static_cast<Operation*>(param);
  operation->on_complete_ = *static_cast<OnComplete*>(on_complete);
  operation->has_run_ = true;
  const Work work = std::move(operation->work_);  // it may outlive the operation
  try {
    work(*operation);
  } catch (const Error& error) {
    operation->fail(error);
  } catch (const std::exception& error) {
    operation->fail(operation->key_->misuse("key '" + operation->key_->name_ + "': " + error.what()));
  }
}

const void* MXNetKey::Operation::input_address() const {
  const void* address = key_->api_.address_of(input());
  if (!address)
    throw key_->misuse("the " + input_name() +
                       " is held in a blocked oneDNN layout, which P3 cannot read in place; give it a copy of the "
                       "array");
  return address;
}

Worker::Done MXNetKey::Operation::done() const {
  return [api = &key_->api_, on_complete = on_complete_](const Error* error, bool) {
    end_operation(*api, on_complete, error);
  };
}

void MXNetKey::Operation::fail(const Error& error) const {
  key_->worker_.fail(error);
  done()(&error, false);
}

void MXNetKey::Operation::with_input(std::function<void(const void* input, Worker::Done done)> use) const {
  const MXNetApi& api = key_->api_;
  if (const void* address = api.address_of(input())) return use(address, done());

  NDArrayHandle input_handle = input();
  NDArrayHandle* copies = nullptr;
  int count = 0;  // MXNet makes the array, in the plain layout
  api.check(api.MXImperativeInvoke(api.identity, 1, &input_handle, &count, &copies, 0, nullptr, nullptr));
  const std::unique_ptr<void, int (*)(NDArrayHandle)> copy(copies[0], api.MXNDArrayFree);

  // This operation ends with the one that reads the copy: also if the engine drops that, as the copy has failed.
  const auto ending = std::make_shared<CalledOnce>(
      done(), key_->misuse("the " + input_name() + " was not sent: MXNet could not copy it"));
  key_->enqueue(priority_, input_word_, copy.get(), nullptr, [use = std::move(use), ending](const Operation& copied) {
    use(copied.input_address(), [ending, end = copied.done()](const Error* error, bool updated) {
      ending->call(error, updated);
      end(error, updated);
    });
  });
}

// The engine's deleter. It skips an operation whose input failed, and then this is all we hear of it; without a word
// to the servers the other workers would wait for this worker's gradient.
void MXNetKey::Operation::release(void* param) {
  const std::unique_ptr<Operation> operation(static_cast<Operation*>(param));
  if (operation->has_run_) return;
  operation->key_->worker_.fail(operation->key_->misuse(operation->input_name() +
                                                        " failed on this worker: the MXNet operation that computes it "
                                                        "raised an error, which MXNet reports at the next wait"));
}

}  // namespace p3
