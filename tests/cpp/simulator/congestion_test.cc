#include "simulator/congestion.h"

#include <gtest/gtest.h>

namespace p3::simulator {
namespace {

constexpr double kPacket = 1000;

// Acknowledges a whole window in one step of `rtt_s`, as if it had been sent in one.
double one_round_trip(CongestionControl& control, double& now, double& delivered, double rtt_s) {
  const double window = control.window(), before = delivered;
  now += rtt_s;
  for (double left = window; left > 0; left -= kPacket) {
    delivered += kPacket;
    control.on_ack({now, kPacket, rtt_s, window - kPacket, delivered, before, rtt_s});
  }
  return control.window();
}

TEST(Cubic, DoublesUntilTheFirstLoss) {
  Cubic control(kPacket);
  double now = 0, delivered = 0;
  EXPECT_DOUBLE_EQ(control.window(), 10 * kPacket);
  EXPECT_DOUBLE_EQ(one_round_trip(control, now, delivered, 0.1), 20 * kPacket);
  EXPECT_DOUBLE_EQ(one_round_trip(control, now, delivered, 0.1), 40 * kPacket);
}

TEST(Cubic, AnswersTheLossesOfOneWindowOnce) {
  Cubic control(kPacket);
  control.on_loss(1, 0);
  control.on_loss(1.01, 3 * kPacket);
  EXPECT_DOUBLE_EQ(control.window(), 7 * kPacket);
  control.on_loss(2, 50 * kPacket);
  EXPECT_DOUBLE_EQ(control.window(), 4.9 * kPacket);
}

TEST(Cubic, IsBackWhereItWasAfterItsTimeAndThenGoesOn) {
  Cubic control(kPacket);
  double now = 0, delivered = 0;
  for (int count = 0; count < 4; ++count) one_round_trip(control, now, delivered, 0.1);
  const double at_loss = control.window();  // 160 packets
  control.on_loss(now, delivered);
  const double lost_at = now;
  while (control.window() < 0.99 * at_loss) {
    one_round_trip(control, now, delivered, 0.1);
    ASSERT_LT(now, lost_at + 20);
  }
  // All of it after the cube root of 160 x 0.3 / 0.4, which is 4.93 s; 0.99 of it the cube root of 1.6 / 0.4 before.
  EXPECT_NEAR(now - lost_at, 4.93 - 1.59, 0.2);
  const double flat = control.window();
  while (now < lost_at + 8) one_round_trip(control, now, delivered, 0.1);
  EXPECT_GT(control.window(), 1.05 * flat);
}

TEST(Cubic, DoesNotGrowBeyondWhatIsUsed) {
  Cubic control(kPacket);
  for (int count = 0; count < 100; ++count) control.on_ack({1, kPacket, 0.1, kPacket, 0, 0, 0.1});
  EXPECT_DOUBLE_EQ(control.window(), 10 * kPacket);
}

TEST(Bbr, FindsTheRateAndKeepsTwiceThePath) {
  Bbr control(kPacket);
  constexpr double kBytesPerS = 1e6, kRtt_s = 0.02;  // 20 packets on the path
  double delivered = 0;
  for (int count = 0; count < 2000; ++count) {
    const double now = count * kPacket / kBytesPerS;
    delivered += kPacket;
    control.on_ack({now, kPacket, kRtt_s, 15 * kPacket, delivered, delivered - 20 * kPacket, kRtt_s});
  }
  EXPECT_GE(control.bytes_per_s(), 0.75 * kBytesPerS);
  EXPECT_LE(control.bytes_per_s(), 1.25 * kBytesPerS);
  // Twice the path, and three bursts of the least size, two packets.
  EXPECT_NEAR(control.window(), (40 + 6) * kPacket, 2 * kPacket);
}

TEST(Bbr, KeepsFourPacketsOnAPathThatHoldsNone) {
  Bbr control(kPacket);
  double delivered = 0;
  for (int count = 0; count < 200; ++count) {
    delivered += kPacket;
    control.on_ack({count * 1.0, kPacket, 1e-6, 0, delivered, delivered - kPacket, 1.0});
  }
  EXPECT_GE(control.window(), Bbr::kLeastPackets * kPacket);
  EXPECT_LE(control.window(), (6 + 2) * kPacket);
}

TEST(Bbr, IgnoresALoss) {
  Bbr control(kPacket);
  const double before = control.window();
  control.on_loss(1, 0);
  EXPECT_DOUBLE_EQ(control.window(), before);
}

TEST(Bbr, LooksForTheLeastRoundTripAgainAfterTenSeconds) {
  Bbr control(kPacket);
  double delivered = 0;
  const auto acknowledge = [&](double now, double rtt_s) {
    delivered += kPacket;
    control.on_ack({now, kPacket, rtt_s, 50 * kPacket, delivered, delivered - 20 * kPacket, 0.02});
  };
  for (int count = 0; count < 100; ++count) acknowledge(count * 0.01, 0.02);
  acknowledge(10.9, 0.05);  // older than ten seconds: the least, of 0.99 s, is not
  EXPECT_GT(control.window(), 10 * kPacket);
  acknowledge(11.2, 0.05);
  EXPECT_DOUBLE_EQ(control.window(), Bbr::kLeastPackets * kPacket);
  acknowledge(11.3, 0.03);
  acknowledge(11.5, 0.03);
  EXPECT_GT(control.window(), 10 * kPacket);
}

}  // namespace
}  // namespace p3::simulator
