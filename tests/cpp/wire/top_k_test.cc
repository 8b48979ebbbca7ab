#include "wire/top_k.h"

#include <gtest/gtest.h>

#include <utility>
#include <vector>

namespace p3 {
namespace {

using Elements = std::vector<std::pair<size_t, float>>;

std::vector<uint8_t> written(const Elements& chosen, size_t elements) {
  std::vector<uint8_t> payload(top_k_bytes(chosen.size(), elements));
  TopKWriter writer(payload.data(), chosen.size(), elements);
  for (const auto& [offset, value] : chosen) writer.add(offset, value);
  return payload;
}

Elements read(const std::vector<uint8_t>& payload, size_t elements) {
  Elements all;
  each_of_top_k(payload.data(), elements, [&](size_t offset, float value) { all.push_back({offset, value}); });
  return all;
}

const char* problem_with(const std::vector<uint8_t>& payload, size_t elements) {
  return problem_with_top_k(payload.data(), payload.size(), elements);
}

TEST(TopK, HasTheBytesOfTheDocumentation) {
  const std::vector<uint8_t> expected = {
      0x02, 0x00, 0x00, 0x00,                          // 2 elements
      0x00, 0x00, 0x80, 0x3f, 0x00, 0x00, 0x20, 0xc0,  // 1.0, -2.5
      0x03, 0x00, 0x2c, 0x01,                          // of offset 3 and 300
  };
  EXPECT_EQ(written({{3, 1.0f}, {300, -2.5f}}, 50000), expected);
}

TEST(TopK, ComesBackAsItWasWrittenWithOffsetsOfBothWidths) {
  for (size_t elements : {3, 65536, 65537, 1000000}) {
    const Elements chosen = {{0, 1.5f}, {1, -0.0f}, {elements - 1, 3e38f}};
    const std::vector<uint8_t> payload = written(chosen, elements);
    EXPECT_EQ(payload.size(), 4 + 3 * (elements > 65536 ? 8u : 6u));
    EXPECT_EQ(problem_with(payload, elements), nullptr);
    EXPECT_EQ(read(payload, elements), chosen);
  }
}

TEST(TopK, IsReadAtAnyAlignment) {
  const Elements chosen = {{2, 1.5f}, {7, -4.0f}};
  std::vector<uint8_t> payload = written(chosen, 100);
  payload.insert(payload.begin(), 0xff);
  EXPECT_EQ(problem_with_top_k(payload.data() + 1, payload.size() - 1, 100), nullptr);
  Elements all;
  each_of_top_k(payload.data() + 1, 100, [&](size_t offset, float value) { all.push_back({offset, value}); });
  EXPECT_EQ(all, chosen);
}

TEST(TopK, HasFewerBytesThanTheWholeSlice) {
  EXPECT_FALSE(is_worth_top_k(1, 0));
  EXPECT_FALSE(is_worth_top_k(1, 2));  // 10 bytes and 8
  EXPECT_TRUE(is_worth_top_k(1, 3));
  EXPECT_FALSE(is_worth_top_k(66, 100));  // 400 bytes both
  EXPECT_TRUE(is_worth_top_k(65, 100));
  for (size_t bytes : {0, 3, 5, 9, 11, 400, 406, 4 + 6 * 100}) EXPECT_FALSE(can_be_top_k(bytes, 100)) << bytes;
  for (size_t bytes : {4, 10, 16, 394}) EXPECT_TRUE(can_be_top_k(bytes, 100)) << bytes;
  EXPECT_FALSE(can_be_top_k(4 + 6, 100000));
  EXPECT_TRUE(can_be_top_k(4 + 8, 100000));
}

TEST(TopK, IsRefusedIfAnOffsetIsOutOfOrderOrOfRange) {
  for (const Elements& wrong :
       std::vector<Elements>{{{5, 1}, {4, 1}}, {{5, 1}, {5, 1}}, {{100, 1}}, {{99, 1}, {65535, 1}}})
    EXPECT_STREQ(problem_with(written(wrong, 100), 100), "of elements that do not ascend within its slice");
  EXPECT_EQ(problem_with(written({{98, 1}, {99, 1}}, 100), 100), nullptr);
  EXPECT_EQ(problem_with(written({}, 100), 100), nullptr);
}

TEST(TopK, IsRefusedIfItsCountIsNotThatOfItsBytes) {
  std::vector<uint8_t> payload = written({{1, 1}, {2, 1}}, 100);
  for (int count : {0, 1, 3, 255}) {
    payload[0] = static_cast<uint8_t>(count);
    EXPECT_STREQ(problem_with(payload, 100), "of another size than its number of elements says") << count;
  }
  payload[0] = 2;
  payload[3] = 0x80;
  EXPECT_NE(problem_with(payload, 100), nullptr);
}

}  // namespace
}  // namespace p3
