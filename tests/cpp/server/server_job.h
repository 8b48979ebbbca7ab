// A server whose workers are played by the test.
#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "base/half.h"
#include "p3/server.h"
#include "transport/raw_peer.h"

namespace p3 {

constexpr uint32_t kSlice = 50000;

inline ServerOptions options(SumOrder order = SumOrder::kRank, int threads = 0) {
  ServerOptions made;
  made.node = timeless("server 0 (test)");
  made.sum_order = order;
  made.threads = threads;
  return made;
}

// Looks several times a second at what changes with time alone.
inline ServerOptions looking_often(ServerOptions made = options()) {
  made.node.heartbeat_s = 0.1;
  return made;
}

// Workers may be lost.
inline ServerOptions outliving(int threads = 0) {
  ServerOptions made = options(SumOrder::kRank, threads);
  made.local_aggregation = false;
  made.outlives_workers = true;
  return made;
}

// One of the workers that do not wait; -1 if all do.
inline int any_free(const std::vector<bool>& waits, std::mt19937& random) {
  std::vector<int> free;
  for (size_t worker = 0; worker < waits.size(); ++worker)
    if (!waits[worker]) free.push_back(static_cast<int>(worker));
  return free.empty() ? -1 : free[random() % free.size()];
}

// Why it has failed; waits for that.
inline std::string failure_of(Server& server) {
  EXPECT_TRUE(wait_readable(server.event_fd()));
  const auto error = server.error();
  return error ? error->what() : "";
}

// One server; the workers are played by the test.
struct Job {
  // `empty`: so many places behind those of the workers.
  explicit Job(int num_workers, ServerOptions with = options(), int buffer_bytes = -1, int empty = 0)
      : owned(Server::make(0, 1, num_workers + empty, std::move(with))), server(*owned) {
    for (int i = 0; i < num_workers; ++i) {
      const auto [ours, its] = buffer_bytes < 0 ? unix_pair() : tcp_pair(buffer_bytes);
      workers.emplace_back(ours);
      server.add_worker(i, stream_of(its), "worker " + std::to_string(i) + " (there)");
    }
    for (int i = 0; i < empty; ++i) server.leave_empty(num_workers + i, "a worker to come");
    server.start();
  }

  void set_codec(const Compression& codec) {
    axes.codec = codec;
    axes.update = codec.makes_steps() ? Update::kSteps : Update::kServers;
  }

  void define(uint32_t wire_key, uint64_t elements, DType dtype = DType::kFloat32) {
    KeyPlan plan = axes;
    plan.wire_key = wire_key;
    plan.elements = elements;
    plan.dtype = dtype;
    server.define(plan, "key" + std::to_string(wire_key), 0);
  }

  static Header header(FrameKind kind, uint32_t key, uint32_t slice, uint64_t round, size_t elements,
                       int32_t priority = 0) {
    Header made;
    made.kind = kind;
    made.key = key;
    made.slice = slice;
    made.round = round;
    made.priority = priority;
    made.payload_bytes = static_cast<uint32_t>(elements * sizeof(float));
    if (elements == 0) made.encoding = static_cast<uint8_t>(Encoding::kAbsent);
    return made;
  }

  void push(int worker, uint32_t key, uint64_t round, const std::vector<float>& gradient, uint32_t slice = 0,
            int32_t priority = 0, double lr = 0) {
    Header made = header(FrameKind::kPush, key, slice, round, gradient.size(), priority);
    made.scalars.lr = lr;
    made.scalars.rescale = 1;
    workers[static_cast<size_t>(worker)].send(made, gradient.data());
  }

  void skip(int worker, uint32_t key, uint64_t round) {
    workers[static_cast<size_t>(worker)].send(header(FrameKind::kPush, key, 0, round, 0));
  }

  // Rank 0's with a value, another's without.
  void init(int worker, uint32_t key, uint64_t round, const std::vector<float>& value = {}) {
    workers[static_cast<size_t>(worker)].send(header(FrameKind::kInit, key, 0, round, value.size()), value.data());
  }

  // Round 0 of a slice on every worker, up to and including the value that each receives.
  void initialise(uint32_t key, const std::vector<float>& value, uint32_t slice = 0) {
    workers[0].send(header(FrameKind::kInit, key, slice, 0, value.size()), value.data());
    for (size_t i = 1; i < workers.size(); ++i) workers[i].send(header(FrameKind::kInit, key, slice, 0, 0));
    for (size_t i = 0; i < workers.size(); ++i) EXPECT_EQ(receive_value(static_cast<int>(i)), value);
  }

  std::vector<float> receive_value(int worker, Header* got = nullptr) {
    RawPeer& peer = workers[static_cast<size_t>(worker)];
    const Header header = peer.must_receive();
    EXPECT_EQ(header.kind, FrameKind::kValue);
    if (got != nullptr) *got = header;
    std::vector<float> value(peer.payload.size() / sizeof(float));
    if (!value.empty()) std::memcpy(value.data(), peer.payload.data(), value.size() * sizeof(float));
    return value;
  }

  // Sends one element of the float16 key 1 as worker 0, with a learning rate of 1, and returns the element that comes.
  float exchange_half(FrameKind kind, uint64_t round, float value) {
    Header made = header(kind, 1, 0, round, 1);
    made.dtype = static_cast<uint8_t>(DType::kFloat16);
    made.payload_bytes = sizeof(half);
    made.scalars.lr = 1;
    const half bits = float_to_half(value);
    workers[0].send(made, &bits);
    EXPECT_EQ(workers[0].must_receive().kind, FrameKind::kValue);
    half answer;
    std::memcpy(&answer, workers[0].payload.data(), sizeof answer);
    return half_to_float(answer);
  }

  bool has_received(uint64_t slices) {
    return eventually([&] { return server.counters().traffic.slices_received >= slices; });
  }

  // Rounds; of keys with staleness, pushes.
  bool has_updated(uint64_t rounds) {
    return eventually([&] { return server.counters().rounds >= rounds; });
  }

  std::string failure() { return failure_of(server); }

  std::vector<RawPeer> workers;
  const std::unique_ptr<Server> owned;
  Server& server;
  KeyPlan axes;  // of keys to come
};

}  // namespace p3
