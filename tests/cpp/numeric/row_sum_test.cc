// Sums of rows against a map of sums.
#include "numeric/row_sum.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "base/half.h"

namespace p3 {
namespace {

// Rows as they would have come, with the values in `values`.
template <typename T>
ReceivedRows rows_of(const std::vector<int64_t>& ids, const std::vector<T>& values, size_t row_elements) {
  ReceivedRows rows;
  rows.ids = ids;
  rows.values = reinterpret_cast<const char*>(values.data());
  rows.row_bytes = row_elements * sizeof(T);
  return rows;
}

float first_of(const RowSum& sum, int64_t row) {
  float value;
  std::memcpy(&value, sum.sum_of(row), sizeof value);
  return value;
}

TEST(RowSum, IsThatOfEachRowInTheOrderOfAdding) {
  const unsigned seed = std::random_device()();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  BufferPool pool;
  RowSum sum(DType::kFloat32, 3, {100, 500}, pool);
  for (int round = 0; round < 30; ++round) {
    std::map<int64_t, float> expected;
    for (auto sender = random() % 5; sender > 0; --sender) {
      std::vector<int64_t> ids;
      const auto share = 1 + random() % 5;
      for (int64_t row = 100; row < 600; ++row)
        if (random() % share == 0) ids.push_back(row);
      std::vector<float> values(ids.size() * 3);
      for (float& value : values) value = normal(random);
      for (size_t i = 0; i < ids.size(); ++i) {
        const auto [known, is_new] = expected.emplace(ids[i], values[i * 3]);
        if (!is_new) known->second += values[i * 3];
      }
      sum.add(rows_of(ids, values, 3));
    }
    std::vector<int64_t> touched;
    for (const auto& [row, value] : expected) {
      touched.push_back(row);
      ASSERT_EQ(first_of(sum, row), value) << "row " << row;
    }
    EXPECT_EQ(sum.ids(), touched);
    sum.clear();
    EXPECT_EQ(pool.bytes_in_use(), 0u);
  }
}

TEST(RowSum, CopiesTheFirstContribution) {  // 0 + -0 would be 0
  BufferPool pool;
  RowSum sum(DType::kFloat32, 1, {0, 4}, pool);
  const std::vector<float> minus_zero = {-0.0f};
  sum.add(rows_of({2}, minus_zero, 1));
  EXPECT_TRUE(std::signbit(first_of(sum, 2)));
}

TEST(RowSum, OfHalvesIsMadeInSinglePrecisionAndDividesOnce) {
  BufferPool pool;
  RowSum sum(DType::kFloat16, 2, {0, 4}, pool);
  const std::vector<half> one = {float_to_half(1), float_to_half(1)};
  const std::vector<half> tiny = {float_to_half(0.0001f), float_to_half(0.0001f)};
  sum.add(rows_of({3}, one, 2));
  sum.add(rows_of({3}, tiny, 2));
  EXPECT_EQ(first_of(sum, 3), 1 + half_to_float(tiny[0]));
  sum.divide(2);
  EXPECT_EQ(first_of(sum, 3), (1 + half_to_float(tiny[0])) / 2);
}

TEST(RowSum, OfOnlyTheTouchedRowsOfABlock) {
  BufferPool pool;
  RowSum sum(DType::kFloat32, 1, {10, 8}, pool);
  const std::vector<float> block = {0, 1, 2, 3};  // of rows 12 to 15, of which 13 and 15 were touched
  ReceivedRows rows = rows_of({13, 15}, block, 1);
  rows.header.coding = IdCoding::kBitmap;
  rows.header.first_row = 12;
  sum.add(rows);
  sum.add(rows);
  EXPECT_EQ(sum.ids(), (std::vector<int64_t>{13, 15}));
  EXPECT_EQ(first_of(sum, 13), 2);
  EXPECT_EQ(first_of(sum, 15), 6);
}

TEST(BufferPool, RoomySizesAreFewAndNotMuchLarger) {
  size_t before = 0;
  int sizes = 0;
  for (size_t bytes = 1; bytes < 100000; ++bytes) {
    const size_t roomy = BufferPool::roomy(bytes);
    ASSERT_GE(roomy, bytes);
    ASSERT_LT(roomy, std::max<size_t>(bytes + bytes / 4, bytes + BufferPool::kAlignment) + 1);
    sizes += roomy != before;
    before = roomy;
  }
  EXPECT_LT(sizes, 45);
}

}  // namespace
}  // namespace p3
