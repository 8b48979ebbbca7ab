// A worker whose server is played by the test.
#pragma once

#include <gtest/gtest.h>

#include <condition_variable>
#include <deque>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "p3/worker.h"
#include "transport/raw_peer.h"

namespace p3 {

constexpr uint32_t kSlice = 50000;

// Collects `done`s and lets the test wait for them.
class Results {
 public:
  Worker::Done expect(int id) {
    return [this, id](const Error* error, bool updated) {
      std::lock_guard<std::mutex> lock(mutex_);
      finished_.push_back(id);
      updated_.push_back(updated);
      texts_.push_back(error == nullptr ? "" : error->what());
      changed_.notify_all();
    };
  }
  bool wait_for(size_t count) {
    std::unique_lock<std::mutex> lock(mutex_);
    return changed_.wait_for(lock, std::chrono::milliseconds(kDeadlineMs), [&] { return finished_.size() >= count; });
  }
  std::vector<int> finished() {
    std::lock_guard<std::mutex> lock(mutex_);
    return finished_;
  }
  bool updated(size_t i) {
    std::lock_guard<std::mutex> lock(mutex_);
    return updated_[i];
  }
  std::string text(size_t i) {
    std::lock_guard<std::mutex> lock(mutex_);
    return texts_[i];
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<int> finished_;
  std::vector<bool> updated_;
  std::vector<std::string> texts_;
};

inline KeyPlan plan_of(uint32_t wire_key, uint64_t elements, uint64_t first_slice = 0) {
  KeyPlan plan;
  plan.wire_key = wire_key;
  plan.elements = elements;
  plan.first_slice = first_slice;
  return plan;
}

inline NodeOptions options(double timeout_s = kForeverS) {
  NodeOptions made = timeless("worker 0 (test)");
  made.timeout_s = timeout_s;
  made.heartbeat_s = timeout_s / 10;
  return made;
}

// One worker, one server played by the test.
struct OneServer {
  explicit OneServer(std::pair<int, int> ends, double timeout_s = kForeverS)
      : server(ends.first), worker(0, 1, options(timeout_s)) {
    worker.add_server(0, stream_of(ends.second), "server 0 (there)");
    worker.start();
  }
  // A key that all agree on.
  int key(uint32_t wire_key, uint64_t elements, const Compression& compression = {}, DType dtype = DType::kFloat32) {
    const int handle = worker.declare("key" + std::to_string(wire_key), elements, dtype, compression);
    KeyPlan plan = plan_of(wire_key, elements);
    plan.dtype = dtype;
    plan.codec = compression;
    plan.update = compression.makes_steps() ? Update::kSteps : Update::kServers;
    worker.agree(handle, plan);
    return handle;
  }
  void answer(const Header& request, const std::vector<float>& value) {
    Header header = request;
    header.kind = FrameKind::kValue;
    header.encoding = static_cast<uint8_t>(value.empty() ? Encoding::kAbsent : Encoding::kPlain);
    header.payload_bytes = static_cast<uint32_t>(value.size() * sizeof(float));
    server.send(header, value.data());
  }

  // An array that outlives the worker, which may borrow it to its end.
  std::vector<float>& array(size_t elements, float value = 0) { return arrays.emplace_back(elements, value); }

  std::deque<std::vector<float>> arrays;
  Results results;
  RawPeer server;
  Worker worker;
};

}  // namespace p3
