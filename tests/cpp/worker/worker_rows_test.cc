// A worker's keys of rows, whose server is played by the test.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "plan/frames.h"
#include "plan/rows.h"
#include "worker/worker_job.h"

namespace p3 {
namespace {

constexpr uint32_t kRow = 2;  // elements of a row
constexpr size_t kRowBytes = kRow * sizeof(float);

// Key 3 has 10 rows in 2 partitions, 3 rows to a frame.
struct RowsJob : OneServer {
  explicit RowsJob(uint64_t staleness = 0) : OneServer(unix_pair()) {
    plan.wire_key = 3;
    plan.elements = 10 * kRow;
    plan.row_elements = kRow;
    plan.partitions = 2;
    plan.slice_elements = 3 * kRow;
    plan.staleness = staleness;
    key = worker.declare_rows("emb", 10, kRow, DType::kFloat32);
    worker.agree(key, plan);
  }

  // A round of this worker: rows with these ids, each of ones.
  void push(std::vector<int64_t> rows_to_push, bool lands = true) {
    const std::vector<int64_t>& pushed = ids.emplace_back(std::move(rows_to_push));
    const std::vector<float>& values = array(pushed.size() * kRow, 1);
    worker.push_rows(key, {pushed.data(), pushed.size(), values.data()}, lands ? landing.data() : nullptr, 5, {},
                     [this, told = results.expect(0)](const Error* error, const RowsView& rows) {
                       changed.assign(rows.ids, rows.ids + rows.count);
                       told(error, true);
                     });
  }

  ReceivedRows receive(Header& header) {
    header = server.must_receive();
    ReceivedRows rows;
    uint64_t next_row = 0;
    EXPECT_EQ(read_rows(plan, partition_at(plan, header.slice), kRowBytes, server.payload.data(), server.payload.size(),
                        next_row, rows),
              nullptr);
    return rows;
  }

  // Takes the frames of a push with one frame for each partition.
  void receive_push() {
    for (int i = 0; i < 2; ++i) EXPECT_EQ(server.must_receive().kind, FrameKind::kPushRows);
  }

  void answer(uint32_t partition, const std::vector<int64_t>& rows, float value, uint32_t touched, bool sums = false) {
    for (RowsPiece& piece : cut_rows(plan, {0, 10}, rows.data(), 0, rows.size(), false)) {
      piece.header.touched_rows = piece.header.pushed_rows = touched;
      std::vector<char> payload(piece.payload_bytes(kRowBytes));
      write_rows(piece, rows.data(), kRowBytes, payload.data(), [&](void* to, uint64_t) {
        const float row[kRow] = {value, value};
        std::memcpy(to, row, sizeof row);
      });
      answer_bytes(partition, payload, sums);
    }
  }

  void answer_bytes(uint32_t partition, const std::vector<char>& payload, uint8_t part = 0,
                    FrameKind kind = FrameKind::kRows) {
    Header header;
    header.kind = kind;
    header.key = 3;
    header.slice = partition;
    header.round = round;
    header.part = part;
    header.encoding = static_cast<uint8_t>(payload.empty() ? Encoding::kAbsent : Encoding::kPlain);
    header.payload_bytes = static_cast<uint32_t>(payload.size());
    server.send(header, payload.data());
  }

  KeyPlan plan;
  int key;
  uint64_t round = 1;  // of the answers
  std::deque<std::vector<int64_t>> ids;
  std::vector<float> landing = std::vector<float>(10 * kRow, 7);
  std::vector<int64_t> changed;
};

TEST(WorkerRows, LeaveInFramesOfTheirPartitionsWithThePriorityOfThePush) {
  RowsJob job;
  job.push({0, 1, 2, 4, 9});
  const std::vector<std::vector<int64_t>> expected = {{0, 1, 2}, {4}, {9}};
  for (size_t i = 0; i < expected.size(); ++i) {
    Header header;
    const ReceivedRows rows = job.receive(header);
    EXPECT_EQ(header.kind, FrameKind::kPushRows);
    EXPECT_EQ(header.slice, i < 2 ? 0u : 1u);
    EXPECT_EQ(header.round, 1u);
    EXPECT_EQ(header.priority, 5);
    EXPECT_EQ(header.part, 1);
    EXPECT_EQ(rows.ids, expected[i]);
    EXPECT_EQ(rows.header.last, i > 0);
  }
  job.answer(1, {5, 9}, 3, 2);
  job.answer(0, {0, 1, 2, 4}, 2, 4);
  ASSERT_TRUE(job.results.wait_for(1));
  EXPECT_EQ(job.results.text(0), "");
  EXPECT_EQ(job.changed, (std::vector<int64_t>{0, 1, 2, 4, 5, 9}));
  EXPECT_EQ(job.landing, (std::vector<float>{2, 2, 2, 2, 2, 2, 7, 7, 2, 2, 3, 3, 7, 7, 7, 7, 7, 7, 3, 3}));
  const KeyCounters counters = job.worker.key_counters(job.key);
  EXPECT_EQ(counters.own_rows, 5u);
  EXPECT_EQ(counters.touched_rows, 6u);
  EXPECT_EQ(counters.row_bytes_sent, (32u + 24) + (32u + 8) + (32u + 8));
}

TEST(WorkerRows, ThatComeTwiceLeaveOnceAndAddedUp) {
  RowsJob job;
  job.push({9, 1, 9, 9});
  Header header;
  job.receive(header);
  const ReceivedRows rows = job.receive(header);
  EXPECT_EQ(rows.ids, std::vector<int64_t>{9});
  float value;
  std::memcpy(&value, rows.row(0), sizeof value);
  EXPECT_EQ(value, 3);
}

TEST(WorkerRows, AreNotAskedForWhereNothingLands) {
  RowsJob job;
  job.push({4}, false);
  for (int i = 0; i < 2; ++i) {
    Header header;
    job.receive(header);
    EXPECT_EQ(header.part, 0);
    job.answer(header.slice, {}, 0, 1);
  }
  ASSERT_TRUE(job.results.wait_for(1));
  EXPECT_EQ(job.results.text(0), "");
  EXPECT_TRUE(job.changed.empty());
}

TEST(WorkerRows, WithStalenessGoOnWithoutAGradientAndSayWhichStepIsTheLast) {
  RowsJob job(/*staleness=*/1);
  for (bool goes_on : {true, false}) {
    job.worker.skip(job.key, job.landing.data(), 5, job.results.expect(0), false, goes_on);
    for (uint32_t partition : {0u, 1u}) {
      const Header header = job.server.must_receive();
      EXPECT_EQ(header.kind, FrameKind::kPushRows);
      EXPECT_EQ(header.part, 1);
      EXPECT_EQ(is_last_step(header), !goes_on);
      if (goes_on) {
        EXPECT_TRUE(ends_round(header, job.server.payload.data()));
      }
      job.answer(partition, {partition == 0 ? 1 : 8}, goes_on ? 2 : 3, 1, /*sums=*/!goes_on);
    }
    ASSERT_TRUE(job.results.wait_for(job.round));
    EXPECT_EQ(job.results.text(job.round - 1), "");
    EXPECT_EQ(job.results.updated(job.round - 1), goes_on);  // as all have taken their last step
    EXPECT_EQ(job.landing[1 * kRow], goes_on ? 2 : 3);
    EXPECT_EQ(job.landing[8 * kRow], goes_on ? 2 : 3);
    ++job.round;
  }
  EXPECT_EQ(std::count(job.landing.begin(), job.landing.end(), 7), 8 * kRow);
}

class WrongAnswer : public testing::Test {
 protected:
  // What the worker says of an answer to its push of row 1.
  template <typename Answer>
  std::string reason(Answer answer, bool lands = true, uint64_t staleness = 0) {
    RowsJob job(staleness);
    job.push({1}, lands);
    job.receive_push();
    answer(job);
    EXPECT_TRUE(job.results.wait_for(1));
    EXPECT_EQ(job.landing, std::vector<float>(10 * kRow, 7));
    return job.results.text(0);
  }
  static void expect_in(const std::string& part, const std::string& text) {
    EXPECT_NE(text.find("server 0 (there) sent a slice that is " + part + " (key 3, slice"), std::string::npos) << text;
  }
};

TEST_F(WrongAnswer, RowsOutsideThePartition) {
  expect_in("outside its partition", reason([](RowsJob& job) { job.answer(0, {5}, 1, 1); }));
  expect_in("outside its partition", reason([](RowsJob& job) { job.answer(1, {4, 5}, 1, 2); }));
}

TEST_F(WrongAnswer, FewerRowsThanWereTouched) {
  expect_in("not all that was touched", reason([](RowsJob& job) { job.answer(0, {}, 1, 2); }));
}

TEST_F(WrongAnswer, RowsThatNobodyAskedFor) {
  expect_in("not asked for", reason([](RowsJob& job) { job.answer(0, {1}, 1, 1); }, false));
}

TEST_F(WrongAnswer, SizesThatCannotBe) {
  for (size_t bytes : {1, 31, 1000})
    expect_in("wrongly sized", reason([bytes](RowsJob& job) { job.answer_bytes(0, std::vector<char>(bytes)); }));
  expect_in("empty, and not the last", reason([](RowsJob& job) { job.answer_bytes(0, std::vector<char>(32)); }));
}

TEST_F(WrongAnswer, WithStalenessThatNobodyGoesOnOrAnotherPlan) {
  expect_in("unexpected", reason([](RowsJob& job) { job.answer(0, {1}, 1, 1, true); }, true, 1));
  expect_in("naming another plan", reason(
                                       [](RowsJob& job) {
                                         RowsHeader rows;
                                         rows.last = 1;
                                         rows.next_plan = 4;
                                         std::vector<char> payload(sizeof rows);
                                         std::memcpy(payload.data(), &rows, sizeof rows);
                                         job.answer_bytes(0, payload);
                                       },
                                       true, 1));
}

TEST_F(WrongAnswer, FramesOfAnotherKind) {
  const std::vector<char> empty(32);
  expect_in("unexpected", reason([&](RowsJob& job) { job.answer_bytes(0, empty, 0, FrameKind::kValue); }));
  expect_in("unexpected", reason([&](RowsJob& job) { job.answer_bytes(0, empty, 2); }));
  expect_in("in another encoding than agreed", reason([](RowsJob& job) { job.answer_bytes(0, {}); }));
  expect_in("misplaced", reason([&](RowsJob& job) { job.answer_bytes(2, empty); }));
}

TEST_F(WrongAnswer, APartitionThatAnswersTwice) {
  expect_in("misplaced", reason([](RowsJob& job) {
              for (int i = 0; i < 2; ++i) job.answer(0, {}, 0, 0);
            }));
}

}  // namespace
}  // namespace p3
