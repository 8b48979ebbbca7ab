// One connection: the frames that wait to leave, the one being written, the one being read.
//
// Threads: push() and queue accessors under the Transport's lock; write_some() by who holds its sending role,
//          read_some() by the receiver. The Van itself has no lock and no thread.
// Calls:   small frames that wait for the same van leave in one write, and what came of several is read at once.
// State:   of the connection, as its reader sees it, it only moves forward; replace() begins a new life.
// Memory:  a queued frame borrows its payload (see Transport).
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "p3/node.h"
#include "p3/stream.h"
#include "p3/trace.h"
#include "p3/wire.h"
#include "transport/precedence.h"
#include "transport/priority_queue.h"

namespace p3 {

// Writes a payload in fewer bytes when its turn to leave has come.
class Encoder {
 public:
  virtual ~Encoder() = default;
  virtual void encode(const Header& header, const void* source, void* payload) = 0;
};

struct Frame {
  Header header;
  const void* payload = nullptr;  // header.payload_bytes long; with an encoder: its source
  void* context = nullptr;        // if not null, the owner is told when the frame has left
  Encoder* encoder = nullptr;
  uint32_t copied_bytes = 0;                          // of a payload that may be kept for such frames alone
  bool yields = false;                                // to pushes of its machine: precedence.h
  std::chrono::steady_clock::time_point queued_at{};  // set by the van
  // Of a push, or of what hands one on: what its receiver goes by, besides header.scalars.
  bool goes_by_fields = false;
  SharedFields fields{};
};

class Van {
 public:
  static constexpr auto kNever = std::chrono::steady_clock::time_point::max();
  enum class Progress { kMoved, kFrameDone, kBlocked, kEnd, kBroken };
  enum class State : uint8_t {
    kOpen,
    kPeerLeft,  // the peer has said goodbye
    kEnded,     // nothing more can be read, with or without a goodbye
    kLost,      // dropped: nothing goes in or out until replace()
  };

  // `peer`: rank of the node at the other end. `options`: of this node. `is_bounded`: it is not read while too much is
  // held.
  Van(int number, std::unique_ptr<Stream> stream, std::string label, int peer, const NodeOptions& options,
      bool is_bounded);

  const int number;
  const bool is_bounded;
  const std::string& label() const { return label_; }
  Stream& stream() { return *stream_; }
  bool is_watch() const { return peer_ == kNoPeer; }  // no slices come or go here
  bool is_local() const { return stream_->is_local(); }

  // Any thread may ask; the receiver alone moves it forward.
  State state() const { return state_; }
  bool is_lost() const { return state_ == State::kLost; }
  void advance(State to) { state_ = std::max(state(), to); }

  // --- sending -----------------------------------------------------------------------------------------------------
  void push(Frame frame, std::chrono::steady_clock::time_point now);
  void drop_queue() {
    queue_.clear();
    yielding_.clear();
  }
  uint64_t bytes_sent() const { return bytes_sent_; }
  bool has_queued() const { return !queue_.empty() || !yielding_.empty(); }
  bool has_work() const { return writing_ || has_queued(); }
  bool mid_frame() const { return writing_ && (written_ > 0 || stream_->holds_unwritten()); }
  // The connection is no more (kLost): moves what will never leave to `unsent`, a half written frame included.
  void drop(std::vector<Frame>& unsent);
  // Another connection to the same peer, as if nothing had ever come or left. Nobody may be using the van.
  void replace(std::unique_ptr<Stream> stream, std::chrono::steady_clock::time_point now);
  // Whether anything may move: a frame that is half written, or one that is not kept back.
  bool can_move(const Precedence& precedence) const { return writing_ || next_queue(precedence) != nullptr; }
  // Of the frame that would move next. Precondition: can_move().
  Urgency next_urgency(const Precedence& precedence) const {
    return writing_ ? urgency_of(writes_.front().header) : next_queue(precedence)->top_urgency();
  }
  // Takes the next frame off the queue unless one is half written; and those behind it that leave in the same call, if all
  // of them together are small. Ahead of one that goes by other fields than the frames before, it begins to tell those.
  void begin_frames(std::chrono::steady_clock::time_point now, const Precedence& precedence = {});
  // Writes what the stream accepts. kFrameDone: all of writes() have left. kBlocked: the stream is full.
  Progress write_some();
  // What is being written, or was last, in the order in which it leaves.
  const std::vector<Frame>& writes() const { return writes_; }
  void give_up_frames() { writing_ = false; }

  // Under the Transport's lock. `edges` counts the write events, so that one which comes between a write that found
  // the stream full and the moment that is noted is not lost.
  bool writable = true;
  uint64_t edges = 0;
  std::chrono::steady_clock::time_point last_write{};
  // When the stream is to be asked whether it stands still.
  std::chrono::steady_clock::time_point try_again_at = kNever;
  // A write has failed: what is queued will never leave. Set by who writes; the receiver then reads on, whatever is
  // held, for what the peer said last, and for the end.
  std::atomic<bool> broken{false};

  // --- receiving ---------------------------------------------------------------------------------------------------
  // One system call, for the rest of a payload and what follows it: many frames, if they are small. Only when next() has
  // returned kNothing.
  Progress read_some();
  // The last read_some() has left nothing to read.
  bool has_read_all() const { return has_read_all_; }
  // What the read event waits for from here on: the rest of the payload that is being read, never more; or any byte.
  void await_rest();
  void await_any() { stream_->await(1); }
  enum class Event { kNothing, kHeader, kFrame };
  // kHeader: received_header() is complete; payload_goes_to() must follow. kFrame: the payload lies where it was told.
  // kNothing: for more, more must be read.
  Event next();
  const Header& received_header() const { return in_header_; }
  void* received_payload() const { return in_payload_; }
  // That what is received goes by, as the peer told last; and where they go when it does, until take_fields().
  const SharedFields& received_fields() const { return in_fields_; }
  void* room_for_fields(size_t bytes);
  void take_fields();
  // Whether the frame is what its checksum says, if it has one.
  bool is_intact() const {
    return !checksums_ || !has_checksum(in_header_.kind) || checksum_of(in_header_, in_payload_) == in_header_.crc32c;
  }
  void payload_goes_to(void* destination);
  // Part of a frame has come.
  bool mid_receive() const { return reading_ != Reading::kHeader || ahead_bytes() > 0; }

  // --- what is kept for the peer alone: frames that wait to leave, and what it has sent and nobody has worked on -----
  // Any thread.
  void hold(uint64_t bytes);
  void let_go(uint64_t bytes) { held_bytes_.fetch_sub(bytes); }
  uint64_t held_bytes() const { return held_bytes_; }

  std::atomic<bool> paused{false};  // a bounded van, not read just now; written by the receiver
  uint64_t bytes_sent_then = 0;     // receiver: when it looked last whether the peer of a paused van reads

  std::chrono::steady_clock::time_point last_read{};
  std::string fail_text;  // the buffer of a kFail frame

  int error() const { return error_; }  // errno after kBroken

  // Under the Transport's lock.
  void add_to(Traffic& total) const;

 private:
  const std::string label_;
  const int peer_;
  Recorder* const recorder_;
  const bool checksums_;
  std::unique_ptr<Stream> stream_;
  std::atomic<State> state_{State::kOpen};
  std::atomic<int> error_{0};  // written by the sender and the receiver

  // Of what yields no copy counts: it may wait for pushes to another node, which does not read them while its own values
  // wait for pushes to this one. And it is no more than one round's, as its receiver pushes the next one behind it.
  static uint64_t held_by(const Frame& frame) { return sizeof frame + (frame.yields ? 0 : frame.copied_bytes); }
  static size_t bytes_of(const Frame& frame) { return sizeof(Header) + frame.header.payload_bytes; }

  std::atomic<uint64_t> held_bytes_{0}, peak_held_bytes_{0};
  // Since the start; written by one thread each.
  std::atomic<uint64_t> bytes_sent_{0}, bytes_received_{0}, slices_sent_{0}, slices_received_{0};
  uint64_t peak_queued_ = 0;
  std::chrono::steady_clock::duration queued_for_{};  // all slices so far

  void prepare();
  void prepare(Frame& frame, char* room_for_payload);
  Frame take_next(const Precedence& precedence);
  bool takes_more(const Precedence& precedence) const;
  void note_left(const Frame& frame);
  Frame telling_fields_of(const Frame& next);

  uint64_t queued() const { return queue_.size() + yielding_.size(); }
  // The one whose first frame goes next; null: there is none, or it is kept back.
  const PriorityQueue<Frame>* next_queue(const Precedence& precedence) const;

  PriorityQueue<Frame> queue_;
  PriorityQueue<Frame> yielding_;  // what may be kept back, so that nothing else waits behind it
  // More than one only if they are no more than these bytes: so much can no longer be overtaken, less than the stream takes.
  static constexpr size_t kGathered = 4 << 10;
  std::vector<Frame> writes_;
  size_t to_write_ = 0;       // bytes of writes_, headers included
  std::vector<char> staged_;  // all of writes_, if there are several; or the payload of one that has an encoder
  bool prepared_ = false;     // writes_ are as they will be sent
  bool writing_ = false;
  size_t written_ = 0;       // of to_write_
  SharedFields out_fields_;  // as told last

  enum class Reading { kHeader, kHeaderReady, kPayload, kFrameReady };
  Reading reading_ = Reading::kHeader;
  Header in_header_;
  void* in_payload_ = nullptr;
  size_t in_payload_bytes_ = 0;
  bool has_read_all_ = false;
  // What has come behind the payload that is being read, or before any: headers, and payloads until it is known where they
  // go. Of a large payload so much is copied once more, which costs less than a system call.
  static constexpr size_t kReadAhead = 4 << 10;
  std::array<char, kReadAhead> ahead_;
  size_t ahead_begin_ = 0, ahead_end_ = 0;
  size_t ahead_bytes() const { return ahead_end_ - ahead_begin_; }
  void take_ahead(void* to, size_t bytes);
  FieldValues arriving_fields_;
  SharedFields in_fields_;
};

}  // namespace p3
