#include "simulator/link.h"

#include <gtest/gtest.h>

namespace p3::simulator {
namespace {

TEST(Link, BytesPassOneAfterTheOther) {
  Link link({1000, 0, 0});
  EXPECT_DOUBLE_EQ(link.pass(1, 500), 1.5);
  EXPECT_DOUBLE_EQ(link.pass(1, 500), 2.0);
  EXPECT_DOUBLE_EQ(link.waiting_bytes(1), 1000);
  EXPECT_DOUBLE_EQ(link.waiting_s(1.5), 0.5);
  EXPECT_DOUBLE_EQ(link.pass(3, 500), 3.5);
}

TEST(Link, BurstPassesAtOnceAfterAPauseAndMustBeEarnedAgain) {
  Link link({1000, 300, 0});
  EXPECT_DOUBLE_EQ(link.pass(1, 300), 1.0);
  EXPECT_DOUBLE_EQ(link.pass(1, 200), 1.2);
  EXPECT_DOUBLE_EQ(link.pass(1.3, 200), 1.4) << "100 bytes of tokens have come back";
  EXPECT_DOUBLE_EQ(link.pass(9, 300), 9.0);
}

TEST(Link, WhatFindsNoRoomIsLostAndCounted) {
  Link link({1000, 0, 800});
  EXPECT_GT(link.pass(0, 500), 0);
  EXPECT_EQ(link.pass(0, 400), Link::kLost);
  EXPECT_DOUBLE_EQ(link.pass(0, 300), 0.8);
  EXPECT_EQ(link.use().lost, 1u);
  EXPECT_EQ(link.use().segments, 2u);
  EXPECT_DOUBLE_EQ(link.use().bytes, 800);
  EXPECT_DOUBLE_EQ(link.use().busy_s, 0.8);
  EXPECT_DOUBLE_EQ(link.use().greatest_queue_s, 0.8);
  EXPECT_DOUBLE_EQ(link.use().mean_queue_s, 0.65);
}

}  // namespace
}  // namespace p3::simulator
