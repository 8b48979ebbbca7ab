// What a server copies for a snapshot: value and state of exactly one round, and who may ask for it.
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include "base/half.h"
#include "p3/captured.h"
#include "plan/rows.h"
#include "server/server_job.h"
#include "transport/encoded.h"

namespace p3 {
namespace {

OptimizerSpec momentum(bool multi_precision = false) {
  return {"sgd", {{"momentum", 0.5}, {"multi_precision", multi_precision}}};
}

std::vector<float> floats(const CapturedArray& array) {
  EXPECT_EQ(array.dtype, DType::kFloat32);
  std::vector<float> content(array.elements);
  std::memcpy(content.data(), array.data.get(), array.bytes());
  return content;
}

struct CaptureJob : Job {
  using Job::Job;
  virtual ~CaptureJob() = default;

  static Header request(uint32_t key, uint32_t slice, uint64_t round, DType dtype = DType::kFloat32,
                        uint64_t snapshot = 0) {
    Header made = header(FrameKind::kCapture, key, slice, round, 0);
    made.dtype = static_cast<uint8_t>(dtype);
    made.scalars.updates = static_cast<double>(snapshot);
    return made;
  }

  void capture(uint32_t key, uint32_t slice, uint64_t round, DType dtype = DType::kFloat32, uint64_t snapshot = 0) {
    workers[0].send(request(key, slice, round, dtype, snapshot));
    const Header answer = workers[0].must_receive();
    EXPECT_EQ(answer.kind, FrameKind::kPart);
    EXPECT_EQ(answer.encoding, static_cast<uint8_t>(Encoding::kAbsent));
    EXPECT_EQ(answer.key, key);
    EXPECT_EQ(answer.slice, slice);
    EXPECT_EQ(answer.round, round);
  }

  // Of the arrays taken: "key.slice.part".
  static std::vector<std::string> places(const std::vector<CapturedArray>& arrays) {
    std::vector<std::string> names;
    for (const CapturedArray& each : arrays)
      names.push_back(std::to_string(each.wire_key) + "." + std::to_string(each.slice) + "." +
                      std::to_string(each.part));
    return names;
  }
};

class ServerCapture : public testing::TestWithParam<int> {
 protected:
  static ServerOptions with(SumOrder order = SumOrder::kRank) { return options(order, GetParam()); }
};

TEST_P(ServerCapture, HasValueAndStateOfTheLastRoundThoughOthersPushedTheNext) {
  for (SumOrder order : {SumOrder::kRank, SumOrder::kArrival}) {
    CaptureJob job(3, with(order));
    job.server.set_optimizer(0, momentum());
    job.define(1, 2);
    job.initialise(1, {10, 20});
    for (int worker : {0, 1, 2}) job.push(worker, 1, 1, {1, 2}, 0, 0, 1.0);
    for (int worker : {0, 1, 2}) EXPECT_EQ(job.receive_value(worker), (std::vector<float>{7, 14}));
    for (int worker : {2, 1}) job.push(worker, 1, 2, {100, 100}, 0, 9, 1.0);
    ASSERT_TRUE(job.has_received(8));
    job.capture(1, 0, 1);

    auto arrays = job.server.take_captured(0);
    ASSERT_EQ(CaptureJob::places(arrays), (std::vector<std::string>{"1.0.0", "1.0.1"}));
    EXPECT_EQ(floats(arrays[0]), (std::vector<float>{7, 14}));
    EXPECT_EQ(floats(arrays[1]), (std::vector<float>{-3, -6}));
    EXPECT_TRUE(job.server.take_captured(0).empty());

    job.push(0, 1, 2, {0, 0}, 0, 0, 1.0);
    for (int worker : {0, 1, 2}) job.receive_value(worker);
    EXPECT_EQ(floats(arrays[0]), (std::vector<float>{7, 14}));  // a copy
  }
}

TEST_P(ServerCapture, OfSeveralSlicesIsOrderedAndACopyReplacesTheFormerOne) {
  CaptureJob job(1, with());
  job.define(1, kSlice + 1);
  job.define(2, 1);
  job.initialise(2, {5});
  job.initialise(1, std::vector<float>(kSlice, 1));
  job.initialise(1, {2}, 1);
  for (uint32_t slice : {1u, 0u}) job.capture(1, slice, 0);
  job.capture(2, 0, 0);
  job.push(0, 2, 1, {6});
  job.receive_value(0);
  job.capture(2, 0, 1);
  const auto arrays = job.server.take_captured(0);
  ASSERT_EQ(CaptureJob::places(arrays), (std::vector<std::string>{"1.0.0", "1.1.0", "2.0.0"}));
  EXPECT_EQ(floats(arrays[0]), std::vector<float>(kSlice, 1));
  EXPECT_EQ(floats(arrays[1]), std::vector<float>{2});
  EXPECT_EQ(floats(arrays[2]), std::vector<float>{6});
}

// The word to write a snapshot that was given up may come while the copies of the next one do.
TEST_P(ServerCapture, OfOneSnapshotIsNeverTakenForAnother) {
  CaptureJob job(1, with());
  for (uint32_t key : {1u, 2u, 3u}) {
    job.define(key, 1);
    job.initialise(key, {static_cast<float>(key)});
  }
  for (uint32_t key : {1u, 2u}) job.capture(key, 0, 0, DType::kFloat32, 99999);
  job.push(0, 1, 1, {6});
  job.receive_value(0);
  job.capture(1, 0, 1, DType::kFloat32, 100000);
  const auto given_up = job.server.take_captured(99999);
  EXPECT_EQ(CaptureJob::places(given_up), std::vector<std::string>{"2.0.0"});
  job.capture(2, 0, 0, DType::kFloat32, 100000);
  const auto arrays = job.server.take_captured(100000);
  ASSERT_EQ(CaptureJob::places(arrays), (std::vector<std::string>{"1.0.0", "2.0.0"}));
  EXPECT_EQ(floats(arrays[0]), std::vector<float>{6});

  job.capture(3, 0, 0, DType::kFloat32, 100001);
  EXPECT_TRUE(job.server.take_captured(100002).empty());
  EXPECT_TRUE(job.server.take_captured(100001).empty());  // nothing is left of what nobody has asked for
}

TEST_P(ServerCapture, BeforeTheFirstPushIsTheValueAlone) {
  CaptureJob job(1, with());
  job.server.set_optimizer(0, momentum());
  job.define(1, 1);
  job.initialise(1, {3});
  job.capture(1, 0, 0);
  EXPECT_EQ(CaptureJob::places(job.server.take_captured(0)), std::vector<std::string>{"1.0.0"});
}

TEST_P(ServerCapture, OfFloat16HasAFloat32MasterAndState) {
  CaptureJob job(1, with());
  job.server.set_optimizer(0, momentum(true));
  job.define(1, 1, DType::kFloat16);
  job.exchange_half(FrameKind::kInit, 0, 3);
  job.exchange_half(FrameKind::kPush, 1, 1);
  job.capture(1, 0, 1, DType::kFloat16);
  const auto arrays = job.server.take_captured(0);
  ASSERT_EQ(CaptureJob::places(arrays), (std::vector<std::string>{"1.0.0", "1.0.1", "1.0.255"}));
  EXPECT_EQ(arrays[0].dtype, DType::kFloat16);
  half value;
  std::memcpy(&value, arrays[0].data.get(), sizeof value);
  EXPECT_EQ(half_to_float(value), 2);
  EXPECT_EQ(floats(arrays[1]), std::vector<float>{-1});
  EXPECT_EQ(floats(arrays[2]), std::vector<float>{2});
}

TEST_P(ServerCapture, OfSumsThatTravelAsFloat16IsWhatTheWorkersGot) {
  CaptureJob job(1, with());
  job.set_codec({Encoding::kFloat16, 0});
  job.define(1, 3);
  job.initialise(1, {9, 9, 9});
  Header push = Job::header(FrameKind::kPush, 1, 0, 1, 3);
  push.encoding = static_cast<uint8_t>(Encoding::kFloat16);
  const std::vector<char> gradient = encoded(Encoding::kFloat16, {1.5f, -2, 65504});
  push.payload_bytes = static_cast<uint32_t>(gradient.size());
  job.workers[0].send(push, gradient.data());
  EXPECT_EQ(job.workers[0].must_receive().encoding, static_cast<uint8_t>(Encoding::kFloat16));
  job.capture(1, 0, 1);
  const auto arrays = job.server.take_captured(0);
  ASSERT_EQ(arrays.size(), 1u);
  EXPECT_EQ(floats(arrays[0]), (std::vector<float>{1.5f, -2, 65504}));
}

// A round that all skip leaves the sum where it was, and as it was.
TEST_P(ServerCapture, OfSumsThatTravelAsFloat16StaysAfterARoundThatAllSkip) {
  CaptureJob job(2, with());
  job.set_codec({Encoding::kFloat16, 0});
  job.define(1, 3);
  job.initialise(1, {9, 9, 9});
  Header push = Job::header(FrameKind::kPush, 1, 0, 1, 3);
  push.encoding = static_cast<uint8_t>(Encoding::kFloat16);
  const std::vector<char> gradient = encoded(Encoding::kFloat16, {1.5f, -2, 1});
  push.payload_bytes = static_cast<uint32_t>(gradient.size());
  for (RawPeer& worker : job.workers) worker.send(push, gradient.data());
  for (RawPeer& worker : job.workers)
    EXPECT_EQ(worker.must_receive().encoding, static_cast<uint8_t>(Encoding::kFloat16));
  for (int worker : {0, 1}) job.skip(worker, 1, 2);
  for (RawPeer& worker : job.workers)
    EXPECT_EQ(worker.must_receive().encoding, static_cast<uint8_t>(Encoding::kAbsent));
  job.capture(1, 0, 2);
  const auto arrays = job.server.take_captured(0);
  ASSERT_EQ(arrays.size(), 1u);
  EXPECT_EQ(floats(arrays[0]), (std::vector<float>{3, -4, 2}));
}

TEST_P(ServerCapture, OutlivesTheServer) {
  std::vector<CapturedArray> arrays;
  {
    CaptureJob job(1, with());
    job.define(1, 2);
    job.initialise(1, {1, 2});
    job.capture(1, 0, 0);
    arrays = job.server.take_captured(0);
  }
  ASSERT_EQ(arrays.size(), 1u);
  EXPECT_EQ(floats(arrays[0]), (std::vector<float>{1, 2}));
}

INSTANTIATE_TEST_SUITE_P(Threads, ServerCapture, testing::Values(0, 2));

// --- keys of rows --------------------------------------------------------------------------------------------------

// Key 1 has 4 rows of 1 element in 2 partitions.
struct RowsJob : CaptureJob {
  explicit RowsJob(int num_workers) : CaptureJob(num_workers) {
    plan.wire_key = 1;
    plan.elements = 4;
    plan.row_elements = 1;
    plan.partitions = 2;
    server.set_optimizer(0, momentum());
    server.define(plan, "emb", 0);
  }

  void send_rows(FrameKind kind, int worker, uint32_t partition, uint64_t round, std::vector<int64_t> ids,
                 float value) {
    const std::vector<float> values(ids.size(), value);
    for (const RowsPiece& piece : cut_rows(plan, partition_at(plan, partition), ids.data(), 0, ids.size(), false)) {
      std::vector<char> payload(piece.payload_bytes(sizeof(float)));
      write_rows(piece, ids.data(), sizeof(float), payload.data(),
                 [&](void* to, uint64_t i) { std::memcpy(to, &values[i], sizeof(float)); });
      Header made = header(kind, 1, partition, round, payload.size());
      made.payload_bytes = static_cast<uint32_t>(payload.size());
      made.scalars.lr = made.scalars.rescale = 1;
      workers[static_cast<size_t>(worker)].send(made, payload.data());
    }
  }

  void fill(uint32_t partition, float value) {
    send_rows(FrameKind::kStoreRows, 0, partition, 0, {2 * partition, 2 * partition + 1}, value);
    EXPECT_EQ(workers[0].must_receive().kind, FrameKind::kPart);
    for (RawPeer& worker : workers) worker.send(header(FrameKind::kInit, 1, partition, 0, 0));
    for (RawPeer& worker : workers) EXPECT_EQ(worker.must_receive().kind, FrameKind::kValue);
  }

  KeyPlan plan;
};

TEST(ServerCaptureRows, HaveValueAndStateOfTheLastRoundThoughAnotherPushedTheNext) {
  RowsJob job(2);
  for (uint32_t partition : {0u, 1u}) job.fill(partition, 10);
  for (int worker : {0, 1}) job.send_rows(FrameKind::kPushRows, worker, 1, 1, {2 + worker}, 4);
  for (RawPeer& worker : job.workers) EXPECT_EQ(worker.must_receive().kind, FrameKind::kRows);
  job.send_rows(FrameKind::kPushRows, 1, 1, 2, {2, 3}, 100);
  ASSERT_TRUE(job.has_received(9));
  job.capture(1, 1, 1);
  job.capture(1, 0, 0);
  const auto arrays = job.server.take_captured(0);
  ASSERT_EQ(CaptureJob::places(arrays), (std::vector<std::string>{"1.0.0", "1.1.0", "1.1.1"}));
  EXPECT_EQ(floats(arrays[0]), (std::vector<float>{10, 10}));
  EXPECT_EQ(floats(arrays[1]), (std::vector<float>{6, 6}));
  EXPECT_EQ(floats(arrays[2]), (std::vector<float>{-4, -4}));
}

TEST(ServerCaptureRows, CannotBeCapturedBeforeAllAreThere) {
  RowsJob job(1);
  job.workers[0].send(Job::header(FrameKind::kInit, 1, 0, 0, 0));  // the request for rows that nobody has stored
  job.workers[0].send(CaptureJob::request(1, 0, 0));
  const std::string text = job.failure();
  EXPECT_NE(text.find("worker 0 (there) sent a slice that is out of turn (key 'emb', slice 0"), std::string::npos)
      << text;
  EXPECT_TRUE(job.server.take_captured(0).empty());
}

// --- frames that are refused ---------------------------------------------------------------------------------------

TEST(ServerCaptureFrames, AreWorker0sAndCheckedAgainstTheKey) {
  struct Case {
    const char* what;
    int worker;
    void (*change)(Header&);
  };
  const Case cases[] = {
      {"unexpected", 1, [](Header&) {}},
      {"out of turn", 0, [](Header& h) { h.round = 1; }},
      {"out of turn", 0, [](Header& h) { h.round = ~uint64_t{0}; }},
      {"another element type", 0, [](Header& h) { h.dtype = 1; }},
      {"another encoding", 0, [](Header& h) { h.encoding = 0; }},
      {"of no key", 0, [](Header& h) { h.slice = 1; }},
      {"of no key", 0, [](Header& h) { h.key = 2; }},
      {"absent slice that announces 4 bytes", 0, [](Header& h) { h.payload_bytes = 4; }},
      {"for a whole machine", 0, [](Header& h) { h.of_machine = 1; }},
      {"of no round", 0, [](Header& h) { h.scalars.updates = -1; }},
      {"of no round", 0, [](Header& h) { h.scalars.updates = 0.5; }},
      {"of no round", 0, [](Header& h) { h.scalars.updates = 1e300; }},
      {"of no round", 0, [](Header& h) { h.scalars.updates = std::nan(""); }},
  };
  for (bool rows : {false, true}) {
    for (const Case& each : cases) {
      const auto job = rows ? std::make_unique<RowsJob>(2) : std::make_unique<CaptureJob>(2);
      if (rows) {
        static_cast<RowsJob&>(*job).fill(0, 1);
      } else {
        job->define(1, 1);
        job->initialise(1, {1});
      }
      Header header = CaptureJob::request(1, 0, 0);
      each.change(header);
      if (rows && header.slice == 1) header.slice = 2;  // a key of rows has a second one
      job->workers[static_cast<size_t>(each.worker)].send_bytes(&header, sizeof header);
      const std::string text = job->failure();
      EXPECT_NE(text.find(each.what), std::string::npos) << text;
      EXPECT_NE(text.find("worker " + std::to_string(each.worker)), std::string::npos) << text;
      EXPECT_TRUE(job->server.take_captured(0).empty());
    }
  }
}

TEST(ServerCaptureFrames, NeedAFirstValueAndCannotFollowThePushOfTheNextRound) {
  for (bool pushed : {false, true}) {
    CaptureJob job(2);
    job.define(1, 1);
    if (pushed) {
      job.initialise(1, {1});
      job.push(0, 1, 1, {1});
    }
    job.workers[0].send(CaptureJob::request(1, 0, 0));
    const std::string text = job.failure();
    EXPECT_NE(text.find("out of turn (key 'key1', slice 0, round 0)"), std::string::npos) << text;
  }
}

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)  // these end the process instead
TEST(ServerCaptureFrames, FailTheJobWhereMemoryIsShort) {
  CaptureJob job(1);
  KeyPlan plan;
  plan.wire_key = 1;
  plan.elements = plan.slice_elements = 16 << 20;
  job.server.define(plan, "large", 0);
  job.workers[0].send(Job::header(FrameKind::kInit, 1, 0, 0, plan.elements),
                      std::vector<float>(plan.elements, 1).data());
  EXPECT_EQ(job.workers[0].must_receive().kind, FrameKind::kValue);

  uint64_t pages = 0;
  std::ifstream("/proc/self/statm") >> pages;
  rlimit before{}, tight{};
  ASSERT_EQ(getrlimit(RLIMIT_AS, &before), 0);
  tight = before;
  tight.rlim_cur = pages * static_cast<uint64_t>(sysconf(_SC_PAGESIZE)) + (32 << 20);
  ASSERT_EQ(setrlimit(RLIMIT_AS, &tight), 0);
  job.workers[0].send(CaptureJob::request(1, 0, 0));
  const std::string text = job.failure();
  ASSERT_EQ(setrlimit(RLIMIT_AS, &before), 0);
  EXPECT_NE(text.find("server 0 (test): no memory for a snapshot's copy of key 'large'"), std::string::npos) << text;
}
#endif

}  // namespace
}  // namespace p3
