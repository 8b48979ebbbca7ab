// Payloads that frames borrow: each in a buffer of its own, lent to a number of frames. The last one to leave gives the
// memory back, so nothing waits for a slow peer.
// Threads: lend() and is_idle() from one at a time; frames come back on any.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
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
    is_idle();
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
    lent_.erase(std::remove_if(lent_.begin(), lent_.end(), [](const auto& buffer) { return buffer->returned.load(); }),
                lent_.end());
    return lent_.empty();
  }

 private:
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

  std::vector<std::unique_ptr<Lent>> lent_;
};

}  // namespace p3
