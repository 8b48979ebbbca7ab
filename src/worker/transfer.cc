#include "worker/transfer.h"

#include "worker/key.h"

namespace p3 {

Transfer::Transfer(Kind its_kind, Key& key, uint8_t part)
    : kind(its_kind), key_(key), part_(part), type_(part == 0 ? key.declared.dtype : sum_type(key.declared.dtype)) {}

std::vector<Operation> Transfer::ask_for_value() { return {}; }

void Transfer::count() { key_.way->progress.complete(is_round(), key_.round); }

Header Transfer::header_of(Header common, Encoding encoding) const {
  const FrameKinds& frames = key_.way->frames;
  const FrameKind of_kind[] = {FrameKind::kInit, frames.push,  frames.push,
                               frames.fetch,     frames.store, FrameKind::kCapture};
  common.kind = of_kind[static_cast<size_t>(kind)];
  common.dtype = static_cast<uint8_t>(type_);
  common.part = kind == Kind::kInit ? static_cast<uint8_t>(key_.next_init) : part_;
  common.encoding = static_cast<uint8_t>(encoding);
  return common;
}

}  // namespace p3
