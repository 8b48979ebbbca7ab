// Payloads that frames borrow: each in a buffer of its own, lent to a number of frames. The last one to leave gives the
// memory back, so nothing waits for a slow peer.
// Threads: all but taken_back() from one at a time; frames come back on any.
// Cost:    what came back is looked for only when as many have been lent since the last look as were out then, so that
//          lending takes the same time however many are out: of a large model behind a slow link, thousands.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "base/buffer_pool.h"
#include "transport/van.h"

namespace p3 {

// Who lent a frame its payload; the frame's context.
class Lender {
 public:
  // The frame has left. Any thread.
  virtual void taken_back() = 0;

 protected:
  ~Lender() = default;
};

class LentBuffers {
 public:
  // A frame of the first `bytes` of `content`; the caller sends it `borrowers` times, at least once.
  Frame lend(const Header& header, PooledBuffer content, size_t bytes, int borrowers) {
    if (lent_.size() >= look_at_) forget_returned();
    lent_.push_back(std::make_unique<Lent>(std::move(content), borrowers));
    Frame frame;
    frame.header = header;
    frame.header.payload_bytes = static_cast<uint32_t>(bytes);
    frame.payload = lent_.back()->content.data();
    frame.context = static_cast<Lender*>(lent_.back().get());
    frame.copied_bytes = static_cast<uint32_t>(bytes);
    return frame;
  }

  // Whether all have come back.
  bool is_idle() {
    forget_returned();
    return lent_.empty();
  }

  // Those that are out, and those that came back unnoticed: at most twice as many as were ever out, and a few.
  size_t kept() const { return lent_.size(); }
  // How often one of them has been looked at, so far.
  uint64_t looks() const { return looks_; }

 private:
  static constexpr size_t kFew = 16;

  struct Lent final : Lender {
    Lent(PooledBuffer its_content, int its_borrowers) : content(std::move(its_content)), borrowers(its_borrowers) {}

    void taken_back() override {
      if (borrowers.fetch_sub(1) != 1) return;
      content.give_back();
      returned = true;  // and may be destroyed
    }

    PooledBuffer content;
    std::atomic<int> borrowers;
    std::atomic<bool> returned{false};
  };

  void forget_returned() {
    looks_ += lent_.size();
    lent_.erase(std::remove_if(lent_.begin(), lent_.end(), [](const auto& buffer) { return buffer->returned.load(); }),
                lent_.end());
    look_at_ = 2 * lent_.size() + kFew;
  }

  std::vector<std::unique_ptr<Lent>> lent_;
  size_t look_at_ = kFew;
  uint64_t looks_ = 0;
};

}  // namespace p3
