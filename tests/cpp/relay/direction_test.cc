#include "relay/direction.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <vector>

namespace p3::relay {
namespace {

constexpr int64_t kMs = 1'000'000;

TEST(Direction, PacketsPassOneAfterTheOtherHoweverLongThePauseBefore) {
  DirectionRecord record{};
  record.bytes_per_s = 1e6;
  record.queue_s = 1;
  Direction direction(record);
  EXPECT_EQ(direction.pass(10 * kMs, 1000, true), 11 * kMs);
  EXPECT_EQ(direction.pass(10 * kMs, 500, true), 11 * kMs + kMs / 2);
  EXPECT_EQ(direction.pass(900 * kMs, 1000, true), 901 * kMs) << "no burst is saved up";
  EXPECT_EQ(direction.pass(900 * kMs, 1000, true), 902 * kMs);
  EXPECT_EQ(record.packets, 4u);
  EXPECT_EQ(record.bytes, 3500u);
}

TEST(Direction, DelayIsAddedAndHoldsUpNobody) {
  DirectionRecord record{};
  record.bytes_per_s = 1e6;
  record.queue_s = 1;
  record.delay_s = 0.1;
  Direction direction(record);
  EXPECT_EQ(direction.pass(0, 1000, true), 101 * kMs);
  EXPECT_EQ(direction.pass(0, 1000, true), 102 * kMs);
}

TEST(Direction, WithoutARatePacketsTakeNoTime) {
  DirectionRecord record{};
  record.delay_s = 0.001;
  Direction direction(record);
  for (int i = 0; i < 3; ++i) EXPECT_EQ(direction.pass(5 * kMs, 1500, true), 6 * kMs);
  EXPECT_EQ(record.dropped, 0u);
}

TEST(Direction, WhatWouldWaitTooLongIsDropped) {
  DirectionRecord record{};
  record.bytes_per_s = 1e6;
  record.queue_s = 0.002;
  Direction direction(record);
  for (int i = 1; i <= 3; ++i) EXPECT_EQ(direction.pass(0, 1000, true), i * kMs);
  EXPECT_EQ(direction.pass(0, 1000, true), std::nullopt);
  EXPECT_EQ(direction.pass(1 * kMs, 1000, true), 4 * kMs);
  EXPECT_EQ(record.packets, 4u);
  EXPECT_EQ(record.dropped, 1u);
}

TEST(Direction, ANewRateHoldsFromTheNextPacketOn) {
  DirectionRecord record{};
  record.bytes_per_s = 1e6;
  record.queue_s = 1;
  Direction direction(record);
  EXPECT_EQ(direction.pass(0, 1000, true), 1 * kMs);
  record.bytes_per_s = 1e5;
  EXPECT_EQ(direction.pass(0, 1000, true), 11 * kMs);
}

std::vector<bool> lost(uint64_t seed, double loss, int count) {
  DirectionRecord record{};
  record.loss = loss;
  record.seed = seed;
  Direction direction(record);
  std::vector<bool> found;
  for (int i = 0; i < count; ++i) {
    EXPECT_NE(direction.pass(i, 100, false), std::nullopt) << "some must not be lost, and are not counted";
    found.push_back(!direction.pass(i, 100, true));
  }
  EXPECT_EQ(record.lost, static_cast<uint64_t>(std::count(found.begin(), found.end(), true)));
  return found;
}

TEST(Direction, TheSeedSaysWhichPacketsAreLost) {
  EXPECT_EQ(lost(1, 0.1, 1000), lost(1, 0.1, 1000));
  EXPECT_NE(lost(1, 0.1, 1000), lost(2, 0.1, 1000));
}

TEST(Direction, TheShareThatIsLostIsThatAskedFor) {
  for (const double loss : {0.001, 0.01, 0.5}) {
    const auto found = lost(7, loss, 200'000);
    const double share = static_cast<double>(std::count(found.begin(), found.end(), true)) / 200'000;
    EXPECT_NEAR(share, loss, 4 * std::sqrt(loss / 200'000)) << loss;
  }
}

}  // namespace
}  // namespace p3::relay
