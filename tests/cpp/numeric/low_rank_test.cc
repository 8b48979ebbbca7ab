#include "numeric/products/low_rank.h"

#include <gtest/gtest.h>

#include <random>
#include <vector>

#include "base/simd.h"

namespace p3 {
namespace {

std::vector<float> random_matrix(size_t elements, unsigned seed, float scale = 1) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> made(elements);
  for (float& value : made) value = scale * normal(random);
  return made;
}

double product_of_columns(const std::vector<float>& matrix, size_t columns, size_t a, size_t b) {
  double sum = 0;
  for (size_t i = 0; i < matrix.size() / columns; ++i)
    sum += static_cast<double>(matrix[i * columns + a]) * static_cast<double>(matrix[i * columns + b]);
  return sum;
}

void expect_orthonormal(const std::vector<float>& matrix, size_t columns) {
  for (size_t a = 0; a < columns; ++a)
    for (size_t b = 0; b <= a; ++b)
      EXPECT_NEAR(product_of_columns(matrix, columns, a, b), a == b, 1e-6) << a << " " << b;
}

TEST(LowRank, ColumnsBecomeOrthonormalOfWhateverSize) {
  for (const float scale : {1e-30f, 1.f, 1e30f})
    for (const size_t rows : {4, 5, 33, 1000}) {
      std::vector<float> matrix = random_matrix(rows * 4, 1, scale);
      orthonormalise(matrix.data(), rows, 4, nullptr);
      expect_orthonormal(matrix, 4);
    }
}

TEST(LowRank, TheFirstColumnKeepsItsDirectionAndTheOthersTheirSide) {
  std::vector<float> matrix = {3, 1, 0, 4, 1, 0, 0, 0, 5};  // columns (3, 4, 0), (1, 1, 0), (0, 0, 5)
  orthonormalise(matrix.data(), 3, 3, nullptr);
  const std::vector<float> expected = {0.6f, 0.8f, 0, 0.8f, -0.6f, 0, 0, 0, 1};
  for (size_t i = 0; i < 9; ++i) EXPECT_NEAR(matrix[i], expected[i], 1e-7) << i;
}

TEST(LowRank, NearlyDependentColumnsBecomeOrthonormal) {
  std::vector<float> matrix = random_matrix(100 * 3, 2);
  for (size_t i = 0; i < 100; ++i) matrix[i * 3 + 1] = matrix[i * 3] * (1 + 1e-6f * static_cast<float>(i % 7));
  orthonormalise(matrix.data(), 100, 3, nullptr);
  expect_orthonormal(matrix, 3);
}

TEST(LowRank, ADependentColumnBecomesZeroOrMakesRoomForAnother) {
  std::vector<float> matrix = random_matrix(50 * 3, 3);
  for (size_t i = 0; i < 50; ++i) matrix[i * 3 + 1] = 2 * matrix[i * 3];
  std::vector<float> without = matrix;
  orthonormalise(without.data(), 50, 3, nullptr);
  EXPECT_EQ(product_of_columns(without, 3, 1, 1), 0);
  EXPECT_NEAR(product_of_columns(without, 3, 2, 2), 1, 1e-6);
  const std::vector<float> instead = random_matrix(50 * 3, 4);
  orthonormalise(matrix.data(), 50, 3, instead.data());
  expect_orthonormal(matrix, 3);
  std::vector<float> nothing(50 * 3);
  orthonormalise(nothing.data(), 50, 3, nullptr);
  EXPECT_EQ(nothing, std::vector<float>(50 * 3));
}

TEST(LowRank, TheProductIsTheSumInItsOrderToTheBitInEveryBuild) {
  for (const size_t rank : {1, 2, 7})
    for (const size_t rows : {1, 31, 32, 65})
      for (const size_t columns : {1, 40, 129}) {
        const std::vector<float> left = random_matrix(rows * rank, 5), right = random_matrix(columns * rank, 6);
        std::vector<float> expected(rows * columns), product(rows * columns);
        for (size_t i = 0; i < rows; ++i)
          for (size_t j = 0; j < columns; ++j)
            for (size_t k = 0; k < rank; ++k) expected[i * columns + j] += left[i * rank + k] * right[j * rank + k];
        multiply_thin(left.data(), right.data(), rows, columns, rank, product.data());
        EXPECT_EQ(product, expected);
        if (!cpu_has_avx2()) continue;
        use_avx2 = false;
        multiply_thin(left.data(), right.data(), rows, columns, rank, product.data());
        use_avx2 = true;
        EXPECT_EQ(product, expected);
      }
}

}  // namespace
}  // namespace p3
