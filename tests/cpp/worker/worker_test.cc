#include "p3/worker.h"

#include <gtest/gtest.h>

#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "worker/worker_job.h"

namespace p3 {
namespace {

TEST(Worker, AThrottledVanSendsByPriorityAndTiesInSequence) {
  OneServer job(tcp_pair(4096));
  const uint64_t elements = 4 * kSlice;
  std::vector<float>& gradient = job.array(elements);
  std::vector<float>& landing = job.array(elements);
  // The last layer's gradient is ready first, as in a backward pass; nothing is read until all are queued.
  for (int layer : {2, 1, 0}) {
    const int key = job.key(static_cast<uint32_t>(layer), elements);
    job.worker.push(key, gradient.data(), landing.data(), -layer, {}, job.results.expect(layer));
    ASSERT_TRUE(job.server.readable(kDeadlineMs));  // layer 2's first slice is under way
  }
  std::vector<std::pair<uint32_t, uint32_t>> order;
  for (int i = 0; i < 12; ++i) {
    const Header header = job.server.must_receive();
    order.push_back({header.key, header.slice});
  }
  // At most one slice of a lower priority was on its way already.
  auto expected = std::vector<std::pair<uint32_t, uint32_t>>{{0, 0}, {0, 1}, {0, 2}, {0, 3}, {1, 0}, {1, 1},
                                                             {1, 2}, {1, 3}, {2, 1}, {2, 2}, {2, 3}};
  ASSERT_EQ(order.front(), (std::pair<uint32_t, uint32_t>{2, 0}));
  order.erase(order.begin());
  EXPECT_EQ(order, expected);
}

TEST(Worker, AnAnswerBeforeThePushHasLeftCompletesNothingUntilThen) {
  OneServer job(tcp_pair(4096));
  std::vector<float>& gradient = job.array(kSlice, 7);
  std::vector<float>& landing = job.array(kSlice);
  for (uint32_t key : {0, 1})
    job.worker.push(job.key(key, kSlice), gradient.data(), landing.data(), 0, {},
                    job.results.expect(static_cast<int>(key)));
  for (uint32_t key : {0, 1}) {
    Header push;
    push.dtype = static_cast<uint8_t>(DType::kFloat32);
    push.key = key;
    push.round = 1;
    job.answer(push, std::vector<float>(kSlice, 1));
  }
  // The second answer has come, so the first has been worked on.
  ASSERT_TRUE(eventually([&] { return job.worker.counters().traffic.slices_received == 2; }));
  EXPECT_TRUE(job.results.finished().empty());
  for (int i = 0; i < 2; ++i) {
    job.server.must_receive();
    EXPECT_EQ(std::memcmp(job.server.payload.data(), gradient.data(), kSlice * sizeof(float)), 0);
  }
  EXPECT_TRUE(job.results.wait_for(2));
}

TEST(Worker, EachSliceGoesToItsServer) {
  std::vector<RawPeer> servers;
  Worker worker(0, 3, options());
  for (int i = 0; i < 3; ++i) {
    const auto [ours, its] = unix_pair();
    servers.emplace_back(ours);
    worker.add_server(i, stream_of(its), "server " + std::to_string(i));
  }
  worker.start();
  std::vector<float> gradient(7 * kSlice), landing(7 * kSlice);
  std::iota(gradient.begin(), gradient.end(), 0.0f);
  const int key = worker.declare("x", gradient.size(), DType::kFloat32);
  worker.agree(key, plan_of(0, gradient.size(), 2));
  Results results;
  worker.push(key, gradient.data(), landing.data(), 0, RoundScalars{0.5, 0.25, 0.125}, results.expect(0));
  for (uint32_t slice = 0; slice < 7; ++slice) {
    RawPeer& server = servers[(slice + 2) % 3];
    const Header header = server.must_receive();
    EXPECT_EQ(header.slice, slice);
    EXPECT_EQ(header.round, 1u);
    EXPECT_EQ(header.scalars.lr, 0.5);
    EXPECT_EQ(header.scalars.wd, 0.25);
    EXPECT_EQ(header.scalars.rescale, 0.125);
    EXPECT_EQ(std::memcmp(server.payload.data(), gradient.data() + slice * kSlice, kSlice * sizeof(float)), 0);
  }
  worker.close(0);
}

TEST(Worker, AKeyCompletesWhenItsOwnLastSliceHasLanded) {
  OneServer job(unix_pair());
  std::vector<float>& gradient = job.array(2 * kSlice, 1);
  std::vector<float>& first = job.array(2 * kSlice);
  std::vector<float>& last = job.array(2 * kSlice);
  const int layer0 = job.key(0, gradient.size()), layer9 = job.key(9, gradient.size());
  job.worker.push(layer9, gradient.data(), last.data(), -9, {}, job.results.expect(9));
  job.worker.push(layer0, gradient.data(), first.data(), 0, {}, job.results.expect(0));
  std::vector<Header> pushes;
  for (int i = 0; i < 4; ++i) pushes.push_back(job.server.must_receive());
  for (const Header& push : pushes)
    if (push.key == 0) job.answer(push, std::vector<float>(kSlice, 3));
  ASSERT_TRUE(job.results.wait_for(1));  // layer 0 is readable, and nothing of layer 9 has been sent back yet
  EXPECT_EQ(job.results.finished(), std::vector<int>{0});
  EXPECT_EQ(first, std::vector<float>(2 * kSlice, 3));
  for (const Header& push : pushes)
    if (push.key == 9) job.answer(push, std::vector<float>(kSlice, 4));
  ASSERT_TRUE(job.results.wait_for(2));
  EXPECT_EQ(last, std::vector<float>(2 * kSlice, 4));
}

TEST(Worker, OperationsWaitForTheAgreementAndKeepTheirOrder) {
  OneServer job(unix_pair());
  std::vector<float>& value = job.array(10, 7);
  std::vector<float>& gradient = job.array(10, 1);
  std::vector<float>& landing = job.array(10);
  const int key = job.worker.declare("late", 10, DType::kFloat32);
  job.worker.init(key, value.data(), landing.data(), 0, job.results.expect(0));
  job.worker.push(key, gradient.data(), landing.data(), 0, {}, job.results.expect(1));
  job.worker.agree(key, plan_of(5, 10));
  const Header init = job.server.must_receive();
  EXPECT_EQ(init.kind, FrameKind::kInit);
  job.answer(init, value);
  const Header push = job.server.must_receive();
  EXPECT_EQ(push.kind, FrameKind::kPush);
  EXPECT_EQ(push.round, 1u);
  job.answer(push, std::vector<float>(10, 8));
  ASSERT_TRUE(job.results.wait_for(2));
  EXPECT_EQ(job.results.finished(), (std::vector<int>{0, 1}));
  EXPECT_EQ(landing, std::vector<float>(10, 8));
}

TEST(Worker, ALostServerFailsEveryPendingAndEveryLaterOperation) {
  OneServer job(unix_pair());
  std::vector<float>& data = job.array(10);
  std::vector<float>& landing = job.array(10);
  const int key = job.key(3, 10);
  const int waiting = job.worker.declare("never agreed", 10, DType::kFloat32);
  job.worker.push(key, data.data(), landing.data(), 0, {}, job.results.expect(0));
  job.worker.push(waiting, data.data(), landing.data(), 0, {}, job.results.expect(1));
  job.server.must_receive();
  job.server.close();
  ASSERT_TRUE(job.results.wait_for(2));
  ASSERT_TRUE(wait_readable(job.worker.event_fd()));
  EXPECT_NE(job.results.text(0).find("worker 0 (test): lost server 0 (there)"), std::string::npos)
      << job.results.text(0);
  EXPECT_NE(job.results.text(0).find("round 1 of key 'key3'"), std::string::npos) << job.results.text(0);
  job.worker.push(key, data.data(), landing.data(), 0, {}, job.results.expect(2));
  ASSERT_TRUE(job.results.wait_for(3));
  EXPECT_EQ(job.results.text(2), job.results.text(0));
}

TEST(Worker, ASilentServerIsNamedAfterTheTimeout) {
  OneServer job(unix_pair(), 0.2);
  std::vector<float>& data = job.array(10);
  std::vector<float>& landing = job.array(10);
  job.worker.push(job.key(3, 10), data.data(), landing.data(), 0, {}, job.results.expect(0));
  ASSERT_TRUE(job.results.wait_for(1));
  EXPECT_NE(job.results.text(0).find("nothing heard from server 0 (there) for 0.2 s"), std::string::npos)
      << job.results.text(0);
}

TEST(Worker, SignsOfLifeKeepAnIdleJobAlive) {
  OneServer job(unix_pair(), 2);
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(3);
  Header ping;
  while (std::chrono::steady_clock::now() < end) {
    job.server.readable(50);  // paces the pings
    job.server.send(ping);
  }
  EXPECT_FALSE(job.worker.error().has_value()) << job.worker.error()->what();
}

TEST(Worker, ATextFromTheServerBecomesTheErrorUnchanged) {
  OneServer job(unix_pair());
  const std::string text = "worker 1 (10.0.0.7): gradient of key 'conv0_weight' failed";
  Header fail;
  fail.kind = FrameKind::kFail;
  fail.payload_bytes = static_cast<uint32_t>(text.size());
  job.server.send(fail, text.data());
  ASSERT_TRUE(wait_readable(job.worker.event_fd()));
  EXPECT_EQ(std::string(job.worker.error()->what()), text);
}

TEST(Worker, ItsOwnFailureReachesTheServer) {
  OneServer job(unix_pair());
  job.worker.fail(Error(ErrorKind::kRemote, "worker 0 (test): out of cheese"));
  EXPECT_EQ(job.server.receive_failure(), "worker 0 (test): out of cheese");
}

TEST(Worker, NothingAServerSendsCanWriteOutsideTheKey) {
  struct Case {
    const char* what;
    void (*change)(Header&);
  };
  const Case cases[] = {
      {"out of turn", [](Header& h) { h.round = 2; }},
      {"unexpected", [](Header& h) { h.key = 77; }},
      {"unexpected", [](Header& h) { h.kind = FrameKind::kPush; }},
      {"misplaced", [](Header& h) { h.slice = 2; }},
      {"misplaced", [](Header& h) { h.slice = 0xffffffff; }},
      {"wrongly sized", [](Header& h) { h.payload_bytes = 4; }},
      {"wrongly sized", [](Header& h) { h.payload_bytes = 0xffffffff; }},
      {"wrongly sized", [](Header& h) { h.dtype = 1; }},
      {"magic", [](Header& h) { h.magic = 0x20544547; }},
  };
  for (const Case& each : cases) {
    OneServer job(unix_pair());
    std::vector<float>& data = job.array(kSlice + 10);
    std::vector<float>& landing = job.array(kSlice + 10);
    job.worker.push(job.key(3, data.size()), data.data(), landing.data(), 0, {}, job.results.expect(0));
    Header answer = job.server.must_receive();
    answer.kind = FrameKind::kValue;
    each.change(answer);
    job.server.send_bytes(&answer, sizeof answer);
    ASSERT_TRUE(job.results.wait_for(1)) << each.what;
    EXPECT_NE(job.results.text(0).find(each.what), std::string::npos) << job.results.text(0);
    EXPECT_NE(job.results.text(0).find("server 0 (there)"), std::string::npos) << job.results.text(0);
  }
}

TEST(Worker, CloseWaitsForWhatIsPendingAndSaysGoodbye) {
  OneServer job(unix_pair());
  std::thread server([&] {  // whose end the worker waits for
    EXPECT_EQ(job.server.must_receive().kind, FrameKind::kBye);
    job.server.close();
  });
  EXPECT_TRUE(job.worker.close(kDeadlineMs / 1000));
  server.join();
  std::vector<float>& data = job.array(10);
  std::vector<float>& landing = job.array(10);
  job.worker.push(job.worker.declare("x", 10, DType::kFloat32), data.data(), landing.data(), 0, {},
                  job.results.expect(0));
  ASSERT_TRUE(job.results.wait_for(1));
  EXPECT_NE(job.results.text(0).find("is closed"), std::string::npos);
}

TEST(Worker, ClosingTooEarlySaysWhatWasPending) {
  OneServer job(unix_pair());
  std::vector<float>& data = job.array(10);
  std::vector<float>& landing = job.array(10);
  job.worker.push(job.key(3, 10), data.data(), landing.data(), 0, {}, job.results.expect(0));
  job.server.must_receive();
  EXPECT_FALSE(job.worker.close(0));
  ASSERT_TRUE(job.results.wait_for(1));
  EXPECT_NE(job.results.text(0).find("round 1 of key 'key3'"), std::string::npos) << job.results.text(0);
}

TEST(Worker, TheTrainingThreadNeverWaitsForTheNetwork) {
  // The server reads nothing at all; 20 MB are pushed. A push that waited would never return.
  OneServer job(tcp_pair(4096));
  std::vector<float>& gradient = job.array(100 * kSlice);
  std::vector<float>& landing = job.array(100 * kSlice);
  job.worker.push(job.key(0, gradient.size()), gradient.data(), landing.data(), 0, {}, job.results.expect(0));
  EXPECT_TRUE(job.results.finished().empty());
}

}  // namespace
}  // namespace p3
