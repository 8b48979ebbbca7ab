#include "p3/priority_queue.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <vector>

namespace p3 {
namespace {

TEST(PriorityQueue, HigherPrioritiesLeaveFirst) {
  PriorityQueue<int> queue;
  for (int priority : {-3, 0, -1, 7, -2}) queue.push(priority, priority);
  std::vector<int> order;
  while (!queue.empty()) order.push_back(queue.pop());
  EXPECT_EQ(order, (std::vector<int>{7, 0, -1, -2, -3}));
}

TEST(PriorityQueue, EqualPrioritiesLeaveInArrivalOrder) {
  PriorityQueue<int> queue;
  for (int i = 0; i < 1000; ++i) queue.push(5, i);
  for (int i = 0; i < 1000; ++i) EXPECT_EQ(queue.pop(), i);
}

// Against the obvious model: a stable sort of what is inside.
TEST(PriorityQueue, AnyMixOfPushesAndPopsFollowsTheModel) {
  const unsigned seed = std::random_device{}();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937 random(seed);
  PriorityQueue<int> queue;
  std::vector<std::pair<int, int>> model;  // priority, value; in arrival order
  for (int step = 0; step < 20000; ++step) {
    ASSERT_EQ(queue.size(), model.size());
    if (model.empty() || random() % 5 < 3) {
      const int priority = static_cast<int>(random() % 8) - 4;
      queue.push(priority, step);
      model.push_back({priority, step});
    } else {
      const auto first =
          std::max_element(model.begin(), model.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
      ASSERT_EQ(queue.top_priority(), first->first);
      ASSERT_EQ(queue.pop(), first->second);
      model.erase(first);
    }
  }
}

}  // namespace
}  // namespace p3
