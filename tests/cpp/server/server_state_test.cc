// The optimizer's state on a server, fetched and stored.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "base/half.h"
#include "p3/server.h"
#include "server/server_job.h"

namespace p3 {
namespace {

constexpr uint32_t kMany = 100000;  // more than all buffers of a throttled connection hold

OptimizerSpec adam() { return {"adam", {{"beta1", 0.5}, {"beta2", 0.75}, {"epsilon", 1}}}; }

OptimizerSpec momentum(bool multi_precision = false) {
  return {"sgd", {{"momentum", 0.5}, {"multi_precision", multi_precision}}};
}

struct StateJob : Job {
  using Job::Job;

  void define_whole(uint32_t key, uint32_t elements, DType dtype) {
    KeyPlan plan;
    plan.wire_key = key;
    plan.elements = plan.slice_elements = elements;
    plan.dtype = dtype;
    server.define(plan, "key" + std::to_string(key), 0);
  }

  void load(uint8_t part, const std::vector<float>& content, uint32_t slice = 0) {
    server.load(1, slice, part, content.data(), content.size() * sizeof(float));
  }

  void ask(int worker, uint8_t part, uint64_t round) {
    Header header = Job::header(FrameKind::kFetch, 1, 0, round, 0);
    header.part = part;
    workers[static_cast<size_t>(worker)].send(header);
  }

  std::vector<float> receive_part(int worker, uint8_t part) {
    RawPeer& peer = workers[static_cast<size_t>(worker)];
    const Header header = peer.must_receive();
    EXPECT_EQ(header.kind, FrameKind::kPart);
    EXPECT_EQ(header.part, part);
    EXPECT_EQ(header.dtype, static_cast<uint8_t>(DType::kFloat32));
    std::vector<float> content(peer.payload.size() / sizeof(float));
    if (!content.empty()) std::memcpy(content.data(), peer.payload.data(), peer.payload.size());
    return content;
  }

  std::vector<float> fetch(int worker, uint8_t part, uint64_t round) {
    ask(worker, part, round);
    return receive_part(worker, part);
  }

  void store(uint8_t part, uint64_t round, const std::vector<float>& content) {
    Header header = Job::header(FrameKind::kStore, 1, 0, round, content.size());
    header.part = part;
    workers[0].send(header, content.data());
    EXPECT_TRUE(receive_part(0, part).empty());  // stored
  }
};

class ServerState : public testing::TestWithParam<int> {
 protected:
  static ServerOptions with() { return options(SumOrder::kRank, GetParam()); }
};

TEST_P(ServerState, AndValueMayBeThereAlreadyAndThenNobodyBringsThem) {
  StateJob job(2, with());
  job.define(1, 2);
  job.load(0, {3, 4});
  job.load(1, {5, 6});
  job.load(2, {7, 8});
  job.server.set_optimizer(0, adam());  // known later, as in a job
  for (int worker : {1, 0}) job.init(worker, 1, 0);
  for (int worker : {0, 1}) EXPECT_EQ(job.receive_value(worker), (std::vector<float>{3, 4}));
  EXPECT_EQ(job.fetch(1, 1, 0), (std::vector<float>{5, 6}));
  EXPECT_EQ(job.fetch(1, 2, 0), (std::vector<float>{7, 8}));
}

// As another server could not load its part: what rank 0 brings counts.
TEST_P(ServerState, WhatWasLoadedGivesWayToWhatRank0Brings) {
  StateJob job(2, with());
  job.server.set_optimizer(0, adam());
  job.define(1, 2);
  job.load(0, {3, 4});
  job.load(1, {5, 6});  // and then its file was gone
  job.initialise(1, {1, 2});
  job.store(1, 0, {9, 9});
  EXPECT_EQ(job.fetch(1, 1, 0), (std::vector<float>{9, 9}));
  EXPECT_EQ(job.fetch(1, 2, 0), (std::vector<float>{0, 0}));
  job.init(1, 1, 0);
  job.init(0, 1, 0, {6, 7});  // and once more
  for (int worker : {0, 1}) EXPECT_EQ(job.receive_value(worker), (std::vector<float>{6, 7}));
}

TEST_P(ServerState, WhatDoesNotFitIsNotLoaded) {
  StateJob job(1, with());
  job.define(1, 2);
  EXPECT_THROW(job.load(0, {3}), Error);
  EXPECT_THROW(job.load(2, {3, 4}), Error);     // before the first
  EXPECT_THROW(job.load(0, {3, 4}, 1), Error);  // there is no such slice
  job.init(0, 1, 0);
  EXPECT_NE(job.failure().find("in another encoding than agreed"), std::string::npos);
}

TEST_P(ServerState, IsZeroAtFirstAndThenAsTheLastRoundLeftIt) {
  StateJob job(2, with());
  job.server.set_optimizer(0, adam());
  job.define(1, 2);
  job.initialise(1, {1, 1});
  for (uint8_t part : std::vector<uint8_t>{1, 2}) EXPECT_EQ(job.fetch(1, part, 0), (std::vector<float>{0, 0}));
  for (int worker : {0, 1}) job.push(worker, 1, 1, {1, 2}, 0, 0, 0.1);
  for (int worker : {0, 1}) job.receive_value(worker);
  job.push(0, 1, 2, {7, 7}, 0, 0, 0.1);  // the next round is under way, and worker 1 has no part in it yet
  ASSERT_TRUE(job.has_received(7));
  EXPECT_EQ(job.fetch(1, 1, 1), (std::vector<float>{1, 2}));  // 0.5 * sum
  EXPECT_EQ(job.fetch(1, 2, 1), (std::vector<float>{1, 4}));  // 0.25 * sum^2
}

TEST_P(ServerState, ThatWasStoredIsWhatTheNextRoundUses) {
  StateJob job(2, with());
  job.server.set_optimizer(0, momentum());
  job.define(1, 1);
  job.initialise(1, {10});
  job.store(1, 0, {4});
  EXPECT_EQ(job.fetch(0, 1, 0), std::vector<float>{4});
  EXPECT_EQ(job.fetch(1, 1, 0), std::vector<float>{4});
  for (int worker : {0, 1}) job.push(worker, 1, 1, {1}, 0, 0, 1.0);
  for (int worker : {0, 1}) EXPECT_EQ(job.receive_value(worker), std::vector<float>{10});  // 10 + 0.5 * 4 - 2
  EXPECT_EQ(job.fetch(0, 1, 1), std::vector<float>{0});
}

TEST_P(ServerState, OfAFloat16KeyIsFloat32AndHasAMaster) {
  StateJob job(1, with());
  job.server.set_optimizer(0, momentum(true));
  job.define(1, 1, DType::kFloat16);
  job.exchange_half(FrameKind::kInit, 0, 3);
  EXPECT_EQ(job.fetch(0, kMaster, 0), std::vector<float>{3});
  job.store(kMaster, 0, {2.00001f});
  job.exchange_half(FrameKind::kPush, 1, 1);
  EXPECT_EQ(job.fetch(0, kMaster, 1), std::vector<float>{2.00001f - 1});
  EXPECT_EQ(job.fetch(0, 1, 1), std::vector<float>{-1});
}

// A slow worker's copy is whole and of one moment, whatever rank 0 does meanwhile.
TEST_P(ServerState, IsNotTornByAStoreWhileItIsBeingSent) {
  StateJob job(2, with(), 4096);
  job.server.set_optimizer(0, momentum());
  job.define_whole(1, kMany, DType::kFloat32);
  job.initialise(1, std::vector<float>(kMany, 1));
  job.store(1, 0, std::vector<float>(kMany, 2));
  job.ask(1, 1, 0);
  ASSERT_TRUE(job.workers[1].readable(kDeadlineMs));  // on its way, and far from done
  for (float content : {3.0f, 4.0f}) job.store(1, 0, std::vector<float>(kMany, content));
  EXPECT_EQ(job.receive_part(1, 1), std::vector<float>(kMany, 2));
  EXPECT_EQ(job.fetch(1, 1, 0), std::vector<float>(kMany, 4));
}

TEST_P(ServerState, IsNotTornByAnInitWhileItIsBeingSent) {
  StateJob job(2, with(), 4096);
  job.server.set_optimizer(0, momentum(true));
  job.define_whole(1, kMany, DType::kFloat16);
  const auto init = [&job](int worker, float value) {
    Header header = Job::header(FrameKind::kInit, 1, 0, 0, worker == 0 ? kMany : 0);
    header.dtype = static_cast<uint8_t>(DType::kFloat16);
    header.payload_bytes /= 2;
    const std::vector<half> halves(kMany, float_to_half(value));
    job.workers[static_cast<size_t>(worker)].send(header, halves.data());
  };
  init(0, 5);
  init(1, 5);
  for (RawPeer& worker : job.workers) worker.must_receive();
  job.ask(1, kMaster, 0);
  ASSERT_TRUE(job.workers[1].readable(kDeadlineMs));
  init(0, 6);
  job.workers[0].must_receive();
  EXPECT_EQ(job.receive_part(1, kMaster), std::vector<float>(kMany, 5));
  EXPECT_EQ(job.fetch(0, kMaster, 0), std::vector<float>(kMany, 6));
}

// The answer has arrived before the server's threads have all noticed that it has left.
TEST_P(ServerState, MayBeStoredAsSoonAsItWasFetched) {
  StateJob job(2, with());
  job.server.set_optimizer(0, momentum());
  job.define(1, 1);
  job.initialise(1, {1});
  for (float content = 0; content < 200; ++content) {
    job.store(1, 0, {content});
    for (int worker : {0, 1}) ASSERT_EQ(job.fetch(worker, 1, 0), std::vector<float>{content});
  }
  EXPECT_FALSE(job.server.error().has_value());
}

INSTANTIATE_TEST_SUITE_P(Threads, ServerState, testing::Values(0, 2));

TEST(ServerStateFrames, AreCheckedAgainstTheKeyAndItsOptimizer) {
  struct Case {
    const char* what;
    int worker;
    void (*change)(Header&);
  };
  const auto store = [](Header& h) {
    h.kind = FrameKind::kStore;
    h.encoding = 0;
    h.payload_bytes = 8;
  };
  const Case cases[] = {
      {"unexpected", 1, store},
      {"of a state", 0, [](Header& h) { h.part = 0; }},
      {"of a state", 1, [](Header& h) { h.part = 2; }},
      {"of a state", 0, [](Header& h) { h.part = kMaster; }},  // of float32
      {"another element type", 0, [](Header& h) { h.dtype = 1; }},
      {"another encoding", 0, [](Header& h) { h.encoding = 0; }},
      {"another encoding", 0, [](Header& h) { h.kind = FrameKind::kStore; }},
      {"another size", 0,
       [](Header& h) {
         h.kind = FrameKind::kStore;
         h.encoding = 0;
         h.payload_bytes = 4;
       }},
      {"out of turn", 0, [](Header& h) { h.round = 1; }},
      {"unexpected", 0, [](Header& h) { h.kind = FrameKind::kPart; }},
      {"of no key", 0, [](Header& h) { h.slice = 1; }},
  };
  for (const Case& each : cases) {
    StateJob job(2);
    job.server.set_optimizer(0, momentum());
    job.define(1, 2);
    job.initialise(1, {1, 1});
    Header header = Job::header(FrameKind::kFetch, 1, 0, 0, 0);
    header.part = 1;
    each.change(header);
    job.workers[static_cast<size_t>(each.worker)].send_bytes(&header, sizeof header);
    const std::string text = job.failure();
    EXPECT_NE(text.find(each.what), std::string::npos) << text;
    EXPECT_NE(text.find("worker " + std::to_string(each.worker)), std::string::npos) << text;
  }
}

TEST(ServerStateFrames, NeedAnOptimizer) {
  StateJob job(1);
  job.define(1, 1);
  job.initialise(1, {1});
  job.ask(0, 1, 0);
  EXPECT_NE(job.failure().find("of a state that its key's optimizer does not have"), std::string::npos);
}

TEST(ServerStateFrames, NeedAFirstValueAndCannotFollowThePushOfAnUnfinishedRound) {
  for (bool pushed : {false, true}) {
    StateJob job(2);
    job.server.set_optimizer(0, momentum());
    job.define(1, 1);
    if (pushed) {
      job.initialise(1, {1});
      job.push(1, 1, 1, {1});
    }
    job.ask(1, 1, pushed ? 1 : 0);
    const std::string text = job.failure();
    EXPECT_NE(text.find("worker 1 (there) sent a slice that is out of turn (key 'key1'"), std::string::npos) << text;
  }
}

}  // namespace
}  // namespace p3
