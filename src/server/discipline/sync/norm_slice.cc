#include "server/discipline/sync/norm_slice.h"

#include <cstring>

namespace p3 {

void NormSlice::resume(Reply& reply) {
  if (key.norm->is_complete({this, {published + 1, priority_}})) ServerSlice::resume(reply);
}

void NormSlice::update() {
  const bool goes_on = round_.goes_on;
  ServerSlice::update();
  const NormPart norm = key.norm->take();
  const double told[kNormElements] = {norm.squares, norm.largest};
  std::memcpy(value_, told, sizeof told);
  has_new_value_ = goes_on;
}

}  // namespace p3
