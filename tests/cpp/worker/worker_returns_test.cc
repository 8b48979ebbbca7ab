// A worker whose lost server comes back: what it claims to that, and what goes where from then on.
#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "worker/two_servers.h"

namespace p3 {
namespace {

// Two servers, of which the first was lost; the other one has heard all that is claimed of a key of 1, 2, 3, 4.
struct LostServer : TwoServers {
  LostServer() : handle(key(7)) {
    initialise(handle);
    lose_server();
    must_claim(7, 0, {1, 2});
    must_claim_nothing_more();
  }
  void take_back() {
    const auto [ours, its] = unix_pair();
    lost = RawPeer(ours);
    worker.take_back(0, stream_of(its));
  }
  void must_claim_to_the_returned(uint64_t round, const Floats& value) {
    must_claim_to(lost, 7, round, value);
    must_claim_nothing_more_to(lost);
  }
  void begin_push(int id) {
    gradient = {10, 20, 30, 40};
    worker.push(handle, gradient.data(), landing.data(), 0, {}, results.expect(id));
  }
  static Header must_push(RawPeer& server, uint32_t slice, uint64_t round) {
    const Header push = server.must_receive();
    EXPECT_EQ(push.kind, FrameKind::kPush);
    EXPECT_EQ(push.slice, slice);
    EXPECT_EQ(push.round, round);
    EXPECT_EQ(floats(server), slice == 0 ? Floats({10, 20}) : Floats({30, 40}));
    return push;
  }

  const int handle;
};

TEST(WorkerReturns, HaveTheirOwnSlicesAgainAndTheHeirHasItsOwn) {
  LostServer job;
  job.take_back();
  EXPECT_TRUE(job.worker.lost_servers().empty());
  job.must_claim_to_the_returned(0, {1, 2});
  job.begin_push(1);
  TwoServers::answer(job.lost, LostServer::must_push(job.lost, 0, 1), {11, 22});
  TwoServers::answer(job.heir, LostServer::must_push(job.heir, 1, 1), {33, 44});
  ASSERT_TRUE(job.results.wait_for(2));
  EXPECT_EQ(job.landing, Floats({11, 22, 33, 44}));
}

TEST(WorkerReturns, AreToldNothingByAnAnswerToTheHeirWhoHasHandedOver) {
  LostServer job;
  job.take_back();
  job.must_claim_to_the_returned(0, {1, 2});
  job.ask();
  job.begin_push(1);
  TwoServers::answer(job.lost, LostServer::must_push(job.lost, 0, 1), {11, 22});
  TwoServers::answer(job.heir, LostServer::must_push(job.heir, 1, 1), {33, 44});
  ASSERT_TRUE(job.results.wait_for(2));
  EXPECT_FALSE(job.worker.error());
}

TEST(WorkerReturns, MayBeLostAgain) {
  LostServer job;
  for (uint64_t round : {1, 2, 3}) {
    job.take_back();
    job.must_claim_to_the_returned(round - 1, round == 1 ? Floats({1, 2}) : Floats({11, 22}));
    job.begin_push(static_cast<int>(round));
    LostServer::must_push(job.lost, 0, round);
    TwoServers::answer(job.heir, LostServer::must_push(job.heir, 1, round), {33, 44});
    job.lose_server();
    job.must_claim(7, round - 1, round == 1 ? Floats({1, 2}) : Floats({11, 22}));
    TwoServers::answer(job.heir, LostServer::must_push(job.heir, 0, round), {11, 22});
    job.must_claim_nothing_more();
    ASSERT_TRUE(job.results.wait_for(round + 1));
  }
}

TEST(WorkerReturns, MayBeLostBeforeTheWorkerHasHeardOfThem) {
  LostServer job;
  job.worker.inherit(0, 1, {0});  // which has handed over since, and inherited anew
  job.must_claim(7, 0, {1, 2});
  job.must_claim_nothing_more();
  job.begin_push(1);
  TwoServers::answer(job.heir, LostServer::must_push(job.heir, 0, 1), {11, 22});
  TwoServers::answer(job.heir, LostServer::must_push(job.heir, 1, 1), {33, 44});
  ASSERT_TRUE(job.results.wait_for(2));
}

TEST(WorkerReturns, MayBeLostBeforeTheyHadTheirSlicesBack) {
  LostServer job;
  job.worker.inherit(0, 1, {});
  job.take_back();
  job.must_claim_to_the_returned(0, {1, 2});
}

// Three servers; of one key each has a slice of one element.
struct ThreeServers {
  explicit ThreeServers(int num_connected = 3, int num_lost = 0) : worker(0, 3, TwoServers::options(true)) {
    for (int server = 0; server < 3; ++server) {
      servers.emplace_back(-1);
      if (server < num_lost || server >= num_lost + num_connected) continue;
      auto [ours, its] = unix_pair();
      peer(server) = RawPeer(ours);
      worker.add_server(server, stream_of(its), "server " + std::to_string(server) + " (there)");
    }
    for (int server = 0; server < num_lost; ++server) worker.add_heir(server, num_lost, "a server that is lost");
    worker.start();
    key = worker.declare("key", 3, DType::kFloat32, {});
    KeyPlan plan = plan_of(7, 3);
    plan.slice_elements = 1;
    worker.agree(key, plan);
  }
  RawPeer& peer(int server) { return servers[static_cast<size_t>(server)]; }
  bool initialise() {
    worker.init(key, landing.data(), landing.data(), 0, results.expect(0));
    for (int server : {0, 1, 2}) answer(server, static_cast<uint32_t>(server), 0);
    return results.wait_for(1);
  }
  void answer(int server, uint32_t slice, uint64_t round) {
    const Header asked = peer(server).must_receive();
    EXPECT_EQ(asked.slice, slice);
    EXPECT_EQ(asked.round, round);
    TwoServers::answer(peer(server), asked, {static_cast<float>(slice)});
  }
  void must_claim(int server, const std::vector<uint32_t>& slices) {
    for (uint32_t key_claimed : {7u, kNoKey})
      for (uint32_t slice : slices) {
        const Header claim = peer(server).must_receive();
        EXPECT_EQ(claim.kind, FrameKind::kClaim);
        EXPECT_EQ(claim.key, key_claimed);
        EXPECT_EQ(claim.slice, slice);
      }
  }
  void lose(int server) {
    peer(server).close();
    EXPECT_TRUE(eventually([&] { return worker.lost_servers() == std::vector<int>{server}; }));
  }
  // `ranks`: those whose slices it had.
  void lose_to(int heir, int server, const std::vector<int>& ranks) {
    lose(server);
    worker.inherit(server, heir, ranks);
    must_claim(heir, {ranks.begin(), ranks.end()});
  }
  void take_back(int server) {
    auto [ours, its] = unix_pair();
    peer(server) = RawPeer(ours);
    worker.take_back(server, stream_of(its));
  }

  Floats landing = {0, 1, 2};
  std::vector<RawPeer> servers;
  Results results;
  Worker worker;
  int key;
};

TEST(WorkerReturns, LeaveWithTheHeirWhatElseItServes) {
  ThreeServers job;
  ASSERT_TRUE(job.initialise());
  job.lose_to(1, 0, {0});
  job.lose_to(2, 1, {0, 1});  // whose own connection that is, and of no other server
  job.take_back(0);
  job.must_claim(0, {0});
  const Floats gradient = {1, 1, 1};
  job.worker.push(job.key, gradient.data(), job.landing.data(), 0, {}, job.results.expect(1));
  job.answer(0, 0, 1);
  for (uint32_t slice : {1u, 2u}) job.answer(2, slice, 1);
  ASSERT_TRUE(job.results.wait_for(2));
  job.take_back(1);
  job.must_claim(1, {1});
  job.lose_to(0, 2, {2});
}

TEST(WorkerReturns, MayHaveBeenServedByOneThatIsLostSince) {
  ThreeServers job;
  ASSERT_TRUE(job.initialise());
  job.lose_to(1, 0, {0});
  job.lose_to(2, 1, {1});  // which had handed the other one over
  job.take_back(0);
  job.must_claim(0, {0});

  job.lose_to(2, 0, {0});
}

// Another one is lost, whose heir the returned server is, before the worker is connected to that.
TEST(WorkerReturns, HaveWhatTheyHaveInheritedMeanwhile) {
  ThreeServers job;
  ASSERT_TRUE(job.initialise());
  job.lose_to(1, 0, {0});
  job.lose(2);
  job.worker.inherit(2, 0, {2});
  job.take_back(0);
  job.must_claim(0, {0, 2});
  const Floats gradient = {1, 1, 1};
  job.worker.push(job.key, gradient.data(), job.landing.data(), 0, {}, job.results.expect(1));
  for (uint32_t slice : {0u, 2u}) job.answer(0, slice, 1);
  job.answer(1, 1, 1);
  ASSERT_TRUE(job.results.wait_for(2));
}

TEST(WorkerReturns, MayHaveBeenLostBeforeTheWorkerCame) {
  ThreeServers job(/*num_connected=*/2, /*num_lost=*/1);
  job.worker.init(job.key, job.landing.data(), job.landing.data(), 0, job.results.expect(0));
  for (uint32_t slice : {0u, 1u}) job.answer(1, slice, 0);
  job.answer(2, 2, 0);
  ASSERT_TRUE(job.results.wait_for(1));
  EXPECT_TRUE(job.worker.lost_servers().empty());
  job.take_back(0);
  job.must_claim(0, {0});
  const Floats gradient = {1, 1, 1};
  job.worker.push(job.key, gradient.data(), job.landing.data(), 0, {}, job.results.expect(1));
  for (int server : {0, 1, 2}) job.answer(server, static_cast<uint32_t>(server), 1);
  ASSERT_TRUE(job.results.wait_for(2));
}

TEST(WorkerReturns, AreServersThatWereLost) {
  TwoServers job;
  EXPECT_THROW(job.worker.take_back(0, nullptr), Error);
  EXPECT_THROW(job.worker.take_back(2, nullptr), Error);
  EXPECT_THROW(job.worker.inherit(0, 0, {0}), Error);
  EXPECT_THROW(job.worker.inherit(0, 1, {2}), Error);
  EXPECT_THROW(TwoServers(/*outlives=*/false).worker.take_back(0, nullptr), Error);
  EXPECT_FALSE(job.worker.error());
}

}  // namespace
}  // namespace p3
