#include "simulator/event_queue.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <random>
#include <tuple>
#include <vector>

namespace p3::simulator {
namespace {

TEST(EventQueue, EarliestFirstAndEqualsInTheOrderInWhichTheyWerePlanned) {
  EventQueue events;
  events.at(2, EventKind::kRetry, 0);
  events.at(1, EventKind::kRetry, 1);
  events.at(2, EventKind::kRetry, 2);
  EXPECT_EQ(events.pop().subject, 1);
  EXPECT_EQ(events.pop().subject, 0);
  EXPECT_DOUBLE_EQ(events.now(), 2);
  EXPECT_EQ(events.pop().subject, 2);
  EXPECT_TRUE(events.empty());
  EXPECT_EQ(events.count(), 3u);
}

TEST(EventQueue, LanesChangeNoOrder) {
  // While some are popped others are planned, of a few times, so that many are equal.
  constexpr int kLanes = 3, kEvents = 2000;
  std::mt19937 random(1);
  EventQueue events;
  events.set_lanes(kLanes);
  std::array<double, kLanes> last{};
  using Planned = std::tuple<double, int>;  // time and number
  std::vector<Planned> planned;
  int number = 0, in_lanes = 0;
  const auto plan = [&] {
    const int lane = static_cast<int>(random() % (kLanes + 1));
    double time = events.now() + static_cast<double>(random() % 4);
    if (lane < kLanes) {
      time = last[static_cast<size_t>(lane)] = std::max(time, last[static_cast<size_t>(lane)]);
      events.in_lane(lane, time, EventKind::kArrived, number);
      ++in_lanes;
    } else {
      events.at(time, EventKind::kRetry, number);
    }
    planned.emplace_back(time, number++);
  };
  while (number < kEvents || !events.empty()) {
    if (number < kEvents) plan();
    if (number < kEvents && random() % 3 > 0) continue;
    const auto next = std::min_element(planned.begin(), planned.end());
    const Event event = events.pop();
    ASSERT_EQ(std::make_tuple(event.time, event.subject), *next);
    planned.erase(next);
  }
  EXPECT_TRUE(planned.empty());
  EXPECT_GT(in_lanes, kEvents / 2);
}

}  // namespace
}  // namespace p3::simulator
