#include "transport/priority_queue.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <iterator>
#include <limits>
#include <random>
#include <vector>

namespace p3 {
namespace {

TEST(PriorityQueue, HigherPrioritiesLeaveFirst) {
  PriorityQueue<int> queue;
  for (int priority : {-3, 0, -1, 7, -2}) queue.push({0, priority}, priority);
  std::vector<int> order;
  while (!queue.empty()) order.push_back(queue.pop());
  EXPECT_EQ(order, (std::vector<int>{7, 0, -1, -2, -3}));
}

TEST(PriorityQueue, EqualPrioritiesLeaveInArrivalOrder) {
  PriorityQueue<int> queue;
  for (int i = 0; i < 1000; ++i) queue.push({0, 5}, i);
  for (int i = 0; i < 1000; ++i) EXPECT_EQ(queue.pop(), i);
}

TEST(PriorityQueue, OlderRoundsLeaveBeforeHigherPriorities) {
  PriorityQueue<int> queue;
  queue.push({8, 100}, 2);
  queue.push({7, -5}, 1);
  queue.push({7, 3}, 0);
  queue.push({9, 100}, 3);
  for (int i = 0; i < 4; ++i) EXPECT_EQ(queue.pop(), i);
}

TEST(PriorityQueue, SignsOfLifeGoFirstAndGoodbyesLast) {
  Header ping, push, bye;
  ping.priority = std::numeric_limits<int32_t>::max();
  push.kind = FrameKind::kPush;
  push.round = 1000;
  bye.kind = FrameKind::kBye;
  EXPECT_TRUE(urgency_of(ping).is_sooner_than(urgency_of(push)));
  EXPECT_TRUE(urgency_of(push).is_sooner_than(urgency_of(bye)));
}

TEST(Urgency, OldRoundsThenHighPrioritiesGoFirst) {
  constexpr int32_t kLeast = std::numeric_limits<int32_t>::min(), kMost = std::numeric_limits<int32_t>::max();
  constexpr uint64_t kLastRound = std::numeric_limits<uint64_t>::max();
  const Urgency order[] = {{0, kMost}, {0, 0},  {0, -1},      {0, kLeast},
                           {1, kMost}, {1, -7}, {1000000, 3}, {kLastRound, 0}};
  for (size_t i = 1; i < std::size(order); ++i) {
    EXPECT_TRUE(order[i - 1].is_sooner_than(order[i])) << i;
    EXPECT_FALSE(order[i].is_sooner_than(order[i - 1])) << i;
  }
}

// Against the obvious model: a stable sort of what is inside.
TEST(PriorityQueue, AnyMixOfPushesAndPopsFollowsTheModel) {
  const unsigned seed = std::random_device{}();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937 random(seed);
  PriorityQueue<int> queue;
  std::vector<std::pair<std::pair<int, int>, int>> model;  // (-round, priority), value; in arrival order
  for (int step = 0; step < 20000; ++step) {
    ASSERT_EQ(queue.size(), model.size());
    if (model.empty() || random() % 5 < 3) {
      const int priority = static_cast<int>(random() % 8) - 4;
      const auto round = static_cast<int>(random() % 3);
      queue.push({static_cast<uint64_t>(round), priority}, step);
      model.push_back({{-round, priority}, step});
    } else {
      const auto first =
          std::max_element(model.begin(), model.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
      ASSERT_EQ(queue.top_urgency().priority, first->first.second);
      ASSERT_EQ(queue.pop(), first->second);
      model.erase(first);
    }
  }
}

}  // namespace
}  // namespace p3
