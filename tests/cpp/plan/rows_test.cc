// Rows as they travel: cutting, writing, reading, and what is refused.
#include "plan/rows.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <string>
#include <vector>

#include "numeric/sorted_rows.h"

namespace p3 {
namespace {

KeyPlan plan_of(uint64_t rows, uint32_t row_elements, uint32_t partitions, uint32_t slice_elements = 12) {
  KeyPlan plan;
  plan.elements = rows * row_elements;
  plan.row_elements = row_elements;
  plan.partitions = partitions;
  plan.slice_elements = slice_elements;
  return plan;
}

using Payload = std::vector<char>;

Payload written(const RowsPiece& piece, const std::vector<int64_t>& ids, size_t row_bytes) {
  Payload payload(piece.payload_bytes(row_bytes), 'x');
  write_rows(piece, ids.data(), row_bytes, payload.data(),
             [&](void* to, uint64_t i) { std::memset(to, static_cast<int>(ids[i] % 100 + 1), row_bytes); });
  return payload;
}

TEST(Partitions, CoverAllRowsOnceAndAreNearlyEqual) {
  for (uint64_t rows : {1u, 2u, 7u, 100u, 1000003u}) {
    for (uint32_t count : {1u, 2u, 3u, 7u, 64u}) {
      if (count > rows) continue;
      const KeyPlan plan = plan_of(rows, 3, count);
      ASSERT_EQ(problem_with(plan), "");
      ASSERT_EQ(slice_count(plan), count);
      uint64_t next = 0;
      for (uint32_t i = 0; i < count; ++i) {
        const RowRange range = partition_at(plan, i);
        EXPECT_EQ(range.first, next);
        EXPECT_LE(range.count, rows / count + 1);
        EXPECT_GE(range.count, rows / count);
        next += range.count;
      }
      EXPECT_EQ(next, rows);
    }
  }
}

TEST(Partitions, OfAPlanThatCannotBeAreRefused) {
  EXPECT_EQ(problem_with(plan_of(0, 3, 1)), "");
  EXPECT_NE(problem_with(plan_of(5, 3, 0)), "");
  EXPECT_NE(problem_with(plan_of(5, 3, 6)), "");
  EXPECT_NE(problem_with(plan_of(uint64_t{1} << 40, 1, 1)), "");
  EXPECT_NE(problem_with(plan_of(1, uint32_t{1} << 30, 1)), "");  // a row that no frame can carry
  KeyPlan uneven = plan_of(5, 3, 2);
  uneven.elements = 16;
  EXPECT_NE(problem_with(uneven), "");
}

TEST(Rows, ComeAsTheyWereSentInEitherCoding) {
  const unsigned seed = std::random_device()();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937 random(seed);
  for (int turn = 0; turn < 300; ++turn) {
    const uint64_t rows = 1 + random() % (turn % 3 == 0 ? 1000000 : 60);
    const KeyPlan plan = plan_of(rows, 3, static_cast<uint32_t>(1 + random() % std::min<uint64_t>(rows, 5)), 30);
    const RowRange range = partition_at(plan, static_cast<uint32_t>(random() % plan.partitions));
    const bool as_blocks = turn % 2 == 0 && range.count < 1000;
    std::vector<int64_t> ids;
    for (auto i = random() % 50; i > 0; --i) ids.push_back(int64_t(range.first + random() % range.count));
    std::sort(ids.begin(), ids.end());
    ids.erase(std::unique(ids.begin(), ids.end()), ids.end());

    const auto pieces = cut_rows(plan, range, ids.data(), 0, ids.size(), as_blocks);
    std::vector<int64_t> came;
    uint64_t next_row = range.first, all_rows = 0;
    ReceivedRows received;
    for (const RowsPiece& piece : pieces) {
      const Payload payload = written(piece, ids, 12);
      EXPECT_LE(payload.size(), max_rows_payload(plan, 4));
      ASSERT_EQ(read_rows(plan, range, 12, payload.data(), payload.size(), next_row, received), nullptr);
      EXPECT_EQ(received.header.last == 1, &piece == &pieces.back());
      EXPECT_EQ((received.values - payload.data()) % 8, 0);
      for (size_t i = 0; i < received.ids.size(); ++i) EXPECT_EQ(received.row(i)[11], received.ids[i] % 100 + 1);
      came.insert(came.end(), received.ids.begin(), received.ids.end());
      all_rows += received.header.rows;
    }
    EXPECT_EQ(came, ids);
    EXPECT_EQ(all_rows, as_blocks ? range.count : ids.size());
  }
}

TEST(Rows, OfABlockThatNobodyTouchedAreZero) {
  const std::vector<int64_t> ids = {2};
  const KeyPlan plan = plan_of(4, 3, 1);
  const Payload payload = written(cut_rows(plan, {0, 4}, ids.data(), 0, 1, true)[0], ids, 12);
  const std::string values(payload.end() - 48, payload.end());
  EXPECT_EQ(values, std::string(24, '\0') + std::string(12, '\3') + std::string(12, '\0'));
}

TEST(Rows, AreCutIntoFramesOfAboutASlice) {
  const KeyPlan plan = plan_of(100, 5, 1, 12);  // two rows to a frame
  const std::vector<int64_t> ids = {3, 4, 10, 90, 91};
  const auto pieces = cut_rows(plan, {0, 100}, ids.data(), 0, 5, false);
  ASSERT_EQ(pieces.size(), 3u);
  EXPECT_EQ(pieces[0].header.coding, IdCoding::kRange);
  EXPECT_EQ(pieces[0].header.id_bytes, 0u);
  EXPECT_EQ(pieces[1].header.coding, IdCoding::kGaps);
  EXPECT_EQ(pieces[2].header.rows, 1u);
  EXPECT_EQ(rows_per_frame(plan_of(100, 50, 1, 12)), 1u);
}

TEST(Rows, AreWrittenAsTheProtocolShows) {
  const std::vector<int64_t> ids = {300, 302, 500};
  const Payload payload = written(cut_rows(plan_of(1000, 1, 1), {0, 1000}, ids.data(), 0, 3, false)[0], ids, 2);
  const std::vector<unsigned char> expected = {
      0x2c, 0x01, 0,    0,    0, 0, 0, 0,  // first row
      3,    0,    0,    0,    8, 0, 0, 0,  // rows, bytes of ids
      1,    1,    0,    0,    0, 0, 0, 0,  // coding, last, reserved, next plan
      0,    0,    0,    0,    0, 0, 0, 0,  // rows pushed, rows touched
      0x00, 0x01, 0xc5, 0x01, 0, 0, 0, 0,  // gaps: 0, 1, 197
      1,    1,    3,    3,    1, 1,        // values
  };
  EXPECT_EQ(std::vector<unsigned char>(payload.begin(), payload.end()), expected);
}

class Malformed : public testing::Test {
 protected:
  std::string reason(RowsHeader header, std::vector<unsigned char> ids, size_t values) {
    header.id_bytes += static_cast<uint32_t>(ids.size());
    Payload payload(sizeof header + ids.size() + values);
    std::memcpy(payload.data(), &header, sizeof header);
    if (!ids.empty()) std::memcpy(payload.data() + sizeof header, ids.data(), ids.size());
    uint64_t next_row = 20;
    ReceivedRows rows;
    const char* problem = read_rows(plan_, {10, 20}, 4, payload.data(), payload.size(), next_row, rows);
    return problem == nullptr ? "" : problem;
  }
  static RowsHeader header(IdCoding coding, uint64_t first_row, uint32_t rows) {
    RowsHeader made;
    made.coding = coding;
    made.first_row = first_row;
    made.rows = rows;
    return made;
  }
  const KeyPlan plan_ = plan_of(100, 1, 5, 9);  // rows 10 to 29, of which 10 to 19 have come; 9 rows to a frame
};

TEST_F(Malformed, IdsAreNamed) {
  const auto range = [](uint64_t first, uint32_t rows) { return header(IdCoding::kRange, first, rows); };
  const auto gaps = [](uint64_t first, uint32_t rows) { return header(IdCoding::kGaps, first, rows); };
  const auto bits = [](uint64_t first, uint32_t rows) { return header(IdCoding::kBitmap, first, rows); };
  EXPECT_EQ(reason(range(20, 9), {}, 36), "");
  EXPECT_EQ(reason(range(19, 1), {}, 4), "out of order");
  EXPECT_EQ(reason(range(9, 1), {}, 4), "outside its partition");
  EXPECT_EQ(reason(range(30, 1), {}, 4), "outside its partition");
  EXPECT_EQ(reason(range(29, 2), {}, 8), "outside its partition");
  EXPECT_EQ(reason(range(~uint64_t{0}, 2), {}, 8), "outside its partition");
  EXPECT_EQ(reason(range(20, 1), {0, 0, 0, 0, 0, 0, 0, 0}, 4), "of another size than its header says");

  EXPECT_EQ(reason(gaps(20, 2), {0, 8, 0, 0, 0, 0, 0, 0}, 8), "");
  EXPECT_EQ(reason(gaps(20, 2), {0, 9, 0, 0, 0, 0, 0, 0}, 8), "outside its partition");
  EXPECT_EQ(reason(gaps(29, 2), {0, 0, 0, 0, 0, 0, 0, 0}, 8), "outside its partition");
  EXPECT_EQ(reason(gaps(20, 2), {0, 1, 1, 0, 0, 0, 0, 0}, 8), "malformed");
  EXPECT_EQ(reason(gaps(20, 1), {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}, 4), "malformed");
  EXPECT_EQ(reason(gaps(20, 1), {0x80, 0x80, 0x80, 0x80, 0x80, 0, 0, 0}, 4), "cut short");
  EXPECT_EQ(reason(gaps(20, 9), {0, 0, 0, 0, 0, 0, 0, 0}, 36), "cut short");
  EXPECT_EQ(reason(gaps(20, 1), {}, 4), "cut short");

  EXPECT_EQ(reason(bits(21, 9), {0xff, 1, 0, 0, 0, 0, 0, 0}, 36), "");
  EXPECT_EQ(reason(bits(21, 9), {0xff, 2, 0, 0, 0, 0, 0, 0}, 36), "malformed");
  EXPECT_EQ(reason(bits(21, 8), {0xff, 0, 0, 0, 0, 0, 0, 1}, 32), "malformed");
  EXPECT_EQ(reason(bits(21, 9), {}, 36), "of another size than its header says");
  EXPECT_EQ(reason(bits(22, 9), {0, 0, 0, 0, 0, 0, 0, 0}, 36), "outside its partition");
}

TEST_F(Malformed, HeadersAreNamed) {
  RowsHeader last;
  last.last = 1;
  EXPECT_EQ(reason(last, {}, 0), "");
  EXPECT_EQ(reason({}, {}, 0), "empty, and not the last");
  EXPECT_EQ(reason(last, {0, 0, 0, 0, 0, 0, 0, 0}, 0), "empty, and not the last");
  EXPECT_EQ(reason(header(static_cast<IdCoding>(3), 20, 1), {}, 4), "malformed");
  RowsHeader wrong = header(IdCoding::kRange, 20, 1);
  wrong.last = 2;
  EXPECT_EQ(reason(wrong, {}, 4), "malformed");
  wrong.last = 0;
  wrong.reserved = 1;
  EXPECT_EQ(reason(wrong, {}, 4), "malformed");
  for (size_t values : {0, 3, 5, 8})
    EXPECT_EQ(reason(header(IdCoding::kRange, 20, 1), {}, values), "of another size than its header says") << values;
  EXPECT_EQ(reason(header(IdCoding::kRange, 20, 10), {}, 40), "of another size than its header says");
  EXPECT_EQ(reason(header(IdCoding::kRange, 20, ~0u), {}, 4), "of another size than its header says");
  EXPECT_EQ(reason(header(IdCoding::kGaps, 20, 1), {0, 0, 0, 0}, 4), "of another size than its header says");
  RowsHeader vast = header(IdCoding::kGaps, 20, 1);
  vast.id_bytes = 0xfffffff8u;
  EXPECT_EQ(reason(vast, {}, 4), "of another size than its header says");
  uint64_t next_row = 0;
  ReceivedRows rows;
  const char few[31] = {};
  EXPECT_NE(read_rows(plan_, {10, 20}, 4, few, sizeof few, next_row, rows), nullptr);
}

TEST_F(Malformed, BytesByChanceNeverLeadOutsideThePartition) {
  const unsigned seed = std::random_device()();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937 random(seed);
  int accepted = 0;
  for (int turn = 0; turn < 200000; ++turn) {
    RowsHeader made =
        header(static_cast<IdCoding>(random() % 3), 10 + random() % 20, static_cast<uint32_t>(random() % 10));
    made.last = static_cast<uint8_t>(random() % 2);
    made.id_bytes = static_cast<uint32_t>(8 * (random() % 3));
    Payload payload(sizeof made + made.id_bytes + made.rows * 4);
    for (char& byte : payload) byte = static_cast<char>(random() % 4 == 0 ? random() : 0);
    std::memcpy(payload.data(), &made, sizeof made);
    uint64_t next_row = 10;
    ReceivedRows rows;
    if (read_rows(plan_, {10, 20}, 4, payload.data(), payload.size(), next_row, rows) != nullptr) continue;
    ++accepted;
    ASSERT_TRUE(is_ascending(rows.ids.data(), rows.ids.size()));
    for (size_t i = 0; i < rows.ids.size(); ++i) {
      ASSERT_GE(rows.ids[i], 10);
      ASSERT_LT(rows.ids[i], 30);
      ASSERT_GE(rows.row(i), payload.data());
      ASSERT_LE(rows.row(i) + 4, payload.data() + payload.size());
    }
  }
  EXPECT_GT(accepted, 1000);
}

TEST(SortedRows, AddUpWhatComesTwiceInTheOrderOfAppearance) {
  const std::vector<int64_t> ids = {5, 1, 5, 5, 0};
  const std::vector<float> values = {1e8f, 1, 2, 3, -1e8f, 4, 1, 5, 7, 8};
  const SortedRows sorted({ids.data(), 5, values.data()}, DType::kFloat32, 2);
  EXPECT_EQ(sorted.ids, (std::vector<int64_t>{0, 1, 5}));
  std::vector<float> sums(6);
  std::memcpy(sums.data(), sorted.values.data(), sorted.values.size());
  EXPECT_EQ(sums, (std::vector<float>{7, 8, 2, 3, 1e8f - 1e8f + 1, 10}));
}

}  // namespace
}  // namespace p3
