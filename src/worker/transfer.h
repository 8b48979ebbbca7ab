// What one operation on a key asks of each of its shards, and how their answers are put together.
//
// Threads: begin(), problem_with(), place_of() and count() with the Worker's lock held; encode() by who sends; decode(),
//          land() and finish() on the receiver thread; compute() on the Updater's.
// Memory:  borrows the caller's arrays, and lends what it makes of them to its frames, until the operation is done.
#pragma once

#include <cstdint>
#include <vector>

#include "p3/slicing.h"
#include "p3/wire.h"
#include "transport/van.h"

namespace p3 {

struct Key;
struct Operation;

class Transfer : public Encoder {
 public:
  enum class Kind { kInit, kPush, kSkip, kFetch, kStore, kCapture };

  // `part`: of a shard, as Header::part; 0 where it is not about one.
  Transfer(Kind its_kind, Key& key, uint8_t part = 0);

  const Kind kind;
  bool is_round() const { return kind == Kind::kPush || kind == Kind::kSkip; }

  // Before begin(), of a key that catches up: an init asks for the value that the servers have, whatever it was given.
  // Returns what is to be done instead of this operation and the next, if anything is.
  virtual std::vector<Operation> ask_for_value();
  // The frames to send under that plan; each shard that gets one is to answer. `header` says what they have in common:
  // wire key, round, priority, scalars.
  virtual std::vector<Frame> begin(const KeyPlan& plan, Header header) = 0;
  void encode(const Header&, const void*, void*) override {}  // of frames that name an encoder
  // The values of the optimizer's fields in its round: of a push its own; else those of a worker that has pushed.
  virtual void goes_by(const SharedFields&) {}
  // One of these that goes to another server, as the one that it had gone to is lost: with the same bytes.
  virtual Frame again(Frame frame) { return frame; }
  // Of a gated round: no slice leaves before the whole gradient is ready.
  virtual bool leaves_whole() const { return false; }

  // What is wrong with the header of an answer that is due, or null.
  virtual const char* problem_with(const Header& header) const = 0;
  // Where its payload goes; null: anywhere, as land() puts it in its place.
  virtual void* place_of(const Header&) { return nullptr; }
  // Takes what is encoded of an answer: puts it into its place, and makes of it the frame that would have brought the whole
  // value there. Returns what is wrong with it, or null.
  virtual const char* decode(Frame&) { return nullptr; }
  // Takes an answer, behind decode(). Returns what is wrong with it, or null. `is_last`: no other of that shard is to come.
  virtual const char* land(const Header&, const void* /*payload*/, bool& is_last) {
    is_last = true;
    return nullptr;
  }
  // All have landed.
  virtual void finish() {}
  // Whether something is left to do between finish() and count(), which takes so long that it has a thread of its own.
  virtual bool computes() const { return false; }
  virtual void compute() {}
  // The operation is complete: brings up to date what the key's way knows of its rounds.
  virtual void count();

  // Whether anything but "the value stays" has landed.
  bool is_updated() const { return is_updated_; }

 protected:
  // That of a frame, with what it says of this operation.
  Header header_of(Header common, Encoding encoding) const;

  Key& key_;
  const uint8_t part_;
  const DType type_;  // of what goes out and comes in
  bool is_updated_ = false;
};

}  // namespace p3
