// A peer that asks and does not read cannot make a node grow: beyond a bound it is not read either, until it has read.
// All asserts are on counters of bytes.
#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <thread>
#include <vector>

#include "p3/worker.h"
#include "plan/rows.h"
#include "server/server_job.h"

namespace p3 {
namespace {

constexpr uint64_t kBound = 256 << 10;
constexpr uint64_t kTurn = 64 << 10;  // what comes in one turn of the receiver goes beyond the bound

ServerOptions bounded(double timeout_s = kForeverS) {
  ServerOptions made = options();
  made.node.timeout_s = timeout_s;
  made.node.heartbeat_s = timeout_s / 10;
  made.node.max_held_bytes = kBound;
  return made;
}

Traffic traffic(const Job& job) { return job.server.counters().traffic; }

// Sends `count` frames without reading, waits until the server has held as much as it may, then reads that many answers.
void expect_bounded(Job& job, int count, const Header& header, const std::vector<char>& payload, FrameKind answer) {
  std::thread asks([&] {
    for (int i = 0; i < count; ++i) job.workers[0].send(header, payload.data());
  });
  EXPECT_TRUE(eventually([&] { return traffic(job).peak_held_bytes > kBound || job.server.error(); }));
  for (int i = 0; i < count; ++i) {
    Header got;
    if (!job.workers[0].receive(got) || got.kind != answer) {
      ADD_FAILURE() << "answer " << i << ": " << (job.server.error() ? job.server.error()->what() : "none");
      break;
    }
  }
  asks.join();
  EXPECT_GT(traffic(job).peak_held_bytes, kBound);
  EXPECT_LE(traffic(job).peak_held_bytes, kBound + kTurn);
  EXPECT_TRUE(eventually([&] { return traffic(job).held_bytes == 0; }));
  EXPECT_FALSE(job.server.error());
}

struct StateJob : Job {
  explicit StateJob(int num_workers = 1, double timeout_s = kForeverS) : Job(num_workers, bounded(timeout_s)) {
    server.set_optimizer(0, {"sgd", {{"momentum", 0.5}}});
    define(1, 100);
    initialise(1, std::vector<float>(100, 1));
  }
  static Header about_state(FrameKind kind, size_t elements) {
    Header header = Job::header(kind, 1, 0, 0, elements);
    header.part = 1;
    return header;
  }
};

TEST(BoundedMemory, OfAnswersToWhoFetchesAndDoesNotRead) {
  StateJob job;
  expect_bounded(job, 20000, StateJob::about_state(FrameKind::kFetch, 0), {}, FrameKind::kPart);
}

TEST(BoundedMemory, OfStatesThatAreStoredWhileTheFormerAreOnTheirWay) {
  StateJob job;
  const std::vector<char> content(400, 0);
  expect_bounded(job, 20000, StateJob::about_state(FrameKind::kStore, 100), content, FrameKind::kPart);
}

TEST(BoundedMemory, OfFirstValuesGivenAgainAndAgain) {
  StateJob job;
  const std::vector<char> content(400, 0);
  expect_bounded(job, 20000, Job::header(FrameKind::kInit, 1, 0, 0, 100), content, FrameKind::kValue);
}

TEST(BoundedMemory, OfRowsThatAreFetchedAndNotRead) {
  Job job(1, bounded());
  KeyPlan plan;
  plan.wire_key = 1;
  plan.elements = 10 * 100;
  plan.row_elements = 100;
  plan.partitions = 1;
  plan.slice_elements = 1000;
  job.server.define(plan, "emb", 0);
  RowsHeader rows;
  rows.rows = 10;
  rows.last = 1;
  std::vector<char> stored(sizeof rows + 10 * 400), request(sizeof rows);
  std::memcpy(stored.data(), &rows, sizeof rows);
  std::memcpy(request.data(), &rows, sizeof rows);
  Header header = Job::header(FrameKind::kStoreRows, 1, 0, 0, stored.size() / sizeof(float));
  job.workers[0].send(header, stored.data());
  EXPECT_EQ(job.workers[0].must_receive().kind, FrameKind::kPart);
  job.workers[0].send(Job::header(FrameKind::kInit, 1, 0, 0, 0));
  EXPECT_EQ(job.workers[0].must_receive().kind, FrameKind::kValue);

  header = Job::header(FrameKind::kFetchRows, 1, 0, 0, request.size() / sizeof(float));
  expect_bounded(job, 2000, header, request, FrameKind::kPart);
  EXPECT_LE(job.server.counters().peak_buffer_bytes, 2 * kBound);
}

TEST(BoundedMemory, WhoReadsNothingOfWhatWaitsIsAccused) {
  StateJob job(1, 1);
  std::atomic<bool> is_over{false};
  std::thread asks([&] {
    while (!is_over) job.workers[0].send(StateJob::about_state(FrameKind::kFetch, 0));
  });
  const std::string text = job.failure();
  EXPECT_NE(text.find("worker 0 (there) has read nothing for 1 s of the"), std::string::npos) << text;
  is_over = true;
  job.server.stop();  // ends the connection, and so what the thread waits for
  asks.join();
}

TEST(BoundedMemory, OthersGoOnWhileOneDoesNotRead) {
  StateJob job(2);
  std::thread asks([&] {
    for (int i = 0; i < 20000; ++i) job.workers[0].send(StateJob::about_state(FrameKind::kFetch, 0));
  });
  EXPECT_TRUE(eventually([&] { return traffic(job).peak_held_bytes > kBound; }));
  for (int i = 0; i < 100; ++i) {
    job.workers[1].send(StateJob::about_state(FrameKind::kFetch, 0));
    EXPECT_EQ(job.workers[1].must_receive().kind, FrameKind::kPart);
  }
  for (int i = 0; i < 20000; ++i) EXPECT_EQ(job.workers[0].must_receive().kind, FrameKind::kPart);
  asks.join();
}

TEST(BoundedMemory, NobodyWaitsTwiceForAFirstValue) {
  Job job(2, bounded());
  job.define(1, 1);
  job.init(1, 1, 0);
  job.init(1, 1, 0);
  const std::string text = job.failure();
  EXPECT_NE(text.find("worker 1 (there) sent a slice that is out of turn"), std::string::npos) << text;
}

// Worker 0 leads; its neighbour reads nothing, and the server answers.
TEST(BoundedMemory, OfRowsThatALeaderPassesOn) {
  NodeOptions with = timeless("worker 0 (here)");
  with.max_held_bytes = kBound;
  const auto [ours, its] = unix_pair();
  const auto [near, nears] = unix_pair();
  RawPeer server(ours), neighbour(near);
  Worker worker(0, 1, with);
  worker.add_server(0, stream_of(its), "server 0 (there)");
  worker.add_local(1, stream_of(nears), "worker 1 (there)");
  worker.start();
  KeyPlan plan;
  plan.wire_key = 3;
  plan.elements = 16 << 10;
  plan.row_elements = 16 << 10;
  plan.partitions = 1;
  const size_t row_bytes = plan.elements * sizeof(float);
  const int key = worker.declare_rows("emb", 1, plan.row_elements, DType::kFloat32);
  worker.agree(key, plan);

  RowsHeader one;
  one.rows = one.last = 1;
  one.pushed_rows = one.touched_rows = 1;
  std::vector<char> rows(sizeof one + row_bytes);
  std::memcpy(rows.data(), &one, sizeof one);
  Header push;
  push.kind = FrameKind::kPushRows;
  push.key = 3;
  push.part = 1;
  push.payload_bytes = static_cast<uint32_t>(rows.size());
  Header answer = push;
  answer.kind = FrameKind::kRows;
  answer.part = 0;
  answer.of_machine = 1;

  std::vector<float> landing(plan.elements);
  uint64_t rounds = 0;
  const auto held = [&] { return worker.counters().local.held_bytes; };
  const int64_t none = 0;
  const auto send = [&] {
    push.round = answer.round = ++rounds;
    worker.push_rows(key, {&none, 0, landing.data()}, landing.data(), 0, {}, [](const Error*, const RowsView&) {});
    neighbour.send(push, rows.data());
  };
  const auto complete = [&] {
    EXPECT_EQ(server.must_receive().kind, FrameKind::kPushRows);
    server.send(answer, rows.data());
    EXPECT_TRUE(eventually([&] { return worker.key_counters(key).rounds == rounds; }));
  };
  while (held() <= kBound && rounds < 100) {
    send();
    complete();
  }
  ASSERT_LT(rounds, 100u);
  // The neighbour's next push is not read, so no further round can complete.
  const uint64_t passed_on = rounds;
  std::thread pushes(send);
  for (uint64_t i = 0; i < passed_on; ++i) EXPECT_EQ(neighbour.must_receive().kind, FrameKind::kRows);
  pushes.join();
  EXPECT_LE(worker.counters().local.peak_held_bytes, kBound + 2 * rows.size());
  complete();
  EXPECT_FALSE(worker.error());
}

}  // namespace
}  // namespace p3
