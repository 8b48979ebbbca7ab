#include "completion.h"

#include <cstdint>
#include <utility>

#include "p3/thread_annotations.h"

namespace p3 {

namespace {

// For errors: more than anybody queues operations ahead of the first one that fails.
constexpr int kRoom = 1 << 13;

constexpr int kAsync = 4;  // runs on the thread that queues it

void fail(void*, void* on_complete, void* error) {
  const auto& end = *static_cast<OnComplete*>(on_complete);
  end.call(end.engine, end.param, static_cast<std::runtime_error*>(error));
}

// The vector doubles when it is full: to twice kRoom, when it gets one more. Each error needs an array of its own, for
// an operation on a failed one's array takes over its error. Without memory for them there is less room.
void make_room(const MXNetApi& api, std::runtime_error error) {
  for (int i = 0; i <= kRoom; ++i) {
    const uint32_t shape[] = {1};
    NDArrayHandle array = nullptr;
    if (api.MXNDArrayCreate(shape, 1, kCpu.device_type, kCpu.device_id, /*delay_alloc=*/1, &array) != 0) return;
    api.MXEnginePushAsyncND(&fail, &error, nullptr, &kCpu, nullptr, 0, &array, 1, &kAsync, 0, "P3's room for errors",
                            false);
    api.MXNDArrayFree(array);
  }
}

}  // namespace

void end_operation(const MXNetApi& api, const OnComplete& on_complete, const std::runtime_error* error) {
  if (!error) return on_complete.call(on_complete.engine, on_complete.param, nullptr);
  static Mutex mutex;
  static bool has_room = false;
  MutexLock lock(mutex);
  if (!std::exchange(has_room, true)) make_room(api, *error);
  on_complete.call(on_complete.engine, on_complete.param, error);
}

}  // namespace p3
