// A key between two rounds, for a snapshot: see Worker::capture.
#pragma once

#include <vector>

#include "worker/key.h"
#include "worker/transfer.h"

namespace p3 {

class CaptureTransfer : public Transfer {
 public:
  // `asks`: the servers are to copy the key.
  CaptureTransfer(Key& key, bool asks) : Transfer(Kind::kCapture, key), asks_(asks) {}

  std::vector<Frame> begin(const KeyPlan& plan, Header header) override {
    key_.captured_plan = plan;
    std::vector<Frame> frames;
    header = header_of(header, Encoding::kAbsent);
    for (header.slice = 0; asks_ && header.slice < slice_count(plan); ++header.slice) frames.push_back({header});
    return frames;
  }

  const char* problem_with(const Header& header) const override {
    if (header.kind != FrameKind::kPart || header.part != 0) return "unexpected";
    if (static_cast<Encoding>(header.encoding) != Encoding::kAbsent) return "in another encoding than agreed";
    return static_cast<DType>(header.dtype) == type_ ? nullptr : "wrongly sized";
  }

 private:
  const bool asks_;
};

}  // namespace p3
