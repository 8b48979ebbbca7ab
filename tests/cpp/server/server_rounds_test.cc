// Rounds that are more than a push of each worker: skips, averages, compressed gradients, and init again in between.
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "base/half.h"
#include "p3/codec.h"
#include "p3/server.h"
#include "server/server_job.h"
#include "transport/encoded.h"

namespace p3 {
namespace {

Encoding encoding_of(const Header& header) { return static_cast<Encoding>(header.encoding); }

OptimizerSpec sgd(double momentum = 0, bool multi_precision = false) {
  return {"sgd", {{"momentum", momentum}, {"multi_precision", multi_precision}}};
}

Header bye() {
  Header made;
  made.kind = FrameKind::kBye;
  return made;
}

std::string left_out(const std::string& text, const std::string& part) {
  return text.find(part) == std::string::npos ? "'" + part + "' is not in: " + text : "";
}

class Rounds : public testing::TestWithParam<std::tuple<SumOrder, int>> {
 protected:
  static ServerOptions with() { return options(std::get<0>(GetParam()), std::get<1>(GetParam())); }
  static bool by_rank() { return std::get<0>(GetParam()) == SumOrder::kRank; }
};

TEST_P(Rounds, AreTheSumOfThosePresentInEveryMixture) {
  // The order of addition shows in these sums.
  const std::vector<float> gradients[3] = {{1e8f, 1}, {-1e8f, 2}, {1.0f, 4}};
  const unsigned seed = std::random_device()();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937 random(seed);
  Job job(3, with());
  job.define(1, 2);
  job.initialise(1, {0, 0});
  std::vector<int> arrival = {0, 1, 2};
  uint64_t received = 3;
  for (uint64_t round = 1; round <= 64; ++round) {
    const unsigned present = static_cast<unsigned>(round % 8);  // bit by bit: which worker has a gradient
    std::shuffle(arrival.begin(), arrival.end(), random);
    std::vector<int> added = arrival;
    if (by_rank()) std::sort(added.begin(), added.end());
    std::vector<float> sum;
    for (int worker : added) {
      if (!(present >> worker & 1)) continue;
      if (sum.empty())
        sum = gradients[worker];
      else
        for (size_t i = 0; i < sum.size(); ++i) sum[i] += gradients[worker][i];
    }
    for (int worker : arrival) {
      if (present >> worker & 1)
        job.push(worker, 1, round, gradients[worker]);
      else
        job.skip(worker, 1, round);
      ASSERT_TRUE(job.has_received(++received));  // or the order would be left to chance
    }
    for (int worker = 0; worker < 3; ++worker) {
      Header header;
      ASSERT_EQ(job.receive_value(worker, &header), sum) << "round " << round;
      EXPECT_EQ(header.round, round);
      EXPECT_EQ(encoding_of(header), present == 0 ? Encoding::kAbsent : Encoding::kPlain);
    }
  }
  EXPECT_EQ(job.server.counters().buffer_bytes, 0u);
}

TEST_P(Rounds, AreTheAverageOfThosePresent) {
  Job job(3, with());
  job.axes.reduction = Reduction::kAverage;
  job.define(1, 2);
  job.initialise(1, {0, 0});
  for (uint64_t round = 1; round <= 8; ++round) {
    const unsigned present = static_cast<unsigned>(round % 8);
    float sum = 0;
    int count = 0;
    for (int worker = 0; worker < 3; ++worker) {
      if (!(present >> worker & 1)) {
        job.skip(worker, 1, round);
        continue;
      }
      job.push(worker, 1, round, {float(1 << worker), 0});
      sum += float(1 << worker);
      ++count;
    }
    const auto expected = count == 0 ? std::vector<float>{} : std::vector<float>{sum / float(count), 0};
    for (int worker = 0; worker < 3; ++worker) EXPECT_EQ(job.receive_value(worker), expected) << "round " << round;
  }
}

TEST_P(Rounds, WithoutAnyGradientLeaveWeightAndMomentumAlone) {
  Job job(2, with());
  job.server.set_optimizer(0, sgd(0.5));
  job.define(1, 1);
  job.initialise(1, {10});
  job.push(0, 1, 1, {1}, 0, 0, 1.0);
  job.push(1, 1, 1, {1}, 0, 0, 1.0);
  for (int worker : {0, 1}) EXPECT_EQ(job.receive_value(worker), std::vector<float>{8});  // momentum -2
  for (uint64_t round : {2, 3}) {
    for (int worker : {1, 0}) job.skip(worker, 1, round);
    for (int worker : {0, 1}) {
      Header header;
      EXPECT_TRUE(job.receive_value(worker, &header).empty());
      EXPECT_EQ(encoding_of(header), Encoding::kAbsent);
    }
  }
  job.skip(0, 1, 4);
  job.push(1, 1, 4, {1}, 0, 0, 1.0);
  for (int worker : {0, 1}) EXPECT_EQ(job.receive_value(worker), std::vector<float>{6});  // 0.5 * -2 - 1
}

TEST_P(Rounds, WithAnOptimizerRescaleToTheAverage) {
  Job job(2, with());
  job.server.set_optimizer(0, sgd());
  job.axes.reduction = Reduction::kAverage;
  job.define(1, 1);
  job.initialise(1, {10});
  job.push(0, 1, 1, {1}, 0, 0, 1.0);
  job.push(1, 1, 1, {3}, 0, 0, 1.0);
  for (int worker : {0, 1}) EXPECT_EQ(job.receive_value(worker), std::vector<float>{8});
  job.skip(0, 1, 2);
  job.push(1, 1, 2, {3}, 0, 0, 1.0);
  for (int worker : {0, 1}) EXPECT_EQ(job.receive_value(worker), std::vector<float>{5});
}

TEST_P(Rounds, AddUpWhatTwoBitsSay) {
  Job job(2, with());
  const Compression compression{Encoding::kTwoBit, 0.5f};
  job.set_codec(compression);
  const size_t n = 35;
  job.define(1, n);
  job.initialise(1, std::vector<float>(n, 0));
  std::vector<float> residual[2] = {std::vector<float>(n), std::vector<float>(n)};
  for (uint64_t round = 1; round <= 4; ++round) {
    std::vector<float> sum(n);
    for (int worker : {1, 0}) {
      if (worker == 0 && round == 3) {
        job.skip(worker, 1, round);
        continue;
      }
      std::vector<float> gradient(n);
      for (size_t i = 0; i < n; ++i) gradient[i] = float(int(i) - 17) * 0.1f * float(worker + 1);
      Header header = Job::header(FrameKind::kPush, 1, 0, round, n);
      header.encoding = static_cast<uint8_t>(Encoding::kTwoBit);
      header.payload_bytes = static_cast<uint32_t>(encoded_bytes(Encoding::kTwoBit, DType::kFloat32, n));
      std::vector<char> payload(header.payload_bytes);
      encode(compression, gradient.data(), residual[worker].data(), payload.data(), n);
      add_encoded_to_sum(compression, sum.data(), payload.data(), n);
      job.workers[static_cast<size_t>(worker)].send(header, payload.data());
    }
    for (int worker : {0, 1}) EXPECT_EQ(job.receive_value(worker), sum) << "round " << round;
  }
}

const Compression kHalves{Encoding::kFloat16};

TEST_P(Rounds, SendFloat16SumsAndExactWeights) {
  for (bool with_optimizer : {false, true}) {
    Job job(2, with());
    if (with_optimizer) job.server.set_optimizer(0, sgd());
    job.set_codec(kHalves);
    job.define(1, 3);
    const std::vector<float> first = {1.0001f, 2.0001f, 70000.0f};
    job.initialise(1, first);  // never rounded
    const std::vector<char> gradient = encoded(kHalves, {1, 0.0001f, 40001});
    const std::vector<float> sent = decoded(kHalves, gradient, 3);
    const std::vector<float> twice = {2 * sent[0], 2 * sent[1], 2 * sent[2]};
    for (uint64_t round = 1; round <= 2; ++round) {
      for (int worker : {0, 1}) {
        Header header = Job::header(FrameKind::kPush, 1, 0, round, 3);
        header.encoding = static_cast<uint8_t>(Encoding::kFloat16);
        header.payload_bytes = static_cast<uint32_t>(gradient.size());
        header.scalars.lr = 1;
        job.workers[static_cast<size_t>(worker)].send(header, gradient.data());
      }
      for (int worker : {0, 1}) {
        RawPeer& peer = job.workers[static_cast<size_t>(worker)];
        const Header header = peer.must_receive();
        if (with_optimizer) {
          ASSERT_EQ(encoding_of(header), Encoding::kPlain);
          float weight[3];
          ASSERT_EQ(peer.payload.size(), sizeof weight);
          std::memcpy(weight, peer.payload.data(), sizeof weight);
          if (round == 1) {
            for (size_t i = 0; i < 3; ++i) EXPECT_EQ(weight[i], first[i] - twice[i]);
          }
        } else {
          ASSERT_EQ(encoding_of(header), Encoding::kFloat16);
          EXPECT_EQ(peer.payload, encoded(kHalves, twice));
          EXPECT_EQ(decoded(kHalves, peer.payload, 3), twice);
          EXPECT_EQ(twice[2], 80000);  // which float16 alone does not hold
        }
      }
    }
  }
}

// A worker reads nothing while rank 0 goes on: what it receives in the end is every value, whole.
TEST_P(Rounds, ASlowWorkerGetsTheLastValueWholeThoughRankZeroGivesNewOnes) {
  enum Kind { kSums, kHalfSums, kWeights };
  for (Kind kind : {kSums, kHalfSums, kWeights}) {
    SCOPED_TRACE(kind);
    Job job(2, with(), 4096);
    if (kind == kWeights) job.server.set_optimizer(0, sgd());
    if (kind == kHalfSums) job.set_codec(kHalves);
    constexpr uint32_t kElements = 100000;  // more than all buffers of a connection hold
    KeyPlan plan = job.axes;
    plan.wire_key = 1;
    plan.elements = plan.slice_elements = kElements;
    job.server.define(plan, "key1", 0);
    job.initialise(1, std::vector<float>(kElements, 100));
    const std::vector<char> halves = encoded(kHalves, std::vector<float>(kElements, 2));
    for (int worker : {0, 1}) {
      if (kind == kHalfSums) {
        Header header = Job::header(FrameKind::kPush, 1, 0, 1, kElements);
        header.encoding = static_cast<uint8_t>(Encoding::kFloat16);
        header.payload_bytes = static_cast<uint32_t>(halves.size());
        job.workers[static_cast<size_t>(worker)].send(header, halves.data());
      } else {
        job.push(worker, 1, 1, std::vector<float>(kElements, 2), 0, 0, 1);
      }
    }
    job.workers[0].must_receive();
    for (float value : {5.0f, 6.0f, 7.0f}) {
      job.init(0, 1, 1, std::vector<float>(kElements, value));
      EXPECT_EQ(job.receive_value(0), std::vector<float>(kElements, value));
    }
    Header header;
    const std::vector<float> last = job.receive_value(1, &header);
    if (kind == kHalfSums) {
      EXPECT_EQ(encoding_of(header), Encoding::kFloat16);
      ASSERT_EQ(job.workers[1].payload.size(), halves.size());
      EXPECT_EQ(decoded(kHalves, job.workers[1].payload, kElements), std::vector<float>(kElements, 4));
    } else {
      EXPECT_EQ(last, std::vector<float>(kElements, kind == kWeights ? 96 : 4));
    }
    job.init(1, 1, 1);
    EXPECT_EQ(job.receive_value(1, &header), std::vector<float>(kElements, 7));
    EXPECT_EQ(header.round, 1u);
  }
}

INSTANTIATE_TEST_SUITE_P(Server, Rounds,
                         testing::Combine(testing::Values(SumOrder::kRank, SumOrder::kArrival), testing::Values(0, 2)));

TEST(ServerInit, TheNthOfAWorkerWaitsForRankZerosNth) {
  Job job(2);
  job.define(1, 1);
  job.initialise(1, {1});
  for (uint64_t round = 0; round < 3; ++round) {
    job.init(1, 1, round);  // rank 0's is still to come: the old value would be wrong
    ASSERT_TRUE(job.has_received(2 + 4 * round + 1));
    job.init(0, 1, round, {float(round + 2)});
    for (int worker : {0, 1}) {
      Header header;
      EXPECT_EQ(job.receive_value(worker, &header), std::vector<float>{float(round + 2)});
      EXPECT_EQ(header.round, round);
    }
    for (int worker : {0, 1}) job.push(worker, 1, round + 1, {1});
    for (int worker : {0, 1}) EXPECT_EQ(job.receive_value(worker), std::vector<float>{2});
  }
}

TEST(ServerInit, MayComeWhenTheOthersHavePushed) {
  Job job(2);
  job.server.set_optimizer(0, sgd());
  job.define(1, 1);
  job.initialise(1, {1});
  job.init(0, 1, 0, {50});
  EXPECT_EQ(job.receive_value(0), std::vector<float>{50});
  job.push(0, 1, 1, {1}, 0, 0, 1);
  ASSERT_TRUE(job.has_received(4));
  job.init(1, 1, 0);
  EXPECT_EQ(job.receive_value(1), std::vector<float>{50});
  job.push(1, 1, 1, {1}, 0, 0, 1);
  for (int worker : {0, 1}) EXPECT_EQ(job.receive_value(worker), std::vector<float>{48});
}

TEST(ServerInit, OfAFloat16KeyRenewsItsMasterAndKeepsTheMomentum) {
  Job job(1);
  job.server.set_optimizer(0, sgd(0.5, true));
  job.define(1, 1, DType::kFloat16);
  EXPECT_EQ(job.exchange_half(FrameKind::kInit, 0, 10), 10);
  EXPECT_EQ(job.exchange_half(FrameKind::kPush, 1, 2), 8);
  EXPECT_EQ(job.exchange_half(FrameKind::kInit, 1, 100), 100);
  EXPECT_EQ(job.exchange_half(FrameKind::kPush, 2, 2), 97);  // 100 + 0.5 * -2 - 2
}

TEST(ServerInit, NobodyWaitsForTheValueOfARankZeroThatHasLeft) {
  for (bool ask_first : {true, false}) {
    Job job(2);
    job.define(1, 1);
    job.initialise(1, {1});
    if (ask_first) {
      job.init(1, 1, 0);
      ASSERT_TRUE(job.has_received(3));
    }
    job.workers[0].send(bye());
    if (!ask_first) job.init(1, 1, 0);
    const std::string text = job.failure();
    EXPECT_EQ(left_out(text, "worker 0 (there) ended, but others still wait for its value of key 'key1'"), "");
    EXPECT_EQ(job.workers[1].receive_failure(), text);
  }
}

TEST(ServerInit, ALateWorkerIsAnsweredThoughRankZeroHasLeft) {
  Job job(2);
  job.define(1, 1);
  job.init(0, 1, 0, {3});
  EXPECT_EQ(job.receive_value(0), std::vector<float>{3});
  job.workers[0].send(bye());
  job.init(1, 1, 0);
  EXPECT_EQ(job.receive_value(1), std::vector<float>{3});
}

TEST(ServerSkip, HasNoScalarsToDisagreeWith) {
  Job job(3);
  job.server.set_optimizer(0, sgd());
  job.define(1, 1);
  job.initialise(1, {1});
  job.skip(0, 1, 1);
  for (int worker : {1, 2}) job.push(worker, 1, 1, {0.25f}, 0, 0, 1.0);
  for (int worker : {0, 1, 2}) EXPECT_EQ(job.receive_value(worker), std::vector<float>{0.5f});
  job.skip(0, 1, 2);
  job.push(1, 1, 2, {1}, 0, 0, 0.1);
  job.push(2, 1, 2, {1}, 0, 0, 0.2);
  const std::string text = job.failure();
  for (const char* part : {"worker 1 (there) (lr 0.1", "worker 2 (there) (lr 0.2", "round 2 of key 'key1'"})
    EXPECT_EQ(left_out(text, part), "");
}

TEST(ServerSkip, ADeadWorkerIsNamedToThoseWhoSkip) {
  Job job(3);
  job.define(1, 1);
  job.initialise(1, {0});
  job.skip(0, 1, 1);
  job.skip(2, 1, 1);
  ASSERT_TRUE(job.has_received(5));
  job.workers[1].close();
  const std::string text = job.failure();
  EXPECT_EQ(left_out(text, "lost worker 1 (there)"), "");
  EXPECT_EQ(left_out(text, "round 1 of key 'key1'"), "");
  EXPECT_EQ(job.workers[0].receive_failure(), text);
  EXPECT_EQ(job.workers[2].receive_failure(), text);
}

TEST(ServerSkip, NeedsEveryWorkerAsAPushDoes) {
  Job job(2);
  job.define(1, 1);
  job.initialise(1, {0});
  job.workers[1].send(bye());
  job.skip(0, 1, 1);
  EXPECT_EQ(left_out(job.failure(), "worker 1 (there) ended, but others still push round 1 of key 'key1'"), "");
}

TEST(ServerCompression, NoOtherEncodingThanAgreedIsTaken) {
  for (Encoding agreed : {Encoding::kFloat16, Encoding::kTwoBit, Encoding::kOneBit}) {
    for (Encoding sent : {Encoding::kPlain, Encoding::kFloat16, Encoding::kTwoBit, Encoding::kOneBit}) {
      if (sent == agreed) continue;
      Job job(1);
      job.set_codec({agreed, 0.5f});
      job.define(1, 16);
      job.initialise(1, std::vector<float>(16));
      Header header = Job::header(FrameKind::kPush, 1, 0, 1, 16);
      header.encoding = static_cast<uint8_t>(sent);
      header.payload_bytes = static_cast<uint32_t>(encoded_bytes(sent, DType::kFloat32, 16));
      job.workers[0].send_bytes(&header, sizeof header);
      EXPECT_EQ(left_out(job.failure(), "in another encoding than agreed"), "");
    }
  }
}

TEST(ServerPlans, MakeSense) {
  const auto problem = [](auto change) -> std::string {
    KeyPlan plan;
    plan.wire_key = 2;
    plan.elements = 1;
    change(plan);
    Job job(1);
    try {
      job.server.define(plan, "steps", 0);
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kUsage);
      return error.what();
    }
    return "";
  };
  const Compression top_k{Encoding::kTopK, {0.1, 0, 0, 1}};
  EXPECT_EQ(problem([](KeyPlan&) {}), "");
  EXPECT_EQ(left_out(problem([](KeyPlan& plan) { plan.codec = {Encoding::kTwoBit, -1}; }), "threshold is -1"), "");
  EXPECT_EQ(left_out(problem([](KeyPlan& plan) {
                       plan.codec = {Encoding::kTwoBit, 0.5f};
                       plan.dtype = DType::kFloat64;
                     }),
                     "2bit is not for such keys"),
            "");
  EXPECT_EQ(left_out(problem([&](KeyPlan& plan) { plan.codec = top_k; }), "contradict each other"), "");
  EXPECT_EQ(left_out(problem([](KeyPlan& plan) { plan.update = Update::kSteps; }), "contradict each other"), "");
  EXPECT_EQ(left_out(problem([&](KeyPlan& plan) {
                       plan.codec = top_k;
                       plan.update = Update::kSteps;
                       plan.reduction = Reduction::kMean;
                     }),
                     "summed and not averaged"),
            "");
  EXPECT_EQ(left_out(problem([&](KeyPlan& plan) {
                       plan.codec = top_k;
                       plan.update = Update::kSteps;
                       plan.staleness = 1;
                     }),
                     "with staleness the servers update"),
            "");
  EXPECT_EQ(left_out(problem([](KeyPlan& plan) { plan.update = Update::kWorkers; }), "what is gathered"), "");
  EXPECT_EQ(left_out(problem([](KeyPlan& plan) {
                       plan.dtype = DType::kInt32;
                       plan.reduction = Reduction::kAverage;
                     }),
                     "averages cannot be of type int32"),
            "");
  // The state of a float16 key has 4 bytes to each element, and its length must fit into a header.
  EXPECT_EQ(left_out(problem([](KeyPlan& plan) {
                       plan.slice_elements = 1u << 30;
                       plan.dtype = DType::kFloat16;
                     }),
                     "slices are too large"),
            "");
}

// A server on the machine of an odd rank: there rank 1 pushes for rank 0, whose pushes go elsewhere.
TEST(Server, AnswersGroupsWithThePriorityOfTheirPush) {
  ServerOptions with = options();
  with.groups = Machines(std::vector<int>{0, 0, 1, 1}, 1);
  Job job(4, with);
  job.define(1, 2);
  job.initialise(1, {0, 0});
  for (uint64_t round = 1; round <= 2; ++round) {
    const auto priority = -7 * static_cast<int32_t>(round);
    for (size_t leader : {3, 1}) {
      Header push = Job::header(FrameKind::kPush, 1, 0, round, 2, priority);
      push.of_machine = 1;
      push.contributors = 2;
      const std::vector<float> sum = {1, 2};
      job.workers[leader].send(push, sum.data());
    }
    for (int leader : {1, 3}) {
      Header got;
      EXPECT_EQ(job.receive_value(leader, &got), (std::vector<float>{2, 4}));
      EXPECT_EQ(got.priority, priority);
    }
  }
}

}  // namespace
}  // namespace p3
