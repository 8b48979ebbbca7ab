// One operation on a key of factors on its worker: see transfer.h and p3/factors.h. This worker's factors leave, those of
// the others are gathered, and then the weight is updated in place.
#pragma once

#include <vector>

#include "worker/key.h"
#include "worker/transfer.h"
#include "worker/ways/gathered/gathered_way.h"

namespace p3 {

class FactorsTransfer final : public Transfer {
 public:
  // `factors`: null in kInit, which only tells the servers of this worker, and in kSkip. `weight`: of all its elements.
  // kFetch and kStore are about a `part` of this worker's own state: to `weight`, or from `factors`.
  FactorsTransfer(Kind its_kind, GatheredWay& way, const void* factors, void* weight, uint8_t part = 0)
      : Transfer(its_kind, way.key, part),
        way_(way),
        factors_(static_cast<const float*>(factors)),
        weight_(static_cast<float*>(weight)) {}

  std::vector<Frame> begin(const KeyPlan& plan, Header header) override;
  void goes_by(const SharedFields& fields) override { settings_.fields = fields; }
  bool leaves_whole() const override { return true; }  // its slices are few
  const char* problem_with(const Header& header) const override;
  void* place_of(const Header& header) override;
  const char* land(const Header& header, const void* payload, bool& is_last) override;
  void finish() override;
  bool computes() const override { return is_round(); }
  void compute() override;

 private:
  GatheredWay& way_;
  const float* const factors_;
  float* const weight_;
  RoundSettings settings_{};  // of the round
};

}  // namespace p3
