#include "worker/ways/dense/slice_transfer.h"

#include <algorithm>
#include <cstring>

#include "codec/dgc.h"
#include "p3/codec.h"
#include "wire/top_k.h"

namespace p3 {

std::vector<Operation> SliceTransfer::ask_for_value() {
  if (kind == Kind::kInit) data_ = nullptr;
  return {};
}

std::vector<Frame> SliceTransfer::begin(const KeyPlan& plan, Header header) {
  Encoding encoding = data_ == nullptr ? Encoding::kAbsent : Encoding::kPlain;
  if (kind == Kind::kPush && !key_.adds_up()) encoding = way_.codec.encoding;
  if (is_round()) way_.residual.begin_round();
  if (keeps()) way_.landed->begin(slice_count(plan), plan.elements * size_of(type_));
  if (way_.optimizer && kind != Kind::kInit) way_.begin_replica();
  if (is_about_replica()) return {};
  settings_.scalars = header.scalars;
  Frame frame;
  frame.header = header_of(header, encoding);
  if (encoding != Encoding::kPlain && encoding != Encoding::kAbsent) frame.encoder = this;
  if (goes_on_ && (!plan.is_synchronous() || plan.tells_norms())) frame.header.part = 1;
  const uint32_t count = slice_count(plan);
  std::vector<Frame> frames;
  frames.reserve(count);
  for (uint32_t i = 0; i < count; ++i) {
    frame.header.slice = i;
    const Slice slice = slice_at(plan, i);
    if (kind == Kind::kPush && way_.codec.makes_steps())
      size_step(frame.header, slice);
    else if (data_ != nullptr)
      frame.header.payload_bytes = static_cast<uint32_t>(encoded_bytes(way_.codec.in(encoding), type_, slice.elements));
    if (data_ != nullptr) frame.payload = data_ + slice.offset * size_of(type_);
    frames.push_back(frame);
  }
  return frames;
}

void SliceTransfer::encode(const Header& header, const void* gradient, void* payload) {
  if (way_.codec.makes_steps()) return encode_step(header, gradient, payload);
  const Slice slice = slice_at(*key_.plan, header.slice);
  p3::encode(way_.codec, static_cast<const float*>(gradient), way_.residual.of(slice), payload, slice.elements);
  if (way_.landed && way_.codec.residuals() > 0) way_.landed->note_sent(header.slice, payload, header.payload_bytes);
}

size_t SliceTransfer::elements_to_send(const Header& header, const Slice& slice) const {
  return p3::elements_to_send(dgc_of(way_.codec), way_.steps.rounds_before + header.round, slice.elements);
}

void SliceTransfer::size_step(Header& header, const Slice& slice) const {
  const size_t count = elements_to_send(header, slice);
  const bool is_plain = count == slice.elements;
  const size_t bytes = is_plain ? count * sizeof(float) : top_k_bytes(count, slice.elements);
  header.encoding = static_cast<uint8_t>(is_plain ? Encoding::kPlain : Encoding::kTopK);
  header.payload_bytes = static_cast<uint32_t>(bytes);
}

void SliceTransfer::encode_step(const Header& header, const void* gradient, void* payload) {
  if (!rate_) {
    rate_ = rate_of(header.scalars);
    const auto* whole = reinterpret_cast<const float*>(data_);
    if (way_.steps.clip_norm > 0)
      *rate_ *= clipping_of(whole, key_.declared.elements, header.scalars.rescale, way_.steps.clip_norm);
  }
  const Slice slice = slice_at(*key_.plan, header.slice);
  float* const u = way_.residual.kept.data() + slice.offset;
  const DgcStep step{way_.steps.momentum, *rate_, dgc_of(way_.codec).masking, elements_to_send(header, slice)};
  p3::encode_step(step, static_cast<const float*>(gradient), u, u + key_.declared.elements, payload, slice.elements);
}

// --- answers -------------------------------------------------------------------------------------------------------

const char* SliceTransfer::problem_with(const Header& header) const {
  const bool about_part = kind == Kind::kFetch || kind == Kind::kStore;
  const bool right_part = header.part == part_ || (header.part == 1 && may_be_over()) || sums_nothing(header);
  const bool right_kind = about_part ? header.kind == FrameKind::kPart
                                     : header.kind == FrameKind::kValue || header.kind == FrameKind::kChange;
  if (!right_kind || !right_part) return "unexpected";
  const auto encoding = static_cast<Encoding>(header.encoding);
  const Slice slice = slice_at(*key_.plan, header.slice);
  if (!may_come(header, slice)) return "in another encoding than agreed";
  if (static_cast<DType>(header.dtype) != type_) return "wrongly sized";
  if (encoding == Encoding::kAbsent) return nullptr;
  const bool fits = can_have_bytes(compression_of(header), type_, slice.elements, header.payload_bytes);
  return fits ? nullptr : "wrongly sized";
}

bool SliceTransfer::may_come(const Header& header, const Slice& slice) const {
  const auto encoding = static_cast<Encoding>(header.encoding);
  const KeyPlan& plan = *key_.plan;
  if (header.kind == FrameKind::kChange) {
    const Compression expected = plan.value_codec.if_shorter(slice.elements);
    return is_round() && expected.codec() != nullptr && encoding == expected.encoding;
  }
  if (encoding == Encoding::kPlain) return kind != Kind::kStore;
  if (encoding == Encoding::kAbsent) return kind == Kind::kStore || kind == Kind::kSkip || asks_for_round_alone();
  if (plan.takes_steps()) return is_round() && encoding == way_.codec.encoding;
  const bool may_be_sum = is_round() || (kind == Kind::kInit && header.round > 0);
  return may_be_sum && encoding == plan.codec_of_sums().if_shorter(slice.elements).encoding;
}

Compression SliceTransfer::compression_of(const Header& answer) const {
  const KeyPlan& plan = *key_.plan;
  const Compression how = answer.kind == FrameKind::kChange ? plan.value_codec
                          : plan.takes_steps()              ? plan.codec
                                                            : plan.codec_of_sums();
  return how.in(static_cast<Encoding>(answer.encoding));
}

void* SliceTransfer::place_of(const Header& header) {
  if (static_cast<Encoding>(header.encoding) != Encoding::kPlain) return nullptr;
  const size_t offset = slice_at(*key_.plan, header.slice).offset * size_of(type_);
  return keeps() ? way_.landed->at(offset) : landing_ + offset;
}

const char* SliceTransfer::decode(Frame& answer) {
  Header& header = answer.header;
  const Compression how = compression_of(header);
  if (how.codec() == nullptr) return nullptr;
  const Slice slice = slice_at(*key_.plan, header.slice);
  const void* const payload = answer.payload;
  if (const char* problem = problem_with_encoded(how, payload, header.payload_bytes, slice.elements)) return problem;
  float* const place = place_of_slice(slice);
  if (header.kind == FrameKind::kChange) {
    add_encoded_to_sum(how, place, payload, slice.elements);
  } else if (key_.plan->takes_steps()) {
    decay_weight(decay_of(header.scalars), place, slice.elements);
    subtract_top_k(place, payload, slice.elements);
  } else {
    start_encoded_sum(how, place, payload, slice.elements);
  }
  header.kind = FrameKind::kValue;
  header.encoding = static_cast<uint8_t>(Encoding::kPlain);
  header.payload_bytes = static_cast<uint32_t>(slice.elements * sizeof(float));
  answer.payload = place;
  return nullptr;
}

void SliceTransfer::keep(const Header& answer, const void* payload) {
  const bool has_come = static_cast<Encoding>(answer.encoding) != Encoding::kAbsent;
  const Claimed what = has_come                 ? Claimed::kValue
                       : sums_nothing(answer)   ? Claimed::kSumOfNothing
                       : asks_for_round_alone() ? Claimed::kRoundAlone
                                                : Claimed::kStayed;
  if (kind == Kind::kSkip) settings_.scalars = answer.scalars;  // of a push they are its own
  way_.landed->note(answer, what, kind == Kind::kInit, settings_);
  const Slice slice = slice_at(*key_.plan, answer.slice);
  if (!has_come || slice.elements == 0) return;
  const size_t offset = slice.offset * size_of(type_), bytes = slice.elements * size_of(type_);
  char *const here = way_.landed->at(offset), *const there = landing_ + offset;
  if (payload != here) std::memcpy(here, payload, bytes);
  const void* value = payload;
  if (way_.replica)
    value = is_round() ? way_.replica->update(slice, here, settings_) : way_.replica->replace(slice, here);
  if (value != there) std::memcpy(there, value, bytes);
}

const char* SliceTransfer::land(const Header& header, const void* payload, bool& is_last) {
  if (keeps()) keep(header, payload);
  if (!key_.plan->is_synchronous()) way_.progress.note(header);
  is_updated_ |= static_cast<Encoding>(header.encoding) != Encoding::kAbsent && header.part == part_;
  if (sums_nothing(header)) sums_of_nothing_.push_back(header.slice);
  is_last = true;
  return nullptr;
}

void SliceTransfer::finish() {
  if (is_about_replica()) {
    std::vector<char>& its = way_.replica->array(part_);
    if (kind == Kind::kFetch)
      std::copy(its.begin(), its.end(), landing_);
    else
      std::copy_n(data_, its.size(), its.begin());
    return;
  }
  if (!is_updated_ || way_.replica) return;
  // Else they would keep the sum of the round before.
  for (const uint32_t index : sums_of_nothing_) {
    const Slice slice = slice_at(*key_.plan, index);
    std::memset(landing_ + slice.offset * size_of(type_), 0, slice.elements * size_of(type_));
  }
}

void SliceTransfer::count() {
  if (is_round()) way_.residual.end_round();
  Transfer::count();
}

}  // namespace p3
