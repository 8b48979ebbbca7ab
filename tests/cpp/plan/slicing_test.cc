#include "p3/slicing.h"

#include <gtest/gtest.h>

#include <vector>

namespace p3 {
namespace {

KeyPlan plan_of(uint64_t elements, uint32_t slice_elements = 50000, uint64_t first_slice = 0) {
  KeyPlan plan;
  plan.elements = elements;
  plan.slice_elements = slice_elements;
  plan.first_slice = first_slice;
  return plan;
}

TEST(Slicing, SlicesCoverEveryElementOnceAndInOrder) {
  for (uint64_t elements : {1ull, 7ull, 49999ull, 50000ull, 50001ull, 100000ull, 2359296ull}) {
    const KeyPlan plan = plan_of(elements);
    uint64_t next = 0;
    for (uint32_t i = 0; i < slice_count(plan); ++i) {
      const Slice slice = slice_at(plan, i);
      EXPECT_EQ(slice.offset, next);
      EXPECT_GT(slice.elements, 0u);
      EXPECT_LE(slice.elements, plan.slice_elements);
      next += slice.elements;
    }
    EXPECT_EQ(next, elements);
  }
}

TEST(Slicing, AnEmptyKeyHasOneEmptySlice) {
  const KeyPlan plan = plan_of(0);
  EXPECT_EQ(slice_count(plan), 1u);
  EXPECT_EQ(slice_at(plan, 0).elements, 0u);
}

TEST(Slicing, OffsetsPassFourGigabytes) {
  const KeyPlan plan = plan_of(3ull << 30, 50000);
  const uint32_t last = slice_count(plan) - 1;
  EXPECT_EQ(slice_at(plan, last).offset + slice_at(plan, last).elements, 3ull << 30);
}

TEST(Slicing, TheSlicesOfTheWholeJobGoRoundRobin) {
  // Small keys alone would all land on server 0 if each key started there.
  std::vector<int> load(3, 0);
  uint64_t first = 0;
  for (int key = 0; key < 300; ++key) {
    const KeyPlan plan = plan_of(100, 50000, first);
    ++load[static_cast<size_t>(server_of(plan, 0, 3))];
    first += slice_count(plan);
  }
  EXPECT_EQ(load, (std::vector<int>{100, 100, 100}));
}

TEST(Slicing, SlicesGoInTurnToTheServersOfAPlan) {
  KeyPlan plan = plan_of(500, 100, 3);
  plan.servers = {2, 0, 2};
  std::vector<int> owners;
  for (uint32_t i = 0; i < slice_count(plan); ++i) owners.push_back(server_of(plan, i, 4));
  EXPECT_EQ(owners, (std::vector<int>{2, 0, 2, 2, 0}));
  EXPECT_EQ(problem_with_servers(plan, 3), "");
  EXPECT_EQ(problem_with_servers(plan, 2), "there is no server 2");
  plan.reduction = Reduction::kNorm;
  EXPECT_EQ(problem_with_servers(plan, 3), "norms have a slice on each server");
  plan.servers.clear();
  EXPECT_EQ(problem_with_servers(plan, 3), "");
}

}  // namespace
}  // namespace p3
