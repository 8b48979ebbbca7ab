#include "plan/routing.h"

#include <gtest/gtest.h>

namespace p3 {
namespace {

KeyPlan rows_of(uint64_t rows, uint32_t row_elements) {
  KeyPlan plan;
  plan.elements = rows * row_elements;
  plan.row_elements = row_elements;
  plan.partitions = 2;
  return plan;
}

TEST(Routing, CountsTheRowsOfBothWaysAndTheirIds) {
  const KeyPlan plan = rows_of(1000, 100);
  // Each of 4 workers pushed 50 rows, 120 in all: gaps below 128 take a byte.
  const RouteBytes bytes = bytes_of_routes(plan, 4, {200, 120}, true);
  EXPECT_DOUBLE_EQ(bytes.rows, (50 + 120) * 401);
  EXPECT_DOUBLE_EQ(bytes.slices, 2 * (1000 * 400 + 125));
}

TEST(Routing, AMachinePushesAtMostWhatAnybodyTouched) {
  const KeyPlan plan = rows_of(1000, 100);
  // The same 4 workers on 2 machines, and on one.
  EXPECT_DOUBLE_EQ(bytes_of_routes(plan, 2, {200, 120}, true).rows, (100 + 120) * 401);
  EXPECT_DOUBLE_EQ(bytes_of_routes(plan, 1, {200, 120}, true).rows, (120 + 120) * 401);
}

TEST(Routing, LongGapsTakeMoreBytes) {
  const KeyPlan plan = rows_of(1000000, 1);
  EXPECT_DOUBLE_EQ(bytes_of_routes(plan, 1, {1000, 1000}, true).rows, 2 * 1000 * (4 + 2));
  EXPECT_DOUBLE_EQ(bytes_of_routes(plan, 1, {10, 10}, true).rows, 2 * 10 * (4 + 3));
}

TEST(Routing, AWorkerThatFetchesAsksForItsRowsWhateverTheRoute) {
  const KeyPlan plan = rows_of(1000, 100);
  const RouteBytes bytes = bytes_of_routes(plan, 2, {100, 80}, false);
  EXPECT_DOUBLE_EQ(bytes.rows, 2 * 50 * 401);
  EXPECT_DOUBLE_EQ(bytes.slices, 1000 * 400 + 125 + 50 * 401);
}

TEST(Routing, FewRowsGoAsRowsAndAlmostAllAsSlices) {
  const KeyPlan narrow = rows_of(100000, 2);
  EXPECT_FALSE(bytes_of_routes(narrow, 2, {2000, 2000}, true).slices_are_cheaper());
  EXPECT_FALSE(bytes_of_routes(narrow, 2, {0, 0}, true).slices_are_cheaper());
  EXPECT_TRUE(bytes_of_routes(narrow, 2, {200000, 100000}, true).slices_are_cheaper());
  // 9 bytes a row that is touched, 8 and a bit for each that is there: they meet at 0.903 of the rows.
  EXPECT_FALSE(bytes_of_routes(narrow, 2, {2 * 90000, 90000}, true).slices_are_cheaper());
  EXPECT_TRUE(bytes_of_routes(narrow, 2, {2 * 90500, 90500}, true).slices_are_cheaper());
}

}  // namespace
}  // namespace p3
