#include "transport/van.h"

#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "transport/parts.h"

namespace p3 {

Van::Van(int van_number, std::unique_ptr<Stream> stream, std::string label, int peer, const NodeOptions& options,
         bool bounded)
    : number(van_number),
      is_bounded(bounded),
      label_(std::move(label)),
      peer_(peer),
      recorder_(options.trace.get()),
      checksums_(options.checksums),
      stream_(std::move(stream)) {}

void Van::push(Frame frame, std::chrono::steady_clock::time_point now) {
  frame.queued_at = now;
  if (carries_slice(frame.header.kind)) trace_at(recorder_, now, TraceKind::kQueued, frame.header, peer_);
  hold(held_by(frame));
  (frame.yields && !is_local() ? yielding_ : queue_).push(urgency_of(frame.header), frame);
  peak_queued_ = std::max<uint64_t>(peak_queued_, queued());
}

void Van::hold(uint64_t bytes) {
  const uint64_t held = held_bytes_.fetch_add(bytes) + bytes;
  uint64_t peak = peak_held_bytes_;
  while (held > peak && !peak_held_bytes_.compare_exchange_weak(peak, held)) continue;
}

void Van::drop(std::vector<Frame>& unsent) {
  advance(State::kLost);
  if (std::exchange(writing_, false)) unsent = writes_;
  for (PriorityQueue<Frame>* queue : {&queue_, &yielding_})
    while (!queue->empty()) unsent.push_back(queue->pop());
  for (const Frame& frame : unsent) let_go(held_by(frame));
}

void Van::replace(std::unique_ptr<Stream> stream, std::chrono::steady_clock::time_point now) {
  stream_ = std::move(stream);
  reading_ = Reading::kHeader;
  ahead_begin_ = ahead_end_ = 0;
  out_fields_ = in_fields_ = nullptr;
  error_ = 0;
  writable = true;
  broken = false;
  state_ = State::kOpen;
  last_read = last_write = now;
}

const PriorityQueue<Frame>* Van::next_queue(const Precedence& precedence) const {
  const PriorityQueue<Frame>* next = queue_.empty() ? nullptr : &queue_;
  if (yielding_.empty() || precedence.holds_back(yielding_.top().header.round)) return next;
  return next == nullptr || yielding_.top_urgency().is_sooner_than(next->top_urgency()) ? &yielding_ : next;
}

void Van::begin_frames(std::chrono::steady_clock::time_point now, const Precedence& precedence) {
  if (writing_) return;
  writes_.clear();
  to_write_ = written_ = 0;
  writing_ = true;
  prepared_ = false;
  do {
    writes_.push_back(take_next(precedence));
    const Frame& taken = writes_.back();
    to_write_ += bytes_of(taken);
    if (!carries_slice(taken.header.kind)) continue;
    queued_for_ += now - taken.queued_at;
    trace_at(recorder_, now, TraceKind::kSendBegin, taken.header, peer_);
  } while (takes_more(precedence));
}

bool Van::takes_more(const Precedence& precedence) const {
  const PriorityQueue<Frame>* const next = next_queue(precedence);
  return next != nullptr && to_write_ + bytes_of(next->top()) <= kGathered;
}

Frame Van::take_next(const Precedence& precedence) {
  PriorityQueue<Frame>& queue = next_queue(precedence) == &yielding_ ? yielding_ : queue_;
  const Frame& next = queue.top();
  return next.goes_by_fields && !are_same(next.fields, out_fields_) ? telling_fields_of(next) : queue.pop();
}

// As urgent as the frame that it precedes, which stays where it is: a more urgent one that comes meanwhile is looked at anew.
Frame Van::telling_fields_of(const Frame& next) {
  out_fields_ = next.fields;
  Frame telling;
  telling.header.kind = FrameKind::kFields;
  telling.header.key = next.header.key;
  telling.header.round = next.header.round;
  telling.header.priority = next.header.priority;
  telling.header.payload_bytes =
      static_cast<uint32_t>(out_fields_ == nullptr ? 0 : out_fields_->size() * sizeof(double));
  telling.payload = out_fields_ == nullptr ? nullptr : out_fields_->data();
  telling.fields = out_fields_;
  hold(held_by(telling));
  return telling;
}

void* Van::room_for_fields(size_t bytes) {
  arriving_fields_.resize(bytes / sizeof(double));
  return arriving_fields_.data();
}

void Van::take_fields() {
  in_fields_ = arriving_fields_.empty() ? nullptr : std::make_shared<const FieldValues>(arriving_fields_);
}

void Van::prepare() {
  if (std::exchange(prepared_, true)) return;
  if (writes_.size() == 1) {
    Frame& alone = writes_.front();
    if (alone.encoder != nullptr) staged_.resize(alone.header.payload_bytes);
    return prepare(alone, staged_.data());
  }
  staged_.resize(to_write_);
  char* at = staged_.data();
  for (Frame& frame : writes_) {
    char* const payload = at + sizeof(Header);
    prepare(frame, payload);
    if (frame.header.payload_bytes > 0 && frame.payload != payload)
      std::memcpy(payload, frame.payload, frame.header.payload_bytes);
    std::memcpy(at, &frame.header, sizeof(Header));
    at += bytes_of(frame);
  }
}

void Van::prepare(Frame& frame, char* room_for_payload) {
  if (frame.encoder != nullptr) {
    frame.encoder->encode(frame.header, frame.payload, room_for_payload);
    frame.payload = room_for_payload;
  }
  if (checksums_ && has_checksum(frame.header.kind)) frame.header.crc32c = checksum_of(frame.header, frame.payload);
}

Van::Progress Van::write_some() {
  prepare();
  iovec parts[2];
  int count = 0;
  if (writes_.size() > 1) {
    parts[count++] = rest_of(staged_.data(), to_write_, written_);
  } else {
    const Frame& alone = writes_.front();
    const size_t of_header = std::min(written_, sizeof(Header));
    if (of_header < sizeof(Header)) parts[count++] = rest_of(&alone.header, sizeof(Header), of_header);
    if (alone.header.payload_bytes > 0)
      parts[count++] = rest_of(alone.payload, alone.header.payload_bytes, written_ - of_header);
  }
  const IoResult result = stream_->write(parts, count);
  written_ += result.bytes;
  bytes_sent_.fetch_add(result.bytes, std::memory_order_relaxed);
  if (written_ == to_write_) {
    writing_ = false;
    for (const Frame& frame : writes_) note_left(frame);
    return Progress::kFrameDone;
  }
  if (result.error == 0 || result.error == EAGAIN) return Progress::kBlocked;  // it took less than offered: it is full
  error_ = result.error;
  return Progress::kBroken;
}

void Van::note_left(const Frame& frame) {
  let_go(held_by(frame));
  if (!carries_slice(frame.header.kind)) return;
  slices_sent_.fetch_add(1, std::memory_order_relaxed);
  trace(recorder_, TraceKind::kSendEnd, frame.header, peer_);
}

void Van::add_to(Traffic& total) const {
  total.bytes_sent += bytes_sent_;
  total.bytes_received += bytes_received_;
  total.slices_sent += slices_sent_;
  total.slices_received += slices_received_;
  total.queued_slices += queued();
  total.peak_queued_slices = std::max(total.peak_queued_slices, peak_queued_);
  total.queued_s += std::chrono::duration<double>(queued_for_).count();
  total.held_bytes += held_bytes_;
  total.peak_held_bytes = std::max<uint64_t>(total.peak_held_bytes, peak_held_bytes_);
}

Van::Progress Van::read_some() {
  const size_t begun = ahead_bytes();  // of a header
  std::memmove(ahead_.data(), ahead_.data() + ahead_begin_, begun);
  ahead_begin_ = 0;
  ahead_end_ = begun;
  iovec parts[2];
  int count = 0;
  const size_t rest = reading_ == Reading::kPayload ? in_header_.payload_bytes - in_payload_bytes_ : 0;
  if (rest > 0) parts[count++] = {static_cast<char*>(in_payload_) + in_payload_bytes_, rest};
  parts[count++] = {ahead_.data() + ahead_end_, ahead_.size() - ahead_end_};
  const IoResult result = stream_->read(parts, count);
  if (result.error == EAGAIN) return Progress::kBlocked;
  if (result.error != 0) {
    error_ = result.error;
    return Progress::kBroken;
  }
  if (result.end) return Progress::kEnd;
  bytes_received_.fetch_add(result.bytes, std::memory_order_relaxed);
  has_read_all_ = result.emptied;
  const size_t of_payload = std::min(result.bytes, rest);
  in_payload_bytes_ += of_payload;
  ahead_end_ += result.bytes - of_payload;
  return Progress::kMoved;
}

// A payload's rest is of no use before it is there, so the kernel need not wake us for each of its segments.
void Van::await_rest() {
  const size_t rest = reading_ == Reading::kPayload ? in_header_.payload_bytes - in_payload_bytes_ : 1;
  stream_->await(std::max<size_t>(rest, 1));
}

Van::Event Van::next() {
  if (reading_ == Reading::kFrameReady) reading_ = Reading::kHeader;  // the caller is done with the frame told last
  if (reading_ == Reading::kHeader && ahead_bytes() >= sizeof(Header)) {
    take_ahead(&in_header_, sizeof(Header));
    reading_ = Reading::kHeaderReady;
    if (carries_slice(in_header_.kind)) trace(recorder_, TraceKind::kReceiveBegin, in_header_, peer_);
    return Event::kHeader;
  }
  if (reading_ == Reading::kPayload && in_payload_bytes_ == in_header_.payload_bytes) {
    reading_ = Reading::kFrameReady;
    if (carries_slice(in_header_.kind)) {
      slices_received_.fetch_add(1, std::memory_order_relaxed);
      trace(recorder_, TraceKind::kReceiveEnd, in_header_, peer_);
    }
    return Event::kFrame;
  }
  return Event::kNothing;
}

void Van::payload_goes_to(void* destination) {
  in_payload_ = destination;
  in_payload_bytes_ = std::min<size_t>(in_header_.payload_bytes, ahead_bytes());
  if (in_payload_bytes_ > 0) take_ahead(destination, in_payload_bytes_);
  reading_ = Reading::kPayload;
}

void Van::take_ahead(void* to, size_t bytes) {
  std::memcpy(to, ahead_.data() + ahead_begin_, bytes);
  ahead_begin_ += bytes;
}

}  // namespace p3
