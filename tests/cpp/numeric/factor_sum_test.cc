#include <gtest/gtest.h>

#include <random>
#include <vector>

#include "base/simd.h"
#include "numeric/products/factors.h"

namespace p3 {
namespace {

std::vector<float> random_part(const FactorShape& shape, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> part(shape.part_elements());
  for (float& value : part) value = normal(random);
  return part;
}

std::vector<float> sum_of(const FactorShape& shape, const std::vector<std::vector<float>>& parts, size_t block) {
  std::vector<const float*> places;
  for (const auto& part : parts) places.push_back(part.data());
  FactorSum sum(shape);
  std::vector<float> whole(shape.elements());
  for (size_t first = 0; first < shape.outputs; first += block)
    sum.rows(places, first, std::min<size_t>(block, shape.outputs - first), whole.data() + first * shape.inputs);
  return whole;
}

// As factors.h says, element by element.
std::vector<float> reference(const FactorShape& shape, const std::vector<std::vector<float>>& parts) {
  std::vector<float> whole(shape.elements());
  for (size_t m = 0; m < shape.outputs; ++m)
    for (size_t n = 0; n < shape.inputs; ++n) {
      float sum = 0;
      for (const auto& part : parts)
        for (size_t k = 0; k < shape.rows; ++k) {
          const float* const row = part.data() + k * (shape.outputs + shape.inputs);
          sum += row[m] * row[shape.outputs + n];
        }
      whole[m * shape.inputs + n] = sum;
    }
  return whole;
}

TEST(FactorSum, IsTheSumInItsOrderToTheBitInEveryShapeAndBuild) {
  for (const FactorShape& shape : {FactorShape{1, 1, 1}, FactorShape{3, 5, 7}, FactorShape{8, 33, 40},
                                   FactorShape{5, 64, 16}, FactorShape{2, 31, 129}}) {
    const std::vector<std::vector<float>> parts = {random_part(shape, 1), random_part(shape, 2), random_part(shape, 3)};
    const std::vector<float> expected = reference(shape, parts);
    EXPECT_EQ(sum_of(shape, parts, FactorSum::kBlock), expected);
    EXPECT_EQ(sum_of(shape, parts, 3), expected);
    if (!cpu_has_avx2()) continue;
    use_avx2 = false;
    EXPECT_EQ(sum_of(shape, parts, FactorSum::kBlock), expected);
    use_avx2 = true;
  }
}

TEST(FactorSum, OfRowsOfWholeNumbersIsExact) {
  const FactorShape shape{4, 6, 9};
  std::vector<float> part(shape.part_elements());
  for (size_t i = 0; i < part.size(); ++i) part[i] = static_cast<float>(i % 11) - 5;
  const std::vector<float> once = sum_of(shape, {part}, 32), thrice = sum_of(shape, {part, part, part}, 32);
  for (size_t i = 0; i < once.size(); ++i) EXPECT_EQ(thrice[i], 3 * once[i]);
}

}  // namespace
}  // namespace p3
