// A key of either kind between two rounds, for a snapshot: see Worker::capture.
#pragma once

#include <algorithm>
#include <vector>

#include "worker/key.h"
#include "worker/transfer.h"

namespace p3 {

class CaptureTransfer final : public Transfer {
 public:
  // `residual` gets the key's, if it is not null. `asks`: the servers are to copy the key.
  CaptureTransfer(Key& key, bool asks, float* residual)
      : Transfer(Kind::kCapture, key), asks_(asks), residual_(residual) {}

  std::vector<Frame> begin(const KeyPlan& plan, Header header) override {
    key_.captured_plan = plan;
    change_ = key_.residual_change;
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
  // No push is under way, so nothing else touches the residual; it may be large, and no lock is held.
  void finish() override {
    if (residual_ == nullptr) return;
    const std::vector<float>& kept = change_.undo ? key_.former_residual : key_.residual;
    float* const end = std::transform(kept.begin(), kept.end(), residual_,
                                      [factor = change_.factor](float one) { return factor * one; });
    if (key_.takes_steps()) write_round(key_.rounds_before + key_.round, end);
  }

 private:
  const bool asks_;
  float* const residual_;
  ResidualChange change_;
};

}  // namespace p3
