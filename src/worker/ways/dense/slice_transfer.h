// One operation on a dense key on its worker: see transfer.h. A value lands where it belongs as it is received; what is
// encoded is received elsewhere first.
#pragma once

#include <optional>
#include <vector>

#include "worker/key.h"
#include "worker/transfer.h"
#include "worker/ways/dense/dense_way.h"

namespace p3 {

class SliceTransfer final : public Transfer {
 public:
  // `data` goes out (null: nothing does), the answer comes into `landing`; both are of the whole key, or of a part of it.
  // `goes_on`: of a skip, as Worker::skip.
  SliceTransfer(Kind its_kind, DenseWay& way, const void* data, void* landing, uint8_t part = 0, bool goes_on = false)
      : Transfer(its_kind, way.key, part),
        way_(way),
        data_(static_cast<const char*>(data)),
        landing_(static_cast<char*>(landing)),
        goes_on_(goes_on) {}

  std::vector<Operation> ask_for_value() override;
  std::vector<Frame> begin(const KeyPlan& plan, Header header) override;
  void goes_by(const SharedFields& fields) override { settings_.fields = fields; }
  void encode(const Header& header, const void* gradient, void* payload) override;
  Frame again(Frame frame) override { return way_.landed ? way_.landed->again(frame) : frame; }
  const char* problem_with(const Header& header) const override;
  void* place_of(const Header& header) override;
  const char* decode(Frame& answer) override;
  const char* land(const Header& header, const void* payload, bool& is_last) override;
  void finish() override;
  void count() override;

 private:
  // Whether what comes is a value, and this worker keeps it.
  bool keeps() const { return way_.landed && (is_round() || kind == Kind::kInit); }
  // Of a slice that has come as it is, or was decoded: in memory of its own, and what becomes of it where it lands.
  void keep(const Header& answer, const void* payload);
  // Whether it is about what this worker has itself.
  bool is_about_replica() const { return way_.replica && (kind == Kind::kFetch || kind == Kind::kStore); }
  bool may_come(const Header& header, const Slice& slice) const;
  // How the payload of an answer is encoded, if it may come so.
  Compression compression_of(const Header& answer) const;
  // Whether the answer may say that all workers have taken their last step, though it brings a value.
  bool may_be_over() const { return kind == Kind::kSkip && !key_.plan->is_synchronous(); }
  bool sums_nothing(const Header& answer) const {
    return kind == Kind::kSkip && key_.plan->is_synchronous() && answer.part == 1 &&
           static_cast<Encoding>(answer.encoding) == Encoding::kAbsent;
  }
  bool asks_for_round_alone() const { return kind == Kind::kInit && key_.next_init == InitPart::kRoundAlone; }
  // Of a key that takes steps: how many elements of the slice leave, and what does.
  size_t elements_to_send(const Header& header, const Slice& slice) const;
  void size_step(Header& header, const Slice& slice) const;
  void encode_step(const Header& header, const void* gradient, void* payload);
  float* place_of_slice(const Slice& slice) const { return reinterpret_cast<float*>(landing_) + slice.offset; }

  DenseWay& way_;
  const char* data_;
  char* const landing_;
  const bool goes_on_;
  RoundSettings settings_{};               // of the round
  std::optional<float> rate_;              // of the step, from its first slice on; who sends
  std::vector<uint32_t> sums_of_nothing_;  // of this round: slices that a lost worker's gradient has not come to
};

}  // namespace p3
