#include "worker/transfer.h"

#include "worker/key.h"

namespace p3 {
namespace {

// By Kind.
constexpr FrameKind kOfSlices[] = {FrameKind::kInit,  FrameKind::kPush,  FrameKind::kPush,
                                   FrameKind::kFetch, FrameKind::kStore, FrameKind::kCapture};
constexpr FrameKind kOfRows[] = {FrameKind::kInit,      FrameKind::kPushRows,  FrameKind::kPushRows,
                                 FrameKind::kFetchRows, FrameKind::kStoreRows, FrameKind::kCapture};

}  // namespace

Transfer::Transfer(Kind its_kind, Key& key, uint8_t part)
    : kind(its_kind), key_(key), part_(part), type_(part == 0 ? key.dtype : sum_type(key.dtype)) {}

Header Transfer::header_of(Header common, Encoding encoding) const {
  common.kind = (key_.row_elements > 0 ? kOfRows : kOfSlices)[static_cast<size_t>(kind)];
  common.dtype = static_cast<uint8_t>(type_);
  common.part = part_;
  common.encoding = static_cast<uint8_t>(encoding);
  return common;
}

}  // namespace p3
