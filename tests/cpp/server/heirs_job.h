// A server of two, which hears what the workers have of slices that the first one had: as its heir, or as that server when it
// comes back. The workers are played by the test.
#pragma once

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "server/server_job.h"

namespace p3 {

constexpr uint32_t kKey = 1, kNorm = 0;  // in the order of definition
constexpr int kLost = 0, kHeir = 1;

// Server 1 of two; key 1 has a slice of two elements on each.
struct HeirsJob {
  // `rank`: kLost, if that one comes back. Then these workers are there, and the others' places are empty.
  explicit HeirsJob(int num_workers, ServerOptions with = options(), int rank = kHeir, std::vector<int> there = {})
      : owned(Server::make(rank, 2, num_workers, std::move(with))), server(*owned) {
    for (int i = 0; i < num_workers; ++i) {
      const std::string label = "worker " + std::to_string(i) + " (there)";
      workers.emplace_back(-1);
      if (rank == kHeir) {
        const auto [ours, its] = unix_pair();
        peer(i) = RawPeer(ours);
        server.add_worker(i, stream_of(its), label);
      } else if (std::find(there.begin(), there.end(), i) != there.end()) {
        server.expect_worker(i, label);
      } else {
        server.leave_empty(i, label);
      }
    }
    server.start();
  }

  void define(uint32_t wire_key = kKey) {
    KeyPlan plan;
    plan.wire_key = wire_key;
    plan.elements = 4;
    plan.slice_elements = 2;
    server.define(plan, "key", 0);
  }
  void define_norm() {
    KeyPlan plan;
    plan.wire_key = kNorm;
    plan.dtype = DType::kFloat64;
    plan.elements = 2 * kNormElements;
    plan.slice_elements = kNormElements;
    plan.reduction = Reduction::kNorm;
    server.define(plan, "norm", 0);
  }

  static Header header(FrameKind kind, uint64_t round, size_t bytes, uint32_t key = kKey) {
    Header made;
    made.kind = kind;
    made.key = key;
    made.slice = key == kNoKey ? kLost : 0;  // the lost server's
    made.dtype = static_cast<uint8_t>(key == kNorm ? DType::kFloat64 : DType::kFloat32);
    made.round = round;
    made.payload_bytes = static_cast<uint32_t>(bytes);
    if (bytes == 0) made.encoding = static_cast<uint8_t>(Encoding::kAbsent);
    made.scalars.rescale = 1;
    return made;
  }
  RawPeer& peer(int worker) { return workers[static_cast<size_t>(worker)]; }

  template <typename T = float>
  void claim(int worker, uint64_t round, const std::vector<T>& value, uint32_t key = kKey,
             Claimed what = Claimed::kValue, int inits = 1) {
    Header made = header(FrameKind::kClaim, round, value.size() * sizeof(T), key);
    made.part = static_cast<uint8_t>(value.empty() ? Claimed::kNothing : what);
    set_inits(made, value.empty() ? 0 : static_cast<uint32_t>(inits));
    made.scalars.lr = static_cast<double>(round);  // as its pushes say
    peer(worker).send(made, value.data());
  }
  // Of a value that is to be asked for.
  void claim_without_value(int worker, uint64_t round, uint32_t key = kKey, Claimed what = Claimed::kValue) {
    Header made = header(FrameKind::kClaim, round, 0, key);
    made.part = static_cast<uint8_t>(what);
    set_inits(made, 1);
    peer(worker).send(made);
  }
  // Of one that has joined behind that round.
  void claim_round_alone(int worker, uint64_t round) { claim_without_value(worker, round, kKey, Claimed::kRoundAlone); }
  void claim_nothing_more(int worker) { claim<float>(worker, 0, {}, kNoKey); }
  void must_be_asked(int worker, uint32_t key = kKey) {
    const Header ask = peer(worker).must_receive();
    EXPECT_EQ(ask.kind, FrameKind::kAsk);
    EXPECT_EQ(ask.key, key);
    EXPECT_EQ(ask.slice, 0u);
  }
  void push(int worker, uint64_t round, const std::vector<float>& gradient) {
    peer(worker).send(header(FrameKind::kPush, round, gradient.size() * sizeof(float)), gradient.data());
  }
  void begin_norm(int worker, uint64_t round) {
    Header made = header(FrameKind::kPush, round, 0, kNorm);
    made.part = 1;
    peer(worker).send(made);
  }
  template <typename T = float>
  std::vector<T> receive(int worker, uint64_t round, bool is_absent = false) {
    const Header got = peer(worker).must_receive();
    EXPECT_EQ(got.kind, FrameKind::kValue);
    EXPECT_EQ(got.round, round);
    EXPECT_EQ(got.encoding, static_cast<uint8_t>(is_absent ? Encoding::kAbsent : Encoding::kPlain));
    std::vector<T> value(peer(worker).payload.size() / sizeof(T));
    if (!value.empty()) std::memcpy(value.data(), peer(worker).payload.data(), value.size() * sizeof(T));
    return value;
  }
  std::string failure() { return failure_of(server); }
  // Another process of that rank; or one that is expected.
  void replace(int worker) {
    const auto [ours, its] = unix_pair();
    peer(worker) = RawPeer(ours);
    server.connect_worker(worker, stream_of(its));
  }

  std::vector<RawPeer> workers;
  const std::unique_ptr<Server> owned;
  Server& server;
};

using Floats = std::vector<float>;

}  // namespace p3
