// Keys of rows with staleness: each push updates its rows at once, waits for nobody who is near enough, and its answer
// tells the rows that have changed since the one before.
//
// With SGD and a learning rate of 1, worker w pushes -1 into rows that no other worker pushes. So each row counts how
// often its worker has touched it, and what a worker receives tells whose pushes are in it.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "server/rows_job.h"

namespace p3 {
namespace {

// As a worker holds it: the rows of the value.
using Copy = std::map<int64_t, float>;

struct StaleRowsJob : RowsJob {
  explicit StaleRowsJob(int num_workers, uint64_t staleness, ServerOptions with = options(), bool with_optimizer = true)
      : RowsJob(num_workers, with_optimizer, std::move(with), staleness) {
    fill(0);
  }

  // Into partition 0. `part` 1: this worker holds the whole value.
  void tick(int worker, uint64_t round, std::vector<int64_t> ids, uint8_t part = 1, bool as_blocks = false) {
    send_rows(FrameKind::kPushRows, worker, 0, round, filled(std::move(ids), -1), part, as_blocks);
  }
  // A round of partition 0 in which this worker has taken its last step.
  void leave(int worker, uint64_t round) {
    Header skip = header(FrameKind::kPushRows, 1, 0, round, 0);
    skip.part = 1;
    skip.priority = 5;
    peer(worker).send(skip);
  }

  // Takes over the answer to a push; returns the ids that it tells.
  std::vector<int64_t> land(int worker, uint64_t round, Copy& copy) {
    std::vector<int64_t> told;
    for (const ReceivedRows& frame : receive_rows(worker, 0, round)) {
      counts = frame.header;
      for (size_t i = 0; i < frame.ids.size(); ++i) copy[frame.ids[i]] = value_of(frame, i);
      told.insert(told.end(), frame.ids.begin(), frame.ids.end());
    }
    return told;
  }

  RowsHeader counts;  // of what landed last
};

class StaleRowsOfAnyBound : public testing::TestWithParam<uint64_t> {};

TEST_P(StaleRowsOfAnyBound, AreNeverStalerThanAllowedAndNoneIsForgottenInAnyOrder) {
  const uint64_t staleness = GetParam();
  constexpr int kWorkers = 4, kRows = 5;  // of partition 0, in frames of 3; rows 0 and 4 are worker 0's
  const unsigned seed = std::random_device()();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937 random(seed);
  StaleRowsJob job(kWorkers, staleness);
  std::vector<uint64_t> round(kWorkers, 0);
  std::vector<bool> waits(kWorkers, false);
  std::vector<Copy> copies(kWorkers);
  std::vector<std::vector<bool>> changed(kWorkers, std::vector<bool>(kRows, false));  // since a worker's last answer
  Copy value;
  for (int64_t row = 0; row < kRows; ++row) value[row] = 0;
  std::fill(copies.begin(), copies.end(), value);
  for (uint64_t step = 0; step < 400; ++step) {
    const int worker = any_free(waits, random);
    ASSERT_GE(worker, 0) << "all wait for each other";
    std::vector<int64_t> pushed;
    for (int64_t row = worker; row < kRows; row += kWorkers)
      if (random() % 2 == 0) pushed.push_back(row);
    for (int64_t row : pushed) {
      ++value[row];
      for (auto& rows : changed) rows[static_cast<size_t>(row)] = true;
    }
    job.tick(worker, ++round[static_cast<size_t>(worker)], pushed, 1, /*as_blocks=*/random() % 2 == 0);
    waits[static_cast<size_t>(worker)] = true;
    ASSERT_TRUE(job.has_updated(step + 1));
    const uint64_t slowest = *std::min_element(round.begin(), round.end());
    for (size_t each = 0; each < kWorkers; ++each) {
      if (!waits[each] || round[each] - slowest > staleness) continue;
      std::vector<int64_t> expected;
      for (size_t row = 0; row < kRows; ++row)
        if (changed[each][row]) expected.push_back(static_cast<int64_t>(row));
      ASSERT_EQ(job.land(static_cast<int>(each), round[each], copies[each]), expected) << "step " << step;
      ASSERT_EQ(copies[each], value) << "step " << step << ", worker " << each;
      ASSERT_EQ(job.counts.touched_rows, expected.size());
      changed[each].assign(kRows, false);
      waits[each] = false;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Rounds, StaleRowsOfAnyBound, testing::Values(1, 2, 5, kUnboundedStaleness));

TEST(StaleRows, APushCountsOnceItsLastFrameHasCome) {
  StaleRowsJob job(2, 1);
  Copy copy;
  for (uint64_t round : {1, 2}) job.tick(0, round, {0, 1, 2, 3});  // two frames each
  EXPECT_EQ(job.land(0, 1, copy).size(), 4u);
  const Rows rows = filled({0, 1, 2, 4}, -1);
  auto pieces = cut_rows(job.plan, partition_at(job.plan, 0), rows.ids.data(), 0, 4, false);
  ASSERT_EQ(pieces.size(), 2u);
  uint64_t received = job.server.counters().traffic.slices_received;
  for (const RowsPiece& piece : pieces) {
    std::vector<char> payload(piece.payload_bytes(kRow * sizeof(float)));
    write_rows(piece, rows.ids.data(), kRow * sizeof(float), payload.data(),
               [&](void* to, uint64_t i) { std::memcpy(to, &rows.values[i * kRow], kRow * sizeof(float)); });
    job.send_payload(FrameKind::kPushRows, 1, 0, 1, 1, payload);
    ASSERT_TRUE(job.has_received(++received));
    // The answer to round 2 has not left by then, though what has come is in the value.
    if (piece.header.last == 0) {
      EXPECT_EQ(job.fetch_row(0, 2, 0), 3);
    }
  }
  job.land(0, 2, copy);
  EXPECT_EQ(copy, (Copy{{0, 3}, {1, 3}, {2, 3}, {3, 2}, {4, 1}}));
  job.land(1, 1, copy);
  EXPECT_EQ(job.counts.pushed_rows, 4u);
}

TEST(StaleRows, WhoWantsNoneIsToldNoneAndAsksForWhatTheyAreNow) {
  StaleRowsJob job(2, kUnboundedStaleness);
  Copy copy;
  job.tick(0, 1, {1, 3}, 0);
  EXPECT_TRUE(job.land(0, 1, copy).empty());
  EXPECT_EQ(job.counts.pushed_rows, 2u);
  EXPECT_EQ(job.counts.touched_rows, 2u);
  for (uint64_t round : {1, 2}) {
    job.tick(1, round, {2}, 1);
    job.land(1, round, copy);
  }
  EXPECT_EQ(copy, (Copy{{1, 1}, {2, 2}, {3, 1}}));
  EXPECT_EQ(job.fetch_row(0, 1, 2), 2);
  EXPECT_EQ(job.fetch_row(0, 1, 3), 1);
}

TEST(StaleRows, WhoBeginsLateGetsWhatChangedBefore) {
  StaleRowsJob job(2, kUnboundedStaleness);
  Copy first, second;
  for (uint64_t round : {1, 2}) {
    job.tick(0, round, {static_cast<int64_t>(round)});
    job.land(0, round, first);
  }
  job.tick(1, 1, {});
  EXPECT_EQ(job.land(1, 1, second), (std::vector<int64_t>{1, 2}));
  EXPECT_EQ(second, first);
}

TEST(StaleRows, ASkipHoldsUpNobodyAndTheLastOneEndsWithTheSameRowsForAll) {
  StaleRowsJob job(3, 1);
  std::vector<Copy> copies(3);
  job.leave(2, 1);
  for (uint64_t round : {1, 2, 3}) {
    for (int worker : {0, 1}) job.tick(worker, round, {worker});
    for (int worker : {0, 1}) job.land(worker, round, copies[static_cast<size_t>(worker)]);
    job.land(2, round, copies[2]);  // only once both have come as far
    EXPECT_EQ(copies[2], (Copy{{0, static_cast<float>(round)}, {1, static_cast<float>(round)}}));
    EXPECT_FALSE(job.has_part);
    job.leave(2, round + 1);
  }
  for (int worker : {0, 1}) job.leave(worker, 4);
  for (int worker : {0, 1, 2}) {
    Copy& copy = copies[static_cast<size_t>(worker)];
    job.land(worker, 4, copy);
    EXPECT_TRUE(job.has_part);  // nobody goes on
    EXPECT_EQ(copy, (Copy{{0, 3}, {1, 3}}));
  }
}

TEST(StaleRows, ARoundWithoutRowsIsOneAllTheSame) {
  StaleRowsJob job(2, 1);
  Copy copy;
  for (uint64_t round : {1, 2, 3}) {
    job.tick(1, round, {});
    job.land(1, round, copy);
    job.tick(0, round, {0});
    job.land(0, round, copy);
    EXPECT_EQ(copy[0], static_cast<float>(round));
  }
}

TEST(StaleRows, HalfPrecisionIsUpdatedInFullPrecision) {
  RowsJob job(1, false, options(), 1);
  job.server.set_optimizer(1, {"sgd", {{"multi_precision", 1}}});
  KeyPlan plan = job.plan;
  plan.wire_key = 2;
  plan.dtype = DType::kFloat16;
  plan.partitions = 1;
  plan.elements = 1 * kRow;
  job.server.define(plan, "half", 1);
  RowsHeader one;
  one.rows = one.last = 1;
  const auto send = [&](FrameKind kind, uint64_t round, float value) {
    std::vector<char> payload(sizeof one + kRow * sizeof(half));
    std::memcpy(payload.data(), &one, sizeof one);
    for (size_t i = 0; i < kRow; ++i) {
      const half bits = float_to_half(value);
      std::memcpy(payload.data() + sizeof one + i * sizeof bits, &bits, sizeof bits);
    }
    Header made = Job::header(kind, 2, 0, round, 1);
    made.dtype = static_cast<uint8_t>(DType::kFloat16);
    made.payload_bytes = static_cast<uint32_t>(payload.size());
    made.part = kind == FrameKind::kPushRows;
    made.scalars.lr = 1;
    job.peer(0).send(made, payload.data());
    job.peer(0).must_receive();
    const std::vector<char>& answer = job.peer(0).payload;
    half last{};
    if (!answer.empty()) std::memcpy(&last, answer.data() + answer.size() - sizeof last, sizeof last);
    return half_to_float(last);
  };
  send(FrameKind::kStoreRows, 0, 2048);
  Header init = Job::header(FrameKind::kInit, 2, 0, 0, 0);
  init.dtype = static_cast<uint8_t>(DType::kFloat16);
  job.peer(0).send(init);
  job.peer(0).must_receive();
  EXPECT_EQ(send(FrameKind::kPushRows, 1, -0.5f), 2048);  // 2048.5 rounded
  EXPECT_EQ(send(FrameKind::kPushRows, 2, -0.5f), 2048);  // 2049 to even
  EXPECT_EQ(send(FrameKind::kPushRows, 3, -0.5f), 2050);  // 2049.5
}

// Between the two frames of one push comes another worker's: each push is one update, in all of its frames.
TEST(StaleRows, APushIsOneUpdateInAllItsFrames) {
  RowsJob job(2, /*with_optimizer=*/false, options(), kUnboundedStaleness);
  const OptimizerSpec adagrad{"torch_adagrad", {{"epsilon", 0}}};  // whose learning rate decays with each update
  job.server.set_optimizer(0, adagrad);
  job.fill(0);
  uint64_t received = job.server.counters().traffic.slices_received;
  const auto send = [&](int worker, const RowsPiece& piece, const Rows& rows) {
    std::vector<char> payload(piece.payload_bytes(kRow * sizeof(float)));
    write_rows(piece, rows.ids.data(), kRow * sizeof(float), payload.data(),
               [&](void* to, uint64_t i) { std::memcpy(to, &rows.values[i * kRow], kRow * sizeof(float)); });
    Header made = Job::header(FrameKind::kPushRows, 1, 0, 1, 1);
    made.payload_bytes = static_cast<uint32_t>(payload.size());
    made.part = 1;
    made.scalars = {/*lr=*/1, 0, 1, 0, /*lr_decay=*/1};
    job.peer(worker).send(made, payload.data());
    ASSERT_TRUE(job.has_received(++received));
  };
  const Rows rows = filled({0, 1, 2, 3}, -1), other = filled({4}, -1);
  const auto pieces = cut_rows(job.plan, partition_at(job.plan, 0), rows.ids.data(), 0, 4, false);
  ASSERT_EQ(pieces.size(), 2u);
  send(0, pieces[0], rows);
  send(1, cut_rows(job.plan, partition_at(job.plan, 0), other.ids.data(), 0, 1, false)[0], other);
  const Header first = job.peer(1).must_receive();
  EXPECT_EQ(first.scalars.updates, 2);
  EXPECT_EQ(least_clock(first), 0u);  // worker 0's push is not whole
  send(0, pieces[1], rows);
  const Header second = job.peer(0).must_receive();
  EXPECT_EQ(second.scalars.updates, 2);
  EXPECT_EQ(least_clock(second), 1u);
  job.peer(0).must_receive();  // rows 3 and 4
  EXPECT_EQ(job.fetch_row(0, 1, 0), 1);
  EXPECT_EQ(job.fetch_row(0, 1, 3), 1);     // of the first update, though it came behind the second
  EXPECT_EQ(job.fetch_row(0, 1, 4), 0.5f);  // 1 / (1 + 1)
  // Without a gradient there is no update; of no rows here there is.
  for (const double marked : {kNoUpdate, 0.0}) {
    RowsHeader none;
    none.first_row = partition_at(job.plan, 0).first;
    none.last = 1;
    Header made = Job::header(FrameKind::kPushRows, 1, 0, marked == kNoUpdate ? 2 : 3, 1);
    made.payload_bytes = sizeof none;
    made.part = 1;
    made.scalars.updates = marked;
    job.peer(0).send(made, &none);
    EXPECT_EQ(job.peer(0).must_receive().scalars.updates, marked == kNoUpdate ? 2 : 3);
  }
}

// Rank 0's new rows, frame by frame: what others push from before them is not in them, whenever it comes.
TEST(StaleRows, ANewValueIsFreeOfPushesFromBeforeIt) {
  StaleRowsJob job(2, kUnboundedStaleness);
  Copy copy;
  const auto store = [&](std::vector<int64_t> ids) {
    const Rows rows = filled(std::move(ids), 100);
    const auto pieces = cut_rows(job.plan, partition_at(job.plan, 0), rows.ids.data(), 0, rows.ids.size(), false);
    ASSERT_EQ(pieces.size(), 1u);
    std::vector<char> payload(pieces[0].payload_bytes(kRow * sizeof(float)));
    write_rows(pieces[0], rows.ids.data(), kRow * sizeof(float), payload.data(),
               [&](void* to, uint64_t i) { std::memcpy(to, &rows.values[i * kRow], kRow * sizeof(float)); });
    Header made = Job::header(FrameKind::kStoreRows, 1, 0, 0, 0);
    made.encoding = 0;
    made.payload_bytes = static_cast<uint32_t>(payload.size());
    made.scalars.updates = 1;  // of an init
    job.peer(0).send(made, payload.data());
    EXPECT_EQ(job.peer(0).must_receive().kind, FrameKind::kPart);
  };
  store({0, 1});
  job.tick(1, 1, {0, 4});
  job.land(1, 1, copy);
  store({2, 3, 4});
  job.tick(1, 2, {0, 4});
  job.land(1, 2, copy);
  job.init(0, 1, 0);
  EXPECT_EQ(job.peer(0).must_receive().kind, FrameKind::kValue);
  job.tick(1, 3, {0, 4});
  job.land(1, 3, copy);
  EXPECT_EQ(copy[0], 100);
  EXPECT_EQ(copy[4], 100);
  job.init(1, 1, 3);
  EXPECT_EQ(job.peer(1).must_receive().kind, FrameKind::kValue);
  job.tick(1, 4, {0, 4});
  job.land(1, 4, copy);
  EXPECT_EQ(copy[0], 101);
  EXPECT_EQ(copy[4], 101);
}

TEST(StaleRows, AveragesOverAllWorkers) {
  RowsJob job(2, true, options(), /*staleness=*/3, /*average=*/true);
  job.fill(10);
  job.send_rows(FrameKind::kPushRows, 0, 0, 1, filled({1}, 4), 1);
  EXPECT_EQ(job.value_of(job.receive_rows(0, 0, 1).front(), 0), 8);
}

TEST(StaleRows, TheirCopiesAreReturned) {
  StaleRowsJob job(2, 1);
  Copy copy;
  for (uint64_t round = 1; round <= 20; ++round) {
    for (int worker : {0, 1}) job.tick(worker, round, {0, 1, 2, 3, 4});
    for (int worker : {0, 1}) job.land(worker, round, copy);
  }
  EXPECT_TRUE(eventually([&] { return job.server.counters().buffer_bytes == 0; }));
  EXPECT_LT(job.server.counters().peak_buffer_bytes, 4096u);
}

// --- what is refused -----------------------------------------------------------------------------------------------

void expect_in(const std::string& part, const std::string& text) {
  EXPECT_NE(text.find(part), std::string::npos) << text;
}

TEST(StaleRows, RefuseAPushWithoutAnOptimizer) {
  RowsJob job(1, /*with_optimizer=*/false, options(), 1);
  job.fill(0);
  job.send_rows(FrameKind::kPushRows, 0, 0, 1, filled({1}, 1), 1);
  expect_in("have no optimizer", job.failure());
}

TEST(StaleRows, ASkipNeedsNoOptimizer) {
  StaleRowsJob job(1, 1, options(), /*with_optimizer=*/false);
  Copy copy;
  job.leave(0, 1);
  job.land(0, 1, copy);
  EXPECT_TRUE(job.has_part);
  EXPECT_EQ(copy, Copy());
}

TEST(StaleRows, RefuseASecondPushBeforeTheFirstIsAnswered) {
  StaleRowsJob job(2, 1);
  Copy copy;
  for (uint64_t round : {1, 2}) job.tick(0, round, {0});
  job.land(0, 1, copy);
  job.tick(0, 3, {0});  // round 2 waits for worker 1
  expect_in("before its last push was answered", job.failure());
}

TEST(StaleRows, RefuseToTellWhoWantedNoneOfWhatHasChanged) {
  StaleRowsJob job(1, 1);
  Copy copy;
  job.tick(0, 1, {0}, 0);
  job.land(0, 1, copy);
  job.tick(0, 2, {0}, 1);
  expect_in("asking for rows after one that wanted none", job.failure());
}

TEST(StaleRows, KeepTheirPlan) {
  StaleRowsJob job(1, 1);
  KeyPlan successor = job.plan;
  successor.wire_key = 2;
  successor.partitions = 1;
  EXPECT_THROW(job.server.define_successor(successor, 1), Error);
  successor.staleness = 0;
  EXPECT_THROW(job.server.define_successor(successor, 1), Error);
  RowsHeader rows;
  rows.last = 1;
  rows.next_plan = 2;
  std::vector<char> payload(sizeof rows);
  std::memcpy(payload.data(), &rows, sizeof rows);
  job.send_payload(FrameKind::kPushRows, 0, 0, 1, 1, payload);
  expect_in("naming another plan, which keys with staleness never have", job.failure());
}

TEST(StaleRows, AWorkerThatLeavesWhileOthersWaitForItFailsTheJob) {
  StaleRowsJob job(2, 1);
  Copy copy;
  uint64_t received = job.server.counters().traffic.slices_received;
  for (uint64_t round : {1, 2}) job.tick(0, round, {0});
  job.land(0, 1, copy);
  ASSERT_TRUE(job.has_received(received + 2));
  Header bye;
  bye.kind = FrameKind::kBye;
  job.peer(1).send(bye);
  expect_in("worker 1 (there) ended, but others still push round 1 of key 'emb'", job.failure());
}

}  // namespace
}  // namespace p3
