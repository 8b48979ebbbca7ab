#include "worker/slice_transfer.h"

#include "p3/compression.h"

namespace p3 {

std::vector<Frame> SliceTransfer::begin(const KeyPlan& plan, Header header) {
  Encoding encoding = data_ == nullptr ? Encoding::kAbsent : Encoding::kPlain;
  if (kind == Kind::kPush) encoding = key_.compression.encoding;
  Frame frame;
  frame.header = header_of(header, encoding);
  if (encoding != Encoding::kPlain && encoding != Encoding::kAbsent) frame.encoder = this;
  if (goes_on_ && !plan.is_synchronous()) frame.header.part = 1;
  const uint32_t count = slice_count(plan);
  std::vector<Frame> frames;
  frames.reserve(count);
  for (uint32_t i = 0; i < count; ++i) {
    frame.header.slice = i;
    if (data_ != nullptr) {
      const Slice slice = slice_at(plan, i);
      frame.header.payload_bytes = static_cast<uint32_t>(encoded_bytes(encoding, type_, slice.elements));
      frame.payload = data_ + slice.offset * size_of(type_);
    }
    frames.push_back(frame);
  }
  return frames;
}

void SliceTransfer::encode(const Header& header, const void* gradient, void* payload) {
  const Slice slice = slice_at(*key_.plan, header.slice);
  float* const left_out = key_.residual.empty() ? nullptr : key_.residual.data() + slice.offset;
  p3::encode(key_.compression, static_cast<const float*>(gradient), left_out, payload, slice.elements);
}

// --- answers -------------------------------------------------------------------------------------------------------

const char* SliceTransfer::problem_with(const Header& header) const {
  const bool about_part = kind == Kind::kFetch || kind == Kind::kStore;
  const bool right_part = header.part == part_ || (header.part == 1 && may_be_over());
  if (header.kind != (about_part ? FrameKind::kPart : FrameKind::kValue) || !right_part) return "unexpected";
  const auto encoding = static_cast<Encoding>(header.encoding);
  if (!may_come(encoding)) return "in another encoding than agreed";
  if (static_cast<DType>(header.dtype) != type_) return "wrongly sized";
  if (encoding == Encoding::kAbsent) return nullptr;
  const Slice slice = slice_at(*key_.plan, header.slice);
  return header.payload_bytes == encoded_bytes(encoding, type_, slice.elements) ? nullptr : "wrongly sized";
}

bool SliceTransfer::may_come(Encoding encoding) const {
  switch (encoding) {
    case Encoding::kPlain:
      return kind != Kind::kStore;
    case Encoding::kFloat16:
      return (is_round() || key_.catches_up) && key_.compression.encoding == Encoding::kFloat16;
    case Encoding::kAbsent:
      return kind == Kind::kStore || kind == Kind::kSkip;
    default:
      return false;
  }
}

// Float16 into the second half of its place: widen_in_place().
void* SliceTransfer::place_of(const Header& header) {
  const auto encoding = static_cast<Encoding>(header.encoding);
  if (encoding == Encoding::kAbsent) return nullptr;
  char* const place = landing_ + slice_at(*key_.plan, header.slice).offset * size_of(type_);
  return encoding == Encoding::kFloat16 ? place + header.payload_bytes : place;
}

const char* SliceTransfer::land(const Header& header, const void*, bool& is_last) {
  const auto encoding = static_cast<Encoding>(header.encoding);
  const Slice slice = slice_at(*key_.plan, header.slice);
  if (encoding == Encoding::kFloat16)
    widen_in_place(reinterpret_cast<float*>(landing_ + slice.offset * size_of(type_)), slice.elements);
  is_updated_ |= encoding != Encoding::kAbsent && header.part == part_;
  is_last = true;
  return nullptr;
}

}  // namespace p3
