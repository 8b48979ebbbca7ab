#include "transport/van.h"

#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
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
  if (std::exchange(writing_, false)) unsent.push_back(current_);
  for (PriorityQueue<Frame>* queue : {&queue_, &yielding_})
    while (!queue->empty()) unsent.push_back(queue->pop());
  for (const Frame& frame : unsent) let_go(held_by(frame));
}

void Van::replace(std::unique_ptr<Stream> stream, std::chrono::steady_clock::time_point now) {
  stream_ = std::move(stream);
  reading_ = Reading::kHeader;
  in_header_bytes_ = ahead_bytes_ = 0;
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

void Van::begin_frame(std::chrono::steady_clock::time_point now, const Precedence& precedence) {
  if (writing_) return;
  PriorityQueue<Frame>& queue = next_queue(precedence) == &yielding_ ? yielding_ : queue_;
  const Frame& next = queue.top();
  current_ = next.goes_by_fields && !are_same(next.fields, out_fields_) ? telling_fields_of(next) : queue.pop();
  writing_ = true;
  prepared_ = false;
  written_ = 0;
  if (!carries_slice(current_.header.kind)) return;
  queued_for_ += now - current_.queued_at;
  trace_at(recorder_, now, TraceKind::kSendBegin, current_.header, peer_);
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
  if (current_.encoder != nullptr) {
    encoded_.resize(current_.header.payload_bytes);
    current_.encoder->encode(current_.header, current_.payload, encoded_.data());
    current_.payload = encoded_.data();
  }
  if (checksums_ && has_checksum(current_.header.kind))
    current_.header.crc32c = checksum_of(current_.header, current_.payload);
}

Van::Progress Van::write_some() {
  prepare();
  const size_t header_done = std::min(written_, sizeof(Header));
  const size_t payload_done = written_ - header_done;
  iovec parts[2];
  int count = 0;
  if (header_done < sizeof(Header)) parts[count++] = rest_of(&current_.header, sizeof(Header), header_done);
  if (current_.header.payload_bytes > 0)
    parts[count++] = rest_of(current_.payload, current_.header.payload_bytes, payload_done);

  const IoResult result = stream_->write(parts, count);
  written_ += result.bytes;
  bytes_sent_.fetch_add(result.bytes, std::memory_order_relaxed);
  if (written_ == sizeof(Header) + current_.header.payload_bytes) {
    writing_ = false;
    let_go(held_by(current_));
    if (carries_slice(current_.header.kind)) {
      slices_sent_.fetch_add(1, std::memory_order_relaxed);
      trace(recorder_, TraceKind::kSendEnd, current_.header, peer_);
    }
    return Progress::kFrameDone;
  }
  if (result.error == 0 || result.error == EAGAIN) return Progress::kBlocked;  // it took less than offered: it is full
  error_ = result.error;
  return Progress::kBroken;
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
  iovec parts[2];
  int count = 0;
  if (reading_ == Reading::kPayload) {
    parts[count++] = rest_of(in_payload_, in_header_.payload_bytes, in_payload_bytes_);
    parts[count++] = rest_of(&ahead_, sizeof(Header), ahead_bytes_);
  } else {
    parts[count++] = rest_of(&in_header_, sizeof(Header), in_header_bytes_);
  }
  const IoResult result = stream_->read(parts, count);
  if (result.error == EAGAIN) return Progress::kBlocked;
  if (result.error != 0) {
    error_ = result.error;
    return Progress::kBroken;
  }
  if (result.end) return Progress::kEnd;
  bytes_received_.fetch_add(result.bytes, std::memory_order_relaxed);
  has_read_all_ = result.emptied;
  const size_t first = std::min(result.bytes, parts[0].iov_len);
  if (reading_ == Reading::kPayload) {
    in_payload_bytes_ += first;
    ahead_bytes_ += result.bytes - first;
  } else {
    in_header_bytes_ += first;
  }
  return Progress::kMoved;
}

// A payload's rest is of no use before it is there, so the kernel need not wake us for each of its segments.
void Van::await_rest() {
  const size_t rest = reading_ == Reading::kPayload ? in_header_.payload_bytes - in_payload_bytes_ : 1;
  stream_->await(std::max<size_t>(rest, 1));
}

Van::Event Van::next() {
  if (reading_ == Reading::kFrameReady) {  // the caller is done with the frame told last
    in_header_ = ahead_;
    in_header_bytes_ = ahead_bytes_;
    ahead_bytes_ = 0;
    reading_ = Reading::kHeader;
  }
  if (reading_ == Reading::kHeader && in_header_bytes_ == sizeof(Header)) {
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
  in_payload_bytes_ = 0;
  reading_ = Reading::kPayload;
}

}  // namespace p3
