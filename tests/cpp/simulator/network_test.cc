#include "simulator/network.h"

#include <gtest/gtest.h>

#include <utility>
#include <vector>

#include "simulator/small_job.h"

namespace p3::simulator {
namespace {

// A network alone: what is delivered and acknowledged, and when.
class NetworkTest : public testing::Test, public Network::Listener {
 protected:
  void delivered(int, int frame) override { deliveries_.emplace_back(frame, events_.now()); }
  void acknowledged(int) override { acknowledged_at_.push_back(events_.now()); }

  void run(Network& network, size_t most_events = 100000) {
    for (size_t count = 0; !events_.empty(); ++count) {
      ASSERT_LT(count, most_events) << "the network never comes to rest";
      network.handle(events_.pop());
    }
  }

  using Deliveries = std::vector<std::pair<int, double>>;

  Job job_ = small_job(2, {1});
  EventQueue events_;
  Deliveries deliveries_;
  std::vector<double> acknowledged_at_;
};

TEST_F(NetworkTest, SegmentPassesUplinkDelayAndDownlink) {
  job_.transport.delay_s = 0.25;
  Network network(job_, events_, *this);
  const int connection = network.connect(0, 1);
  network.write(connection, 7, 500, true);
  EXPECT_DOUBLE_EQ(network.under_way(connection), 500);
  run(network);
  EXPECT_EQ(deliveries_, (Deliveries{{7, 0.5 + 0.25 + 0.5}}));
  EXPECT_EQ(acknowledged_at_, (std::vector<double>{1.5}));
  EXPECT_DOUBLE_EQ(network.under_way(connection), 0);
}

TEST_F(NetworkTest, WhatIsLostByChanceIsSentAgainAndTheSeedSaysWhich) {
  job_.transport.segment_bytes = job_.transport.packet_payload_bytes = 100;
  job_.transport.loss = 0.3;
  const auto ends = [this](uint64_t seed) {
    job_.transport.seed = seed;
    events_ = {};
    deliveries_.clear();
    Network network(job_, events_, *this);
    network.write(network.connect(0, 1), 0, 5000, true);
    run(network);
    EXPECT_EQ(deliveries_.size(), 1u) << "all has arrived";
    EXPECT_GT(network.up(0).use().bytes, 5000 + 500) << "some of it twice";
    return deliveries_.at(0).second;
  };
  EXPECT_GT(ends(1), 5.1);
  EXPECT_EQ(ends(1), ends(1));
  EXPECT_NE(ends(1), ends(2));
}

TEST_F(NetworkTest, FineSegmentsStreamThroughBothLinks) {
  job_.transport.segment_bytes = 100;
  Network network(job_, events_, *this);
  network.write(network.connect(0, 1), 0, 500, true);
  run(network);
  ASSERT_EQ(deliveries_.size(), 1u);
  EXPECT_NEAR(deliveries_[0].second, 0.5 + 0.1, 1e-12);
}

TEST_F(NetworkTest, HeadersOfPacketsTakeTime) {
  job_.transport.packet_header_bytes = 66;
  job_.transport.packet_payload_bytes = 1448;
  Network network(job_, events_, *this);
  network.write(network.connect(0, 1), 0, 1448, true);
  run(network);
  EXPECT_NEAR(deliveries_.at(0).second, 2 * 1.514, 1e-12);
}

TEST_F(NetworkTest, AcknowledgementsQueueBehindWhatGoesTheOtherWay) {
  job_.transport.ack_bytes = 10;
  Network network(job_, events_, *this);
  const int there = network.connect(0, 1);
  const int back = network.connect(1, 0);
  network.write(there, 0, 100, true);  // arrives at 0.2
  network.write(back, 1, 1000, true);  // fills host 1's uplink until 1, host 0's downlink until 2
  while (acknowledged_at_.empty()) network.handle(events_.pop());
  EXPECT_NEAR(acknowledged_at_[0], 2.01, 1e-12);
}

TEST_F(NetworkTest, SegmentThatIsLostIsSentAgainAndFramesStillArriveInOrder) {
  job_.hosts[1].down = {kRate / 2, 0, 250};
  job_.transport.segment_bytes = 100;
  Network network(job_, events_, *this);
  const int connection = network.connect(0, 1);
  network.down(1).pass(0, 250);             // somebody else's, gone at 0.5
  network.write(connection, 0, 100, true);  // at 0.1, where 200 wait: lost
  network.write(connection, 1, 100, true);  // at 0.2, where 150 wait
  run(network);
  EXPECT_EQ(network.down(1).use().lost, 1u);
  // Frame 1 has passed at 0.7, but must wait. The loss is noticed at 0.1, a round trip of that moment (0.1 s of uplink,
  // 0.4 s of downlink) and 1 ms after it was; the uplink takes 0.1 s, then the downlink, just free, 0.2 s.
  const double again_s = 0.1 + 0.1 + 0.4 + 0.001 + 0.1 + 0.2;
  const Deliveries expected{{0, again_s}, {1, again_s}};
  ASSERT_EQ(deliveries_.size(), expected.size());
  for (size_t number = 0; number < expected.size(); ++number) {
    EXPECT_EQ(deliveries_[number].first, expected[number].first);
    EXPECT_NEAR(deliveries_[number].second, expected[number].second, 1e-9);
  }
  EXPECT_DOUBLE_EQ(network.under_way(connection), 0);
}

TEST_F(NetworkTest, SegmentThatItsOwnHostDropsStaysAndLeavesWithTheNextAcknowledgement) {
  job_.hosts[0].up.queue_bytes = 250;
  job_.transport.segment_bytes = 100;
  Network network(job_, events_, *this);
  const int connection = network.connect(0, 1);
  for (int frame = 0; frame < 3; ++frame) network.write(connection, frame, 100, true);
  network.write(connection, 3, 50, true);  // would fit, but is behind one that does not
  run(network);
  EXPECT_EQ(network.up(0).use().lost, 2u) << "tried when it was written, and when frame 3 was";
  // The acknowledgement of frame 0 comes at 0.2; then the uplink is free.
  const Deliveries expected{{0, 0.2}, {1, 0.3}, {2, 0.4}, {3, 0.45}};
  ASSERT_EQ(deliveries_.size(), expected.size());
  for (size_t number = 0; number < expected.size(); ++number) {
    EXPECT_EQ(deliveries_[number].first, expected[number].first);
    EXPECT_NEAR(deliveries_[number].second, expected[number].second, 1e-9);
  }
}

TEST_F(NetworkTest, ConnectionThatIsAskedTriesAgainSooner) {
  job_.hosts[0].up.queue_bytes = 250;
  Network network(job_, events_, *this);
  network.up(0).pass(0, 160);  // another's, gone at 0.16
  network.write(network.connect(0, 1, 0.06), 0, 100, true);
  run(network);
  // Dropped at 0; at 0.06 there are 100 before it.
  ASSERT_EQ(deliveries_.size(), 1u);
  EXPECT_NEAR(deliveries_[0].second, 0.16 + 0.1 + 0.1, 1e-9);
}

TEST_F(NetworkTest, ConnectionWithNothingUnderWayPausesAfterItsOwnHostHasDropped) {
  job_.hosts[0].up.queue_bytes = 250;
  Network network(job_, events_, *this);
  network.up(0).pass(0, 200);  // another's, gone at 0.2
  network.write(network.connect(0, 1), 0, 100, true);
  while (deliveries_.empty() && !events_.empty()) {
    const Event event = events_.pop();
    if (event.time < 0.3 && network.up(0).waiting_bytes(event.time) < 150) network.up(0).pass(event.time, 200);
    network.handle(event);
  }
  // Tried in vain at 0 and, as others have filled the queue again, at 0.2; then at 0.7.
  EXPECT_NEAR(deliveries_.at(0).second, 0.7 + 0.2, 1e-9);
}

TEST_F(NetworkTest, LostSegmentThatNothingFollowsIsProbedFor) {
  job_.hosts[1].down.queue_bytes = 150;
  job_.transport.segment_bytes = 100;
  Network network(job_, events_, *this);
  const int other = network.connect(0, 1), connection = network.connect(1, 0);
  (void)connection;
  network.down(1).pass(0, 150);  // somebody else's, gone at 0.15
  network.write(other, 0, 100, true);
  run(network);
  // It reaches the downlink at 0.1, where 50 wait: no room for 100 more than 150? There is. So it arrives at 0.25.
  EXPECT_EQ(network.down(1).use().lost, 0u);
  EXPECT_NEAR(deliveries_.at(0).second, 0.25, 1e-12);

  deliveries_.clear();
  const double now = events_.now();
  network.write(other, 1, 100, true);
  network.down(1).pass(now, 150);
  network.down(1).pass(now + 0.09, 60);
  run(network);
  // Now 110 wait at 0.1: lost. Twice the round trip, 0.11 s of queue, passes before it is sent again.
  EXPECT_EQ(network.down(1).use().lost, 1u);
  EXPECT_NEAR(deliveries_.at(0).second, now + 0.1 + 2 * 0.11 + 0.1 + 0.1, 1e-9);
}

TEST_F(NetworkTest, CongestionWindowHoldsSegmentsBack) {
  job_.transport.congestion = Congestion::kCubic;
  job_.transport.packet_payload_bytes = 10;  // so that ten packets are 100 bytes
  job_.transport.segment_bytes = 100;
  Network network(job_, events_, *this);
  network.write(network.connect(0, 1), 0, 300, true);
  while (deliveries_.empty()) network.handle(events_.pop());
  // The first window arrives and is acknowledged at 0.2; then there is room for two.
  EXPECT_NEAR(deliveries_.at(0).second, 0.2 + 0.2 + 0.1, 1e-12);
}

}  // namespace
}  // namespace p3::simulator
