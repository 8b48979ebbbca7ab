// How P3's operations of MXNet's dependency engine end.
#pragma once

#include <stdexcept>

#include "api.h"

namespace p3 {

// The engine's callback, as MXNet 1.9 lays it out. To be copied: the one that the engine hands out is gone when the
// operation returns.
struct OnComplete {
  void (*call)(void* engine, void* param, const std::runtime_error* error);
  void* engine;
  void* param;
};

// Ends an operation, with `error` unless that is null. To be called once for each; from any thread.
//
// MXNet 1.9.1 notes the error of each failed operation in one vector, and looks there for it whenever an operation ends
// that depends on a failed one: on whatever thread that is, and without a lock (ThreadedEngine::OnComplete and its
// global_exception_refs_). Two errors at a time, or one for which the vector has to grow while a thread looks through
// it, corrupt the heap. P3's come by the hundred when a job ends. So they are noted one after the other, and before the
// first one the vector is made so large that it need not grow.
void end_operation(const MXNetApi& api, const OnComplete& on_complete, const std::runtime_error* error);

}  // namespace p3
