// A worker with two servers, of which the first is lost; both are played by the test.
#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "worker/worker_job.h"

namespace p3 {

// Of each key, server 0 has the first two elements, and server 1 the others.
struct TwoServers {
  explicit TwoServers(bool outlives = true) : TwoServers(outlives, unix_pair(), unix_pair()) {}
  TwoServers(bool outlives, std::pair<int, int> lost_ends, std::pair<int, int> heir_ends)
      : lost(lost_ends.first), heir(heir_ends.first), worker(0, 2, options(outlives)) {
    worker.add_server(0, stream_of(lost_ends.second), "server 0 (there)");
    worker.add_server(1, stream_of(heir_ends.second), "server 1 (there)");
    worker.start();
  }
  static NodeOptions options(bool outlives) {
    NodeOptions made = p3::options();
    made.outlives_servers = outlives;
    return made;
  }
  int key(uint32_t wire_key, const Compression& compression = {}) {
    const int handle = worker.declare("key" + std::to_string(wire_key), 4, DType::kFloat32, compression);
    KeyPlan plan = plan_of(wire_key, 4);
    plan.slice_elements = 2;
    plan.codec = compression;
    worker.agree(handle, plan);
    return handle;
  }
  static void answer(RawPeer& server, const Header& request, const std::vector<float>& value) {
    Header header = request;
    header.kind = FrameKind::kValue;
    header.encoding = static_cast<uint8_t>(Encoding::kPlain);
    header.payload_bytes = static_cast<uint32_t>(value.size() * sizeof(float));
    server.send(header, value.data());
  }
  static std::vector<float> floats(const RawPeer& peer) {
    std::vector<float> got(peer.payload.size() / sizeof(float));
    if (!got.empty()) std::memcpy(got.data(), peer.payload.data(), got.size() * sizeof(float));
    return got;
  }
  // The first value of a key that was just declared: 1, 2, 3, 4.
  void initialise(int handle) {
    landing = {1, 2, 3, 4};
    worker.init(handle, landing.data(), landing.data(), 0, results.expect(0));
    answer(lost, lost.must_receive(), {1, 2});
    answer(heir, heir.must_receive(), {3, 4});
    ASSERT_TRUE(results.wait_for(1));
  }
  void lose_server() {
    lost.close();
    EXPECT_TRUE(eventually([&] { return worker.lost_servers() == std::vector<int>{0}; }));
    EXPECT_FALSE(worker.error());
    worker.inherit(0, 1, {0});
    EXPECT_TRUE(worker.lost_servers().empty());
  }
  // The heir, for a value.
  void ask(uint32_t wire_key = 7, uint32_t slice = 0) {
    Header ask;
    ask.kind = FrameKind::kAsk;
    ask.key = wire_key;
    ask.slice = slice;
    ask.encoding = static_cast<uint8_t>(Encoding::kAbsent);
    heir.send(ask);
  }
  Header must_claim(uint32_t key, uint64_t round, const std::vector<float>& value, uint32_t inits = 1) {
    return must_claim_to(heir, key, round, value, inits);
  }
  static Header must_claim_to(RawPeer& server, uint32_t key, uint64_t round, const std::vector<float>& value,
                              uint32_t inits = 1) {
    const Header claim = server.must_receive();
    EXPECT_EQ(claim.kind, FrameKind::kClaim);
    EXPECT_EQ(claim.key, key);
    EXPECT_EQ(claim.slice, 0u);
    EXPECT_EQ(claim.round, round);
    EXPECT_EQ(floats(server), value);
    EXPECT_EQ(inits_of(claim), value.empty() ? 0 : inits);
    EXPECT_EQ(claim.part == static_cast<uint8_t>(Claimed::kNothing), value.empty());
    return claim;
  }
  void must_claim_nothing_more() { must_claim_nothing_more_to(heir); }
  static void must_claim_nothing_more_to(RawPeer& server) {
    const Header last = must_claim_to(server, kNoKey, last_round, {});
    EXPECT_EQ(last.part, static_cast<uint8_t>(Claimed::kNothing));
  }

  void no_optimizer() { worker.set_optimizer(key(7), {"sgd", {}}); }

  static constexpr uint64_t last_round = UINT64_MAX - 1;
  std::vector<float> gradient, landing;
  Results results;
  RawPeer lost, heir;
  Worker worker;
};

using Floats = std::vector<float>;

}  // namespace p3
