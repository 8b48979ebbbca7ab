#include "worker/way.h"

#include "worker/capture_transfer.h"
#include "worker/key.h"

namespace p3 {

void WayHost::refuse_call(const std::string& why) const { throw Error(ErrorKind::kUsage, label() + ": " + why + "."); }

void Way::refuse(const std::string& why) const { host_.refuse_call("key '" + key.name + "' " + why); }

size_t Way::bytes(uint8_t part) const {
  const DType type = key.declared.dtype;
  return key.declared.elements * size_of(part == 0 ? type : sum_type(type));
}

std::shared_ptr<Transfer> Way::capture(bool asks, float* kept) {
  if (kept != nullptr) refuse("keeps nothing between its rounds on this worker");
  return std::make_shared<CaptureTransfer>(key, asks);
}

}  // namespace p3
