// Sums by places: of one shape and the same bits in whatever order the places come, and what is kept meanwhile.
#include "numeric/rank_sum.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "base/half.h"
#include "codec/dgc.h"
#include "codec/standard.h"
#include "wire/top_k.h"

namespace p3 {
namespace {

constexpr size_t kElements = 1000;

// What the places push, as it comes over the wire; none: absent.
struct Gradients {
  DType type;
  Compression compression;
  std::vector<std::optional<std::vector<char>>> payloads;

  size_t sum_bytes() const { return kElements * size_of(sum_type(type)); }
  int places() const { return static_cast<int>(payloads.size()); }

  PooledBuffer payload(BufferPool& pool, int place) const {
    const auto& bytes = payloads[static_cast<size_t>(place)];
    if (!bytes) return {};
    PooledBuffer buffer(pool, BufferPool::roomy(bytes->size()));
    std::memcpy(buffer.data(), bytes->data(), bytes->size());
    return buffer;
  }
};

template <typename T, typename Narrow>
std::vector<char> payload_of(const std::vector<float>& values, Narrow narrow) {
  std::vector<char> bytes(values.size() * sizeof(T));
  for (size_t i = 0; i < values.size(); ++i) {
    const T value = narrow(values[i]);
    std::memcpy(bytes.data() + i * sizeof(T), &value, sizeof(T));
  }
  return bytes;
}

std::vector<char> written(std::vector<float> values, DType type, const Compression& compression) {
  if (type == DType::kFloat64) return payload_of<double>(values, [](float value) { return value + 1e-12 * value; });
  if (type == DType::kFloat16) return payload_of<half>(values, float_to_half);
  if (compression.encoding == Encoding::kPlain) return payload_of<float>(values, [](float value) { return value; });
  if (compression.encoding == Encoding::kTopK) {
    for (size_t i = 0; i < values.size(); ++i)
      if (std::abs(values[i]) < 60) values[i] = 0;
    const size_t count = count_nonzero(values.data(), values.size());
    std::vector<char> bytes(top_k_bytes(count, values.size()));
    encode_nonzero(values.data(), count, bytes.data(), values.size());
    return bytes;
  }
  std::vector<float> residual(values.size());
  std::vector<char> bytes(encoded_bytes(compression, type, values.size()));
  encode(compression, values.data(), residual.data(), bytes.data(), values.size());
  return bytes;
}

// `leave_out`: of so many places one has none.
Gradients gradients(int places, DType type, const Compression& compression = {}, int leave_out = 0) {
  std::mt19937 random(static_cast<unsigned>(places));
  std::normal_distribution<float> normal(0, 10);
  Gradients made{type, compression, {}};
  for (int place = 0; place < places; ++place) {
    std::vector<float> values(kElements);
    for (float& value : values) value = normal(random) * std::pow(2.f, normal(random) / 4);
    made.payloads.emplace_back();
    if (leave_out == 0 || place % leave_out != 1) made.payloads.back() = written(values, type, compression);
  }
  return made;
}

PooledBuffer sum_in(const std::vector<int>& order, const Gradients& given, BufferPool& pool) {
  RankSum sum(given.places(), given.type, kElements, pool, given.compression.encoding);
  for (int place : order) {
    EXPECT_FALSE(sum.complete() || sum.has(place));
    sum.add(place, given.payload(pool, place), given.compression);
  }
  EXPECT_TRUE(sum.complete());
  return sum.take();
}

std::vector<int> by_place(int places) {
  std::vector<int> order(static_cast<size_t>(places));
  std::iota(order.begin(), order.end(), 0);
  return order;
}

// Of one gradient alone, in float64.
std::vector<double> widened(const Gradients& given, int place) {
  BufferPool pool;
  RankSum alone(1, given.type, kElements, pool, given.compression.encoding);
  alone.add(0, given.payload(pool, place), given.compression);
  const PooledBuffer sum = alone.take();
  std::vector<double> values(kElements);
  for (size_t i = 0; sum && i < kElements; ++i)
    values[i] = given.type == DType::kFloat64 ? static_cast<const double*>(sum.data())[i]
                                              : double{static_cast<const float*>(sum.data())[i]};
  return values;
}

void expect_nearly_naive(const Gradients& given, const void* sum) {
  std::vector<double> naive(kElements), size(kElements);
  for (int place = 0; place < given.places(); ++place) {
    const std::vector<double> values = widened(given, place);
    for (size_t i = 0; i < kElements; ++i) naive[i] += values[i], size[i] += std::abs(values[i]);
  }
  const bool is_double = given.type == DType::kFloat64;
  for (size_t i = 0; i < kElements; ++i)
    ASSERT_NEAR(is_double ? static_cast<const double*>(sum)[i] : double{static_cast<const float*>(sum)[i]}, naive[i],
                size[i] * given.places() * (is_double ? 1e-15 : 6e-8));
}

struct Kind {
  std::string name;
  DType type;
  Compression compression;
};

const std::vector<Kind> kKinds = [] {
  std::vector<Kind> made = {
      {"float32", DType::kFloat32, {}},
      {"float64", DType::kFloat64, {}},
      {"float16", DType::kFloat16, {}},
  };
  for (const Codec* codec : codecs()) {
    Compression how = standard(*codec);
    if (how.encoding == Encoding::kTwoBit) how.options[0] = 5;
    made.push_back({codec->name, DType::kFloat32, how});
  }
  return made;
}();

TEST(RankSum, IsTheSameInWhateverOrderPlacesCome) {
  for (const Kind& kind : kKinds)
    for (int places : {1, 2, 3, 4, 5, 7, 8, 17, 33, 64, 100})
      for (int leave_out : {0, 2, 5}) {
        SCOPED_TRACE(kind.name + ", " + std::to_string(places) + " places, without every " + std::to_string(leave_out));
        const Gradients given = gradients(places, kind.type, kind.compression, leave_out);
        BufferPool pool;
        std::vector<int> order = by_place(places);
        const PooledBuffer sum = sum_in(order, given, pool);
        ASSERT_TRUE(sum);
        ASSERT_NO_FATAL_FAILURE(expect_nearly_naive(given, sum.data()));
        std::mt19937 random(7);
        for (int i = 0; i < 4; ++i) {
          if (i == 0)
            std::reverse(order.begin(), order.end());
          else
            std::shuffle(order.begin(), order.end(), random);
          const PooledBuffer other = sum_in(order, given, pool);
          ASSERT_EQ(std::memcmp(sum.data(), other.data(), given.sum_bytes()), 0) << "seed 7, order " << i;
        }
      }
}

// The definition: of the first m places and of the others.
std::vector<float> halved(const std::vector<std::vector<float>>& values) {
  if (values.size() == 1) return values[0];
  size_t m = 1;
  while (2 * m < values.size()) m *= 2;
  const auto middle = values.begin() + static_cast<ptrdiff_t>(m);
  std::vector<float> left = halved({values.begin(), middle});
  const std::vector<float> right = halved({middle, values.end()});
  for (size_t i = 0; i < left.size(); ++i) left[i] += right[i];
  return left;
}

TEST(RankSum, IsThatOfTheFirstPlacesAndOfTheOthers) {
  for (int places : {1, 3, 4, 6, 7, 13, 64}) {
    const Gradients given = gradients(places, DType::kFloat32);
    std::vector<std::vector<float>> values;
    for (int place = 0; place < places; ++place) {
      const std::vector<double> wide = widened(given, place);
      values.emplace_back(wide.begin(), wide.end());
    }
    BufferPool pool;
    const PooledBuffer sum = sum_in(by_place(places), given, pool);
    EXPECT_EQ(std::memcmp(sum.data(), halved(values).data(), given.sum_bytes()), 0) << places;
  }
}

TEST(RankSum, OfFewBitsIsThatOfRunsOfPlaces) {
  const Gradients given = gradients(20, DType::kFloat32, {Encoding::kTwoBit, 5.f});
  std::vector<std::vector<float>> runs(2, std::vector<float>(kElements));
  for (int place = 0; place < 20; ++place) {
    const std::vector<double> values = widened(given, place);
    for (size_t i = 0; i < kElements; ++i) runs[place >= 16][i] += static_cast<float>(values[i]);
  }
  BufferPool pool;
  const PooledBuffer sum = sum_in(by_place(20), given, pool);
  EXPECT_EQ(std::memcmp(sum.data(), halved(runs).data(), given.sum_bytes()), 0);
}

TEST(RankSum, RoundsToTheKeysTypeAndBeginsAnew) {
  const Gradients given = gradients(3, DType::kFloat16, {}, 2);
  BufferPool pool;
  {
    RankSum sum(3, DType::kFloat16, kElements, pool);
    for (int round = 0; round < 2; ++round) {
      for (int place : {2, 1, 0}) sum.add(place, given.payload(pool, place));
      const PooledBuffer rounded = sum.take_rounded();
      ASSERT_EQ(rounded.bytes(), kElements * sizeof(half));
      const std::vector<double> zeroth = widened(given, 0), second = widened(given, 2);
      for (size_t i = 0; i < kElements; ++i)
        ASSERT_EQ(static_cast<const half*>(rounded.data())[i],
                  float_to_half(static_cast<float>(zeroth[i] + second[i])));
      EXPECT_FALSE(sum.complete());
    }
    for (int place : {0, 1, 2}) sum.add(place, {});
    EXPECT_FALSE(sum.take());
    sum.add(2, given.payload(pool, 2));  // the next sum's, dropped with it
  }
  EXPECT_EQ(pool.bytes_in_use(), 0u);
}

// --- what is kept of 64 workers, in sums; and the most that ever was ------------------------------------------------

struct Kept {
  double at_last, most;  // before the last one came
};

Kept kept_of_64(const std::vector<int>& order, const Kind& kind) {
  const Gradients given = gradients(64, kind.type, kind.compression);
  BufferPool pool;
  RankSum sum(64, kind.type, kElements, pool, kind.compression.encoding);
  Kept kept{};
  for (int place : order) {
    kept.at_last = static_cast<double>(pool.bytes_in_use()) / static_cast<double>(given.sum_bytes());
    kept.most = std::max(kept.most, kept.at_last);
    sum.add(place, given.payload(pool, place), given.compression);
  }
  EXPECT_TRUE(sum.complete());
  return kept;
}

constexpr double kRoomy = 1.25;  // a buffer's bytes over those of its content

TEST(RankSum, KeepsSixSumsOfSixtyFourWorkersWhileRankZeroIsLate) {
  std::vector<int> order = by_place(64);
  std::rotate(order.begin(), order.begin() + 1, order.end());
  for (unsigned seed = 0; seed < 5; ++seed) {
    for (const Kind& kind : kKinds) {
      const bool few_bits = kind.compression.codec() != nullptr && kind.compression.codec()->run() > 1;
      EXPECT_LE(kept_of_64(order, kind).at_last, few_bits ? 4 * kRoomy : 6 * kRoomy) << kind.name << ", seed " << seed;
    }
    std::shuffle(order.begin(), order.end() - 1, std::mt19937(seed));
  }
}

TEST(RankSum, KeepsASumOfEveryOtherWorkerInTheWorstOrder) {
  std::vector<int> worst;
  for (int first : {1, 0})
    for (int place = first; place < 64; place += 2) worst.push_back(place);
  for (const Kind& kind : kKinds) {
    EXPECT_LE(kept_of_64(worst, kind).most, 32 * kRoomy) << kind.name;
    for (unsigned seed = 0; seed < 10; ++seed) {
      std::vector<int> order = by_place(64);
      std::shuffle(order.begin(), order.end(), std::mt19937(seed));
      EXPECT_LE(kept_of_64(order, kind).most, 32 * kRoomy) << kind.name << ", seed " << seed;
    }
  }
}

TEST(RankSum, AddsAsTheyComeIntoOneSum) {
  const Gradients given = gradients(64, DType::kFloat32);
  BufferPool pool;
  RankSum sum(1, DType::kFloat32, kElements, pool, Encoding::kPlain, false);
  for (int place : by_place(64)) sum.add(0, given.payload(pool, place));
  const PooledBuffer made = sum.take();
  EXPECT_EQ(pool.bytes_in_use(), made.bytes());
  expect_nearly_naive(given, made.data());
}

}  // namespace
}  // namespace p3
