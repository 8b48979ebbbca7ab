// Compressed keys where workers share machines: what the others push is plain, and the leader encodes their sum, once.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "codec/standard.h"
#include "p3/codec.h"
#include "worker/local_job.h"

namespace p3 {
namespace {

const Compression kTwoBits(Encoding::kTwoBit, 0.5);

struct EncodingLeader : Leader {
  using Leader::Leader;
  // Borrows `own` until the round is over.
  void push(const std::vector<float>& own, const std::vector<float>& neighbours) {
    ++round;
    worker.push(key, own.data(), landing.data(), 0, {}, pending.done());
    neighbour->send(push_of(round), neighbours.data());
  }
  void skip(bool neighbour_too) {
    ++round;
    worker.skip(key, landing.data(), 0, pending.done());
    Header absent = push_of(round);
    if (neighbour_too) {
      absent.encoding = static_cast<uint8_t>(Encoding::kAbsent);
      absent.payload_bytes = 0;
    }
    neighbour->send(absent, ones.data());
  }
  // The machine's push, decoded; empty: it is absent.
  std::vector<float> pushed(const Compression& codec) {
    pushed_header = server->must_receive();
    EXPECT_EQ(pushed_header.kind, FrameKind::kPush);
    EXPECT_EQ(pushed_header.of_machine, 1);
    if (static_cast<Encoding>(pushed_header.encoding) == Encoding::kAbsent) return {};
    EXPECT_EQ(static_cast<Encoding>(pushed_header.encoding), codec.encoding);
    EXPECT_EQ(pushed_header.payload_bytes, codec.bytes(4));
    std::vector<float> values(4);
    start_encoded_sum(codec, values.data(), server->payload.data(), 4);
    return values;
  }
  // The value of the round, plain, to the neighbour as well.
  void answer() {
    Header header = pushed_header;
    header.kind = FrameKind::kValue;
    header.contributors = 0;
    header.encoding = static_cast<uint8_t>(Encoding::kPlain);
    header.payload_bytes = 16;
    server->send(header, ones.data());
    EXPECT_EQ(neighbour->must_receive().payload_bytes, 16u);
    EXPECT_EQ(pending.wait_for(1), "");
  }
  std::vector<float> round_of(const std::vector<float>& own, const std::vector<float>& neighbours) {
    push(own, neighbours);
    const auto values = pushed(kTwoBits);
    answer();
    return values;
  }
  std::vector<float> residual() {
    std::vector<float> kept(worker.residual_floats(key), -1);
    worker.capture(key, 1, kept.data(), pending.done());
    Header header = server->must_receive();
    header.kind = FrameKind::kPart;
    server->send(header);
    EXPECT_EQ(pending.wait_for(1), "");
    return kept;
  }
  uint64_t round = 0;
  Header pushed_header;
};

using Floats = std::vector<float>;

TEST(MachinesEncodedPush, IsOfTheSumAndKeepsWhatTheSumHasMore) {
  EncodingLeader job(kTwoBits);
  // Neither worker reaches the threshold, both together do.
  EXPECT_EQ(job.round_of({0.25, 0.25, -0.25, 0}, {0.375, 0.125, -0.5, 0.25}), (Floats{0.5, 0, -0.5, 0}));
  EXPECT_EQ(job.pushed_header.contributors, 2);
  EXPECT_EQ(job.residual(), (Floats{0.125, 0.375, -0.25, 0.25}));
  EXPECT_EQ(job.round_of({0, 0.125, 0, 0}, {0, 0, -0.125, 0.25}), (Floats{0, 0.5, 0, 0.5}));
  EXPECT_EQ(job.residual(), (Floats{0.125, 0, -0.375, 0}));
  EXPECT_TRUE(eventually([&] { return job.worker.counters().buffer_bytes == 0; }));
}

TEST(MachinesEncodedPush, LeavesTheResidualAloneWhereNobodyHasAGradient) {
  EncodingLeader job(kTwoBits);
  job.round_of({0.25, 0, 0, 0}, {0, 0, 0, 0});
  job.skip(/*neighbour_too=*/true);
  EXPECT_EQ(job.pushed(kTwoBits), Floats());
  job.answer();
  EXPECT_EQ(job.residual(), (Floats{0.25, 0, 0, 0}));
}

TEST(MachinesEncodedPush, OfASumThatOverflowsIsNaNAndLeavesTheResidualAlone) {
  EncodingLeader job(kTwoBits);
  job.round_of({0.25, 0, 0, 0}, {0, 0, 0, 0});
  const auto sent = job.round_of({1, 1, 1, 1}, {0, std::numeric_limits<float>::infinity(), 0, 0});
  EXPECT_TRUE(std::all_of(sent.begin(), sent.end(), [](float one) { return std::isnan(one); }));
  EXPECT_EQ(job.residual(), (Floats{0.25, 0, 0, 0}));
}

TEST(MachinesEncodedPush, HasNeighboursThatSendPlainGradients) {
  EncodingLeader job(kTwoBits);
  Header encoded = Leader::push_of(1);
  encoded.encoding = static_cast<uint8_t>(Encoding::kTwoBit);
  encoded.payload_bytes = 4;
  job.neighbour->send(encoded, job.ones.data());
  EXPECT_NE(job.failure().find("in another encoding than agreed"), std::string::npos);
}

// A loss scaler says so on the leader also where the leader itself had no gradient.
TEST(MachinesEncodedPush, IsTakenBackByALossScaler) {
  EncodingLeader job(kTwoBits);
  EXPECT_THROW(job.worker.change_residual(job.key, true, 1), Error);  // nothing was kept
  job.worker.keep_former_residual(job.key);
  job.round_of({0.25, 0, 0, 0}, {0, 0.125, 0, 0});

  job.skip(/*neighbour_too=*/false);
  EXPECT_THROW(job.worker.change_residual(job.key, true, 1), Error);  // others push meanwhile
  EXPECT_EQ(job.pushed(kTwoBits), (Floats{0.5, 0.5, 0.5, 0.5}));
  EXPECT_EQ(job.pushed_header.contributors, 1);
  job.answer();
  job.worker.change_residual(job.key, true, 2);
  EXPECT_EQ(job.residual(), (Floats{0.5, 0.25, 0, 0}));

  // Nobody pushes: what is to be done stays so, and there is nothing to take back.
  job.skip(/*neighbour_too=*/true);
  job.pushed(kTwoBits);
  job.answer();
  job.worker.change_residual(job.key, true, 1);
  EXPECT_EQ(job.residual(), (Floats{0.5, 0.25, 0, 0}));
  EXPECT_EQ(job.round_of({0, 0, 0, 0.125}, {0, 0.125, 0, 0}), (Floats{0.5, 0, 0, 0}));
  EXPECT_EQ(job.residual(), (Floats{0, 0.375, 0, 0.125}));
  job.worker.change_residual(job.key, true, 1);
  EXPECT_EQ(job.residual(), (Floats{0.5, 0.25, 0, 0}));
}

TEST(AnEncodedSum, IsPassedOnAsThePlainOneThatTheLeaderHas) {
  const Compression half(Encoding::kFloat16);
  EncodingLeader job(half);
  const Floats own = {1, 2, 3, 4};
  job.push(own, {1, 1, 1, 1});
  EXPECT_EQ(job.pushed(half), (Floats{2, 3, 4, 5}));
  Header header = job.pushed_header;
  header.kind = FrameKind::kValue;
  header.contributors = 0;
  std::vector<char> sum(half.bytes(4));
  encode(half, Floats{2.5, 0.1f, -4, 6}.data(), nullptr, sum.data(), 4);
  job.server->send(header, sum.data());
  const Header passed = job.neighbour->must_receive();
  EXPECT_EQ(job.pending.wait_for(1), "");
  EXPECT_EQ(static_cast<Encoding>(passed.encoding), Encoding::kPlain);
  EXPECT_EQ(passed.of_machine, 0);
  EXPECT_EQ(passed.payload_bytes, 16u);
  EXPECT_EQ(std::memcmp(job.neighbour->payload.data(), job.landing.data(), 16), 0);
  EXPECT_EQ(job.landing, (Floats{2.5, widened(float_to_half(0.1f)), -4, 6}));
}

// Sums of all gradients equal all that was decoded, and what the leaders keep, to rounding; whole jobs of every codec.
TEST(LocalEncoding, LosesNothingAndGivesAllTheSameBits) {
  constexpr size_t kElements = 2500, kRounds = 4;
  for (const auto& machines : {std::vector<int>{0, 1, 0, 1}, {7, 7, 7}, {1, 0, 0}})
    for (const Compression& codec : codecs_of_gradients()) {
      SCOPED_TRACE(std::string(codec.codec()->name) + " on " + std::to_string(machines.size()) + " workers");
      const Machines places(machines);
      Job job(machines, true);
      const int key = job.declare(kElements, DType::kFloat32, codec);
      Floats zeros(kElements);
      std::vector<Floats> landings(machines.size(), zeros);
      ASSERT_EQ(job.init(key, zeros, landings), "");
      std::vector<double> given(kElements), came(kElements);
      double largest = 0;
      const auto leads = [&](size_t rank) { return places.place(static_cast<int>(rank)) == 0; };
      for (size_t rank = 0; codec.residuals() > 0 && rank < machines.size(); ++rank) {
        EXPECT_TRUE(job.workers[rank]->keeps_residual(key));
        EXPECT_EQ(job.workers[rank]->residual_floats(key), leads(rank) ? kElements : 0);
        if (!leads(rank)) {
          EXPECT_THROW(job.workers[rank]->restore_residual(key, zeros.data()), Error);
        }
      }
      for (unsigned round = 1; round <= kRounds; ++round) {
        std::vector<Floats> gradients;
        for (unsigned i = 0; i < machines.size(); ++i) {
          std::mt19937 random(100 * round + i);
          std::normal_distribution<float> normal;
          Floats one(kElements);
          for (float& value : one) value = normal(random);
          gradients.push_back(one);
        }
        for (size_t i = machines.size(); i-- > 0;)
          job.workers[i]->push(key, gradients[i].data(), landings[i].data(), 0, {}, job.pending.done());
        ASSERT_EQ(job.pending.wait_for(machines.size()), "");
        for (const Floats& landing : landings) ASSERT_EQ(landing, landings[0]);
        for (size_t i = 0; i < kElements; ++i) {
          for (const Floats& gradient : gradients) given[i] += double(gradient[i]);
          came[i] += double(landings[0][i]);
          largest = std::max(largest, std::abs(given[i]));
        }
      }
      for (size_t rank = 0; rank < machines.size(); ++rank) {
        const uint64_t sent = 3 + (leads(rank) ? 3 * kRounds : 0);  // at first for the first value
        EXPECT_EQ(job.workers[rank]->counters().traffic.slices_sent, sent);
        if (codec.residuals() == 0) continue;
        Floats kept(job.workers[rank]->residual_floats(key));
        job.workers[rank]->capture(key, 1, kept.data(), job.pending.done());
        ASSERT_EQ(job.pending.wait_for(1), "");
        for (size_t i = 0; i < kept.size(); ++i) came[i] += double(kept[i]);
      }
      // What keeps nothing rounds each sum to its last bit.
      const double allowed = codec.residuals() > 0 ? 1e-5 : codec.encoding == Encoding::kFloat16 ? 4e-3 : 4e-2;
      for (size_t i = 0; i < kElements; ++i) ASSERT_NEAR(came[i], given[i], allowed * largest);
    }
}

}  // namespace
}  // namespace p3
