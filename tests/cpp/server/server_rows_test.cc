// Partitions on a server whose workers are played by the test: byte by byte what it accepts, refuses and answers.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "server/rows_job.h"

namespace p3 {
namespace {

TEST(ServerRows, AreUpdatedOnceEveryWorkersHaveComeAndGoToThoseWhoWantThem) {
  RowsJob job(2);
  job.fill(10);
  job.send_rows(FrameKind::kPushRows, 1, 1, 1, filled({5, 7}, 1), 0);
  job.send_rows(FrameKind::kPushRows, 0, 1, 1, filled({5, 6, 8, 9}, 2), 1);
  const auto frames = job.receive_rows(0, 1, 1);
  ASSERT_EQ(frames.size(), 2u);
  EXPECT_FALSE(job.has_part);
  EXPECT_EQ(frames[0].ids, (std::vector<int64_t>{5, 6, 7}));
  EXPECT_EQ(frames[1].ids, (std::vector<int64_t>{8, 9}));
  EXPECT_EQ(job.value_of(frames[0], 0), 7);
  EXPECT_EQ(job.value_of(frames[0], 1), 8);
  EXPECT_EQ(job.value_of(frames[0], 2), 9);
  for (const ReceivedRows& frame : frames) {
    EXPECT_EQ(frame.header.pushed_rows, 6u);
    EXPECT_EQ(frame.header.touched_rows, 5u);
  }
  const auto acknowledged = job.receive_rows(1, 1, 1);
  ASSERT_EQ(acknowledged.size(), 1u);
  EXPECT_EQ(acknowledged[0].header.rows, 0u);
  EXPECT_EQ(acknowledged[0].header.touched_rows, 5u);
}

TEST(ServerRows, AreAnsweredInTheCodingOfRank0) {
  for (bool as_blocks : {false, true}) {
    RowsJob job(2);
    job.fill(10);
    job.send_rows(FrameKind::kPushRows, 0, 0, 1, filled({1, 3}, 1), 1, as_blocks);
    job.send_rows(FrameKind::kPushRows, 1, 0, 1, filled({3}, 1), 1, !as_blocks);
    for (int worker : {0, 1}) {
      const auto frames = job.receive_rows(worker, 0, 1);
      EXPECT_EQ(frames.size(), as_blocks ? 2u : 1u);
      std::vector<int64_t> ids;
      for (const ReceivedRows& frame : frames) {
        EXPECT_EQ(frame.header.coding == IdCoding::kBitmap, as_blocks);
        ids.insert(ids.end(), frame.ids.begin(), frame.ids.end());
      }
      EXPECT_EQ(ids, (std::vector<int64_t>{1, 3}));
      EXPECT_EQ(job.value_of(frames.back(), frames.back().ids.size() - 1), 8);
    }
  }
}

TEST(ServerRows, AreSummedByRankWhateverComesFirst) {
  // The order of addition shows in these sums.
  const float gradients[3] = {1e8f, -1e8f, 1};
  for (int threads : {0, 2}) {
    RowsJob job(3, false, options(SumOrder::kRank, threads));
    job.fill(0);
    uint64_t received = job.server.counters().traffic.slices_received;
    for (int worker : {2, 0, 1}) {
      job.send_rows(FrameKind::kPushRows, worker, 0, 1, filled({0, 4}, gradients[worker]), 1);
      ASSERT_TRUE(job.has_received(++received));
    }
    const auto frames = job.receive_rows(2, 0, 1);
    EXPECT_TRUE(job.has_part);
    EXPECT_EQ(job.value_of(frames[0], 0), 1e8f + -1e8f + 1);
  }
}

TEST(ServerRows, OfNobodyAreAbsent) {
  RowsJob job(2);
  job.fill(1);
  for (RawPeer& worker : job.workers) {
    Header skip = Job::header(FrameKind::kPushRows, 1, 0, 1, 0);
    skip.part = 1;
    worker.send(skip);
  }
  const Header answer = job.peer(1).must_receive();
  EXPECT_EQ(answer.kind, FrameKind::kRows);
  EXPECT_EQ(static_cast<Encoding>(answer.encoding), Encoding::kAbsent);
}

TEST(ServerRows, AreFetchedAsTheyAreAfterTheRound) {
  RowsJob job(1);
  job.fill(3);
  job.send_rows(FrameKind::kPushRows, 0, 0, 1, filled({2}, 1), 0);
  job.receive_rows(0, 0, 1);
  const std::vector<int64_t> ids = {1, 2};
  const RowsPiece piece = cut_rows(job.plan, partition_at(job.plan, 0), ids.data(), 0, 2, false)[0];
  std::vector<char> request(piece.payload_bytes(0));
  write_ids(piece, ids.data(), request.data());
  job.send_payload(FrameKind::kFetchRows, 0, 0, 1, 0, request);
  const Header answer = job.peer(0).must_receive();
  EXPECT_EQ(answer.kind, FrameKind::kPart);
  std::vector<float> values(4);
  ASSERT_EQ(job.peer(0).payload.size(), sizeof(float) * 4);
  std::memcpy(values.data(), job.peer(0).payload.data(), sizeof(float) * 4);
  EXPECT_EQ(values, (std::vector<float>{3, 3, 2, 2}));
}

TEST(ServerRows, BuffersComeBackWhenWhatTheyCarryHasLeft) {
  RowsJob job(2);
  job.fill(3);
  for (uint64_t round = 1; round <= 20; ++round) {
    for (int worker : {1, 0}) job.send_rows(FrameKind::kPushRows, worker, 0, round, filled({0, 2, 3, 4}, 1), 1);
    for (int worker : {0, 1}) job.receive_rows(worker, 0, round);
  }
  EXPECT_TRUE(eventually([&] { return job.server.counters().buffer_bytes == 0; }));
  EXPECT_LT(job.server.counters().peak_buffer_bytes, 4096u);
}

// --- what is refused -----------------------------------------------------------------------------------------------

// Key 1's partition 0 has rows 0 to 4, in frames of 3.
TEST(OutlivingServerOfRows, ForgetsRowsOfAPushThatNeverBecameWhole) {
  for (SumOrder order : {SumOrder::kRank, SumOrder::kArrival})
    for (int threads : {0, 2}) {
      ServerOptions with = options(order, threads);
      with.local_aggregation = false;
      with.outlives_workers = true;
      RowsJob job(2, /*with_optimizer=*/false, with);
      job.fill(0);
      RowsHeader header;  // not the last one
      header.rows = 1;
      std::vector<char> payload(sizeof header + kRow * sizeof(float), 0x42);
      std::memcpy(payload.data(), &header, sizeof header);
      job.send_payload(FrameKind::kPushRows, 0, 0, 1, 1, payload);
      job.send_rows(FrameKind::kPushRows, 0, 1, 1, filled({7}, 3), 1);  // and this one is whole
      ASSERT_TRUE(job.has_received(10));  // 4 frames of first values, 4 requests, and these
      job.server.dismiss_worker(0);
      for (uint32_t partition : {0u, 1u}) {
        job.send_rows(FrameKind::kPushRows, 1, partition, 1, filled({partition == 0 ? 0 : 7}, 5), 1);
        const Header got = job.peer(1).must_receive();
        ASSERT_EQ(got.kind, FrameKind::kRows);
        uint64_t next_row = 0;
        ReceivedRows rows;
        const std::vector<char> sum = job.peer(1).payload;
        ASSERT_EQ(read_rows(job.plan, partition_at(job.plan, partition), kRow * sizeof(float), sum.data(), sum.size(),
                            next_row, rows),
                  nullptr);
        EXPECT_EQ(RowsJob::value_of(rows, 0), partition == 0 ? 5 : 8);
      }
      EXPECT_EQ(job.server.admit_worker(0), "");
      const auto [ours, its] = unix_pair();
      job.workers[0] = RawPeer(ours);
      job.server.connect_worker(0, stream_of(its));
      for (uint32_t partition : {0u, 1u}) {
        job.peer(0).send(Job::header(FrameKind::kInit, 1, partition, 0, 0));
        const Header answer = job.peer(0).must_receive();
        EXPECT_EQ(answer.kind, FrameKind::kValue);
        EXPECT_EQ(answer.round, 1u);
      }
    }
}

struct Refused : testing::Test {
  // What the server says of frames that worker 0 sends after `fill`.
  template <typename Send>
  std::string reason(Send send, bool with_optimizer = true) {
    RowsJob job(2, with_optimizer);
    job.fill(1);
    send(job);
    return job.failure();
  }
  static void expect_in(const std::string& part, const std::string& text) {
    EXPECT_NE(text.find(part), std::string::npos) << text;
  }
  static Rows one(int64_t id) { return filled({id}, 1); }
};

TEST_F(Refused, FramesOutOfTurn) {
  expect_in("out of turn (key 'emb', slice 0, round 2)",
            reason([](RowsJob& job) { job.send_rows(FrameKind::kPushRows, 0, 0, 2, one(1), 1); }));
  expect_in("out of turn (key 'emb', slice 0, round 1)", reason([](RowsJob& job) {
              for (int i = 0; i < 2; ++i) job.send_rows(FrameKind::kPushRows, 0, 0, 1, one(1), 1);
            }));
  expect_in("out of turn", reason([](RowsJob& job) { job.send_rows(FrameKind::kStoreRows, 0, 0, 1, one(1), 0); }));
}

TEST_F(Refused, RowsOfOtherPartitionsAndPartsThatAreNot) {
  expect_in("of no key, or of another server's",
            reason([](RowsJob& job) { job.send_payload(FrameKind::kPushRows, 0, 2, 1, 1, std::vector<char>(40)); }));
  expect_in("malformed", reason([](RowsJob& job) { job.send_rows(FrameKind::kPushRows, 0, 0, 1, one(1), 2); }));
  expect_in("a state that its key's optimizer does not have",
            reason([](RowsJob& job) { job.send_rows(FrameKind::kStoreRows, 0, 0, 0, one(1), 1); }));
  expect_in("unexpected", reason([](RowsJob& job) { job.push(0, 1, 1, {1, 2}); }));
}

TEST_F(Refused, PayloadsThatTheirHeadersContradict) {
  for (size_t bytes : {1, 31, 4096})
    expect_in("of another size than agreed", reason([bytes](RowsJob& job) {
                job.send_payload(FrameKind::kPushRows, 0, 0, 1, 1, std::vector<char>(bytes));
              }));
  const auto with_header = [this](RowsHeader header, FrameKind kind = FrameKind::kPushRows) {
    return reason([header, kind](RowsJob& job) {
      std::vector<char> payload(sizeof header + 8);
      std::memcpy(payload.data(), &header, sizeof header);
      job.send_payload(kind, 0, 0, kind == FrameKind::kPushRows, kind == FrameKind::kPushRows, payload);
    });
  };
  RowsHeader header;
  header.rows = 1;
  header.last = 1;
  header.first_row = 5;  // partition 1's
  expect_in("outside its partition (key 'emb', slice 0, round 1)", with_header(header));
  expect_in("outside its partition", with_header(header, FrameKind::kStoreRows));
  header.first_row = 0;
  header.rows = 2;
  expect_in("of another size than its header says", with_header(header));
  expect_in("of another size than its header says", with_header(header, FrameKind::kFetchRows));
}

TEST_F(Refused, RowsThatComeTwiceInOneRound) {
  expect_in("out of order (key 'emb', slice 0, round 1)", reason([](RowsJob& job) {
              RowsHeader header;
              header.first_row = 2;
              header.rows = 1;
              std::vector<char> payload(sizeof header + kRow * sizeof(float));
              std::memcpy(payload.data(), &header, sizeof header);
              for (int i = 0; i < 2; ++i) job.send_payload(FrameKind::kPushRows, 0, 0, 1, 1, payload);
            }));
}

TEST_F(Refused, APlanThatTheKeyDoesNotHave) {
  for (uint32_t plan : {1, 77}) {  // its own, and none
    expect_in("naming a plan that the key does not have (key 'emb', slice 0, round 1)", reason([=](RowsJob& job) {
                RowsHeader rows;
                rows.last = 1;
                rows.next_plan = plan;
                std::vector<char> payload(sizeof rows);
                std::memcpy(payload.data(), &rows, sizeof rows);
                job.send_payload(FrameKind::kPushRows, 0, 0, 1, 1, payload);
              }));
  }
}

TEST_F(Refused, AFetchOfWhatWasNeverStored) {
  RowsJob job(2);
  job.peer(1).send(Job::header(FrameKind::kInit, 1, 0, 0, 0));
  RowsHeader header;
  header.last = 1;
  std::vector<char> payload(sizeof header);
  std::memcpy(payload.data(), &header, sizeof header);
  job.send_payload(FrameKind::kFetchRows, 1, 0, 0, 0, payload);
  expect_in("worker 1 (there) sent a slice that is out of turn", job.failure());
}

TEST_F(Refused, ScalarsThatDiffer) {
  const std::string text = reason([](RowsJob& job) {
    RowsHeader header;
    header.last = 1;
    std::vector<char> payload(sizeof header);
    std::memcpy(payload.data(), &header, sizeof header);
    for (int worker : {0, 1}) job.send_payload(FrameKind::kPushRows, worker, 0, 1, 1, payload, 0.5 + worker);
  });
  expect_in("worker 0 (there) (lr 0.5", text);
  expect_in("disagree in round 1 of key 'emb'", text);
}

TEST_F(Refused, ToWaitForAWorkerThatLeft) {
  const std::string text = reason([](RowsJob& job) {
    job.send_rows(FrameKind::kPushRows, 0, 0, 1, one(1), 1);
    Header bye;
    bye.kind = FrameKind::kBye;
    job.peer(1).send(bye);
  });
  expect_in("worker 1 (there) ended, but others still push round 1 of key 'emb'", text);
}

}  // namespace
}  // namespace p3
