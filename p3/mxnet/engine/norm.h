// The rounds of a key of norms (KeyPlan::tells_norms) as operations of MXNet's engine: so what reads a round's norm
// waits for it, and the script does not.
//
// Threads, memory, errors: as in engine.h.
#pragma once

#include <cstdint>

#include "engine.h"

namespace p3 {

class MXNetNorm : public MXNetKey {
 public:
  MXNetNorm(const MXNetApi* api, Worker* worker, int handle, std::string name)
      : MXNetKey(api, worker, handle, std::move(name), nullptr) {}

  // The next round, of a step that this worker takes. It may begin before the store's other keys begin theirs: `norm`,
  // one float32 in CPU memory, becomes the norm of what the servers have summed in it. `before`: that of the round
  // before, or null. `elements`: the key's.
  void tell(NDArrayHandle before, NDArrayHandle norm, uint64_t elements, Priority priority);
  // The same in join(), at once and past the engine: nothing queued there may use `norm`. Not `updated`: no worker
  // takes the step.
  void skip(NDArrayHandle norm, uint64_t elements, Priority priority, Worker::Done done);
  // `factor`, one float32 in CPU memory, becomes min(1, max_norm / (norm + 1e-8)), computed in float64 and rounded; NaN
  // if the norm is. MXNet's own operators for that share a workspace with those of layers, which would wait for it.
  void factor(NDArrayHandle norm, NDArrayHandle factor, double max_norm, Priority priority);

 private:
  void begin(void* norm, uint64_t elements, Priority priority, Worker::Done done, bool goes_on);
};

}  // namespace p3
