#include "worker/ways/gathered/factors_transfer.h"

#include <algorithm>

namespace p3 {

// Each slice has a push of every worker, so that its value comes when this worker waits for it, and not before. Those
// without content go first: behind this worker's own slices they would hold up the others'.
std::vector<Frame> FactorsTransfer::begin(const KeyPlan& plan, Header header) {
  if (part_ != 0) return {};
  settings_.scalars = header.scalars;
  Frame absent;
  absent.header = header_of(header, Encoding::kAbsent);
  absent.header.part = kind == Kind::kPush;
  std::vector<Frame> frames, own;
  frames.reserve(slice_count(plan));
  for (uint32_t i = 0; i < slice_count(plan); ++i) {
    Frame frame = absent;
    frame.header.slice = i;
    if (factors_ == nullptr || worker_of(plan, i) != way_.rank()) {
      frames.push_back(frame);
      continue;
    }
    const Slice slice = slice_at(plan, i);
    frame.header.part = 0;
    frame.header.encoding = static_cast<uint8_t>(Encoding::kPlain);
    frame.header.payload_bytes = static_cast<uint32_t>(slice.elements * sizeof(float));
    frame.payload = factors_ + slice.offset - static_cast<uint64_t>(way_.rank()) * plan.elements;
    own.push_back(frame);
  }
  frames.insert(frames.end(), own.begin(), own.end());
  return frames;
}

const char* FactorsTransfer::problem_with(const Header& header) const {
  if (header.kind != FrameKind::kValue || header.part != 0) return "unexpected";
  const auto encoding = static_cast<Encoding>(header.encoding);
  const int worker = worker_of(*key_.plan, header.slice);
  const bool is_others = is_round() && worker != way_.rank() && !way_.is_here(worker);
  if (encoding != Encoding::kAbsent && (encoding != Encoding::kPlain || !is_others))
    return "in another encoding than agreed";
  const uint32_t elements = encoding == Encoding::kAbsent ? 0 : slice_at(*key_.plan, header.slice).elements;
  const bool fits = static_cast<DType>(header.dtype) == type_ && header.payload_bytes == elements * sizeof(float);
  return fits ? nullptr : "wrongly sized";
}

void* FactorsTransfer::place_of(const Header& header) {
  if (static_cast<Encoding>(header.encoding) == Encoding::kAbsent) return nullptr;
  return way_.update.gathered() + slice_at(*key_.plan, header.slice).offset;
}

const char* FactorsTransfer::land(const Header& header, const void*, bool& is_last) {
  is_last = true;
  if (static_cast<Encoding>(header.encoding) == Encoding::kAbsent) return nullptr;
  way_.update.note(worker_of(*key_.plan, header.slice));
  if (kind == Kind::kSkip) settings_.scalars = header.scalars;
  return nullptr;
}

void FactorsTransfer::finish() {
  if (kind == Kind::kFetch) std::copy_n(way_.update.state(part_), way_.update.shape().elements(), weight_);
  if (kind == Kind::kStore) std::copy_n(factors_, way_.update.shape().elements(), way_.update.state(part_));
}

void FactorsTransfer::compute() {
  is_updated_ = way_.update.update(weight_, way_.rank(), factors_, settings_, key_.plan->reduction);
}

}  // namespace p3
