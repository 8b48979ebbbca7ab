// Keys with deep gradient compression on their server: it takes the workers' steps, and passes on their sum.
#include <cstring>

#include "base/buffer_pool.h"
#include "server/server_job.h"
#include "wire/top_k.h"

namespace p3 {
namespace {

constexpr size_t kElements = 40;

Encoding encoding_of(const Header& header) { return static_cast<Encoding>(header.encoding); }

std::string left_out(const std::string& text, const std::string& part) {
  return text.find(part) == std::string::npos ? text : "";
}

Compression top_k(double ratio = 0.001) { return {Encoding::kTopK, {ratio, 0, 0, 1}}; }

OptimizerSpec momentum() { return {"sgd", {{"momentum", 0.9}}}; }

using Elements = std::vector<std::pair<size_t, float>>;

struct StepsJob : Job {
  explicit StepsJob(int num_workers, ServerOptions with = options()) : Job(num_workers, std::move(with)) {
    set_codec(top_k());
    server.set_optimizer(0, momentum());
    define(1, kElements);
    value.assign(kElements, 1);
    value[3] = -0.0f;
    initialise(1, value);
  }

  Header push_header(uint64_t round, size_t bytes) {
    Header made = header(FrameKind::kPush, 1, 0, round, kElements);
    made.encoding = static_cast<uint8_t>(Encoding::kTopK);
    made.payload_bytes = static_cast<uint32_t>(bytes);
    made.scalars = {0.5, wd, 1, 0, 1};
    return made;
  }

  static std::vector<char> payload_of(const Elements& chosen) {
    std::vector<char> payload(top_k_bytes(chosen.size(), kElements));
    TopKWriter writer(payload.data(), chosen.size(), kElements);
    for (const auto& [offset, element] : chosen) writer.add(offset, element);
    return payload;
  }

  void push_step(int worker, uint64_t round, const Elements& chosen) {
    const std::vector<char> payload = payload_of(chosen);
    workers[static_cast<size_t>(worker)].send(push_header(round, payload.size()), payload.data());
  }

  // What came, as this worker takes it: the value follows.
  Encoding take(int worker, std::vector<float>& landing) {
    RawPeer& peer = workers[static_cast<size_t>(worker)];
    const Header got = peer.must_receive();
    EXPECT_EQ(got.kind, FrameKind::kValue);
    if (encoding_of(got) == Encoding::kPlain) {
      EXPECT_EQ(peer.payload.size(), kElements * sizeof(float));
      std::memcpy(landing.data(), peer.payload.data(), kElements * sizeof(float));
    } else if (encoding_of(got) == Encoding::kTopK) {
      EXPECT_EQ(problem_with_top_k(peer.payload.data(), peer.payload.size(), kElements), nullptr);
      const float decay = static_cast<float>(got.scalars.lr) * static_cast<float>(got.scalars.wd);
      if (decay != 0)
        for (float& weight : landing) weight -= decay * weight;
      each_of_top_k(peer.payload.data(), kElements, [&](size_t offset, float step) { landing[offset] -= step; });
    }
    return encoding_of(got);
  }

  double wd = 0;
  std::vector<float> value;
};

class ServerSteps : public testing::TestWithParam<std::pair<SumOrder, int>> {
 protected:
  static ServerOptions with() { return options(GetParam().first, GetParam().second); }
};

// Or the pool would keep a buffer of each size that ever came.
TEST(ServerBuffers, OfTopKHaveFewSizes) {
  StepsJob job(2);
  std::vector<float> landing = job.value;
  for (size_t count = 1; count <= 6; ++count) {
    Elements chosen;
    for (size_t i = 0; i < count; ++i) chosen.push_back({i, 1.f});
    job.push_step(1, count, chosen);
    const size_t room = BufferPool::roomy(top_k_bytes(count, kElements));
    EXPECT_EQ(room, 64u);
    EXPECT_TRUE(eventually(
        [&] { return job.server.counters().buffer_bytes % 64 == 0 && job.server.counters().buffer_bytes >= room; }));
    job.push_step(0, count, {});
    for (int worker : {0, 1}) job.take(worker, landing);
  }
}

TEST_P(ServerSteps, AddUpAndComeBackWithTheElementsOfAll) {
  StepsJob job(3, with());
  std::vector<float> landing = job.value, expected = job.value;
  job.push_step(2, 1, {{0, 0.25f}, {7, 1}, {39, 2}});
  job.push_step(0, 1, {{7, 2}, {8, 0.5f}});
  job.push_step(1, 1, {{8, -0.5f}, {20, 4}});  // the sum of element 8 is 0, and is not sent
  expected[0] -= 0.25f;
  expected[7] -= 3;
  expected[20] -= 4;
  expected[39] -= 2;
  for (int worker : {0, 1, 2}) {
    std::vector<float> its = landing;
    EXPECT_EQ(job.take(worker, its), Encoding::kTopK);
    EXPECT_EQ(job.workers[static_cast<size_t>(worker)].payload.size(), top_k_bytes(4, kElements));
    EXPECT_EQ(its, expected);
  }
}

TEST_P(ServerSteps, GiveTheServerTheValueOfTheWorkers) {
  StepsJob job(2, with());
  job.wd = 0.25;
  std::vector<float> landings[2] = {job.value, job.value};
  for (uint64_t round = 1; round <= 6; ++round) {
    const auto offset = static_cast<size_t>(round);
    job.push_step(0, round, {{offset, 0.1f}, {offset + 1, 0.7f}});
    if (round == 4)
      job.skip(1, 1, round);
    else
      job.push_step(1, round, {{offset + 1, 0.3f}, {offset + 9, -1e-3f}});
    for (size_t worker : {0, 1}) EXPECT_EQ(job.take(static_cast<int>(worker), landings[worker]), Encoding::kTopK);
  }
  EXPECT_EQ(landings[0], landings[1]);
  Header capture = Job::header(FrameKind::kCapture, 1, 0, 6, 0);
  capture.scalars.updates = 6;
  job.workers[0].send(capture);
  EXPECT_EQ(job.workers[0].must_receive().kind, FrameKind::kPart);
  const auto captured = job.server.take_captured(6);
  ASSERT_EQ(captured.size(), 1u);
  EXPECT_EQ(std::memcmp(captured[0].data.get(), landings[0].data(), kElements * sizeof(float)), 0);
  // A new value comes whole.
  job.init(1, 1, 6);
  job.init(0, 1, 6, job.value);
  for (int worker : {0, 1}) EXPECT_EQ(job.receive_value(worker), job.value);
}

TEST_P(ServerSteps, ThatTouchMostElementsComeBackAsTheValue) {
  StepsJob job(2, with());
  job.wd = 0.5;
  Elements first, second;
  std::vector<float> expected = job.value;
  for (float& weight : expected) weight -= 0.25f * weight;
  for (size_t i = 0; i < kElements; ++i) {
    (i % 2 == 0 ? first : second).push_back({i, 0.5f + static_cast<float>(i)});
    expected[i] -= 0.5f + static_cast<float>(i);
  }
  job.push_step(0, 1, first);
  job.push_step(1, 1, second);
  for (int worker : {0, 1}) {
    std::vector<float> landing(kElements);
    EXPECT_EQ(job.take(worker, landing), Encoding::kPlain);
    EXPECT_EQ(landing, expected);
  }
}

TEST_P(ServerSteps, MayBePlain) {
  StepsJob job(2, with());
  std::vector<float> expected = job.value, landing = job.value, all(kElements, 0.125f);
  Header plain = job.push_header(1, kElements * sizeof(float));
  plain.encoding = static_cast<uint8_t>(Encoding::kPlain);
  job.workers[0].send(plain, all.data());
  job.push_step(1, 1, {{1, 1}});
  for (float& weight : expected) weight -= 0.125f;
  expected[1] = 1 - 1.125f;
  EXPECT_EQ(job.take(0, landing), Encoding::kPlain);
  EXPECT_EQ(landing, expected);
}

TEST_P(ServerSteps, OfNobodyLeaveTheValue) {
  StepsJob job(2, with());
  job.wd = 0.5;
  for (int worker : {0, 1}) job.skip(worker, 1, 1);
  for (int worker : {0, 1}) {
    std::vector<float> landing = job.value;
    EXPECT_EQ(job.take(worker, landing), Encoding::kAbsent);
  }
}

INSTANTIATE_TEST_SUITE_P(Orders, ServerSteps,
                         testing::Values(std::make_pair(SumOrder::kRank, 0), std::make_pair(SumOrder::kArrival, 0),
                                         std::make_pair(SumOrder::kRank, 2)));

TEST(ServerStepsOfOneMachine, AreAddedUpByMachine) {
  ServerOptions with = options();
  with.machines = Machines(std::vector<int>{0, 1, 0});
  StepsJob job(3, with);  // compressed keys have no leader
  for (int worker : {2, 1, 0})
    job.push_step(worker, 1, {{static_cast<size_t>(worker), 1}, {9, 0.1f * float(worker + 1)}});
  std::vector<float> expected = job.value;
  for (size_t i : {0, 1, 2}) expected[i] -= 1;
  expected[9] -= (0.1f * 1 + 0.1f * 3) + 0.1f * 2;
  for (int worker : {0, 1, 2}) {
    std::vector<float> landing = job.value;
    EXPECT_EQ(job.take(worker, landing), Encoding::kTopK);
    EXPECT_EQ(landing, expected);
  }
}

// It reads nothing while others give new values; what it gets is what each round was.
TEST(ServerStepsOfASlowWorker, ComeWholeThoughRankZeroGivesANewValue) {
  StepsJob job(2);
  std::vector<float> landing = job.value, its = job.value;
  for (int worker : {0, 1}) job.push_step(worker, 1, {{9, 0.25f}});
  EXPECT_EQ(job.take(0, landing), Encoding::kTopK);
  const std::vector<float> other(kElements, 7);
  job.init(0, 1, 1, other);
  EXPECT_EQ(job.receive_value(0), other);
  EXPECT_EQ(job.take(1, its), Encoding::kTopK);
  EXPECT_EQ(its, landing);
  job.init(1, 1, 1);
  EXPECT_EQ(job.receive_value(1), other);
}

TEST(ServerStepsState, IsOnlyTheValue) {
  StepsJob job(1);
  job.push_step(0, 1, {{1, 1}});
  std::vector<float> landing = job.value;
  EXPECT_EQ(job.take(0, landing), Encoding::kTopK);
  Header capture = Job::header(FrameKind::kCapture, 1, 0, 1, 0);
  capture.scalars.updates = 5;
  job.workers[0].send(capture);
  EXPECT_EQ(job.workers[0].must_receive().kind, FrameKind::kPart);
  const auto captured = job.server.take_captured(5);
  ASSERT_EQ(captured.size(), 1u);
  EXPECT_EQ(captured[0].part, 0);
  EXPECT_EQ(std::memcmp(captured[0].data.get(), landing.data(), kElements * sizeof(float)), 0);
  Header fetch = Job::header(FrameKind::kFetch, 1, 0, 1, 0);
  fetch.part = 1;
  job.workers[0].send(fetch);
  EXPECT_EQ(left_out(job.failure(), "of a state that its key's optimizer does not have"), "");
}

TEST(ServerStepsRefusal, OfPayloadsThatMakeNoSense) {
  struct Case {
    const char* what;
    Elements chosen;
    void (*change)(Header&, std::vector<char>&);
  };
  const auto nothing = [](Header&, std::vector<char>&) {};
  const Case cases[] = {
      {"do not ascend within its slice", {{5, 1}, {4, 1}}, nothing},
      {"do not ascend within its slice", {{5, 1}, {5, 1}}, nothing},
      {"do not ascend within its slice", {{kElements, 1}}, nothing},
      {"than its number of elements says", {{5, 1}}, [](Header&, std::vector<char>& payload) { payload[0] = 2; }},
      {"than its number of elements says", {{5, 1}}, [](Header&, std::vector<char>& payload) { payload[3] = 0x40; }},
      {"of another size than agreed", {{5, 1}}, [](Header& header, std::vector<char>&) { --header.payload_bytes; }},
      {"of another size than agreed",
       {{5, 1}},
       [](Header& header, std::vector<char>&) { header.payload_bytes = 4 + 6 * kElements; }},
      {"of another size than agreed", {{5, 1}}, [](Header& header, std::vector<char>&) { header.payload_bytes = 0; }},
      {"in another encoding than agreed",
       {{5, 1}},
       [](Header& header, std::vector<char>&) { header.encoding = static_cast<uint8_t>(Encoding::kTwoBit); }},
  };
  for (const Case& each : cases) {
    SCOPED_TRACE(&each - cases);
    StepsJob job(1);
    std::vector<char> payload = StepsJob::payload_of(each.chosen);
    Header header = job.push_header(1, payload.size());
    each.change(header, payload);
    payload.resize(header.payload_bytes);
    job.workers[0].send(header, payload.data());
    EXPECT_EQ(left_out(job.failure(), each.what), "");
  }
}

TEST(ServerStepsRefusal, OfPlainKeysThatGetThem) {
  Job job(1);
  job.server.set_optimizer(0, momentum());
  job.define(1, kElements);
  job.initialise(1, std::vector<float>(kElements, 1));
  job.push(0, 1, 1, std::vector<float>(kElements, 1), 0, 0, 0.5);  // the servers' SGD with momentum
  EXPECT_EQ(job.receive_value(0), std::vector<float>(kElements, 0.5f));
  job.push(0, 1, 2, std::vector<float>(kElements, 0), 0, 0, 0.5);
  EXPECT_EQ(job.receive_value(0), std::vector<float>(kElements, 0.5f - 0.9f * 0.5f));
  Header header = Job::header(FrameKind::kPush, 1, 0, 3, kElements);
  header.encoding = static_cast<uint8_t>(Encoding::kTopK);
  header.payload_bytes = 10;
  job.workers[0].send_bytes(&header, sizeof header);
  EXPECT_EQ(left_out(job.failure(), "in another encoding than agreed"), "");
}

TEST(ServerStepsRefusal, OfOptimizersThatAreNotSgdAndOfNone) {
  const auto refusal = [](auto prepare) -> std::string {
    Job job(1);
    job.set_codec(top_k());
    try {
      prepare(job);
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  };
  const auto with = [&](const OptimizerSpec& spec) {
    const std::string before = refusal([&](Job& job) {
      job.server.set_optimizer(0, spec);
      job.define(1, kElements);
    });
    EXPECT_EQ(refusal([&](Job& job) {
                job.define(1, kElements);
                job.server.set_optimizer(0, spec);
              }),
              before);
    return before;
  };
  EXPECT_EQ(with(momentum()), "");
  EXPECT_EQ(with({"torch_sgd", {{"momentum", 0.9}}}), "");
  const OptimizerSpec others[] = {{"adam", {}},
                                  {"sgd", {{"momentum", 0.9}, {"clip_gradient", 1}}},
                                  {"torch_sgd", {{"momentum", 0.9}, {"nesterov", 1}}},
                                  {"torch_sgd", {{"momentum", 0.9}, {"dampening", 0.1}}},
                                  {"torch_sgd", {{"maximize", 1}}}};
  for (const OptimizerSpec& other : others)
    EXPECT_EQ(left_out(with(other), "SGD with momentum alone"), "") << other.name;
  Job job(1);
  job.set_codec(top_k());
  job.define(1, kElements);
  job.initialise(1, std::vector<float>(kElements, 1));
  const std::vector<char> payload = StepsJob::payload_of({{1, 1}});
  Header header = Job::header(FrameKind::kPush, 1, 0, 1, kElements);
  header.encoding = static_cast<uint8_t>(Encoding::kTopK);
  header.payload_bytes = static_cast<uint32_t>(payload.size());
  job.workers[0].send(header, payload.data());
  EXPECT_EQ(left_out(job.failure(), "which needs SGD on the servers"), "");
}

}  // namespace
}  // namespace p3
