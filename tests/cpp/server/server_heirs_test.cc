// A server that takes over from one that is lost: what it makes of what the workers claim, in whatever order that comes.
#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "server/heirs_job.h"

namespace p3 {
namespace {

class Heirs : public testing::TestWithParam<int> {
 protected:
  static ServerOptions with() { return options(SumOrder::kRank, GetParam()); }
};
INSTANTIATE_TEST_SUITE_P(Threads, Heirs, testing::Values(0, 2));

TEST_P(Heirs, GiveASumThatAnyWorkerHasToWhoLacksIt) {
  HeirsJob job(3, with());
  job.define();
  job.server.inherit(kLost);
  job.push(1, 1, {});  // no claim: see below
  EXPECT_NE(job.failure().find("out of turn"), std::string::npos);

  HeirsJob other(3, with());
  other.define();
  other.server.inherit(kLost);
  other.claim(1, 6, {9, 9});
  other.push(1, 7, {10, 20});
  other.claim(0, 7, {1, 2});
  other.push(0, 8, {100, 200});
  other.claim(2, 7, {1, 2});
  EXPECT_EQ(other.receive(1, 7), Floats({1, 2}));  // and what it has pushed counts for nothing
  other.push(1, 8, {3, 4});
  other.push(2, 8, {5, 6});
  for (int worker : {0, 1, 2}) EXPECT_EQ(other.receive(worker, 8), Floats({108, 210}));
}

TEST_P(Heirs, AskOneOfThoseWhoHaveAValueForIt) {
  HeirsJob job(3, with());
  job.define();
  job.define(2);
  job.server.inherit(kLost);
  for (uint32_t key : {1u, 2u}) {
    job.claim_without_value(0, 6, key);
    for (int worker : {1, 2}) job.claim_without_value(worker, 7, key);
  }
  job.push(0, 7, {10, 20});
  job.must_be_asked(2, 1);  // in turn
  job.must_be_asked(1, 2);
  job.claim(1, 7, {3, 4}, 2);
  job.push(2, 8, {5, 6});
  job.claim(2, 7, {1, 2}, 1);
  EXPECT_EQ(job.receive(0, 7), Floats({1, 2}));
  for (int worker : {0, 1}) job.push(worker, 8, {100, 200});
  for (int worker : {0, 1, 2}) EXPECT_EQ(job.receive(worker, 8), Floats({205, 406}));
}

TEST_P(Heirs, AskAnotherOneIfThatIsLost) {
  HeirsJob job(3, outliving(GetParam()));
  job.define();
  job.server.inherit(kLost);
  job.claim_without_value(0, 6);
  for (int worker : {1, 2}) job.claim_without_value(worker, 7);
  job.push(0, 7, {10, 20});
  job.must_be_asked(2);
  job.server.dismiss_worker(2);
  job.must_be_asked(1);
  job.claim(1, 7, {1, 2});
  EXPECT_EQ(job.receive(0, 7), Floats({1, 2}));
}

TEST_P(Heirs, SumAnewWhatOnlyOneHadWhoIsLostBeforeItHasGivenIt) {
  HeirsJob job(3, outliving(GetParam()));
  job.define();
  job.server.inherit(kLost);
  for (int worker : {0, 1}) {
    job.claim_without_value(worker, 6);
    job.push(worker, 7, {1, 2});
  }
  job.claim_without_value(2, 7);
  job.must_be_asked(2);
  job.server.dismiss_worker(2);
  job.must_be_asked(1);
  job.claim(1, 6, {9, 9});
  for (int worker : {0, 1}) EXPECT_EQ(job.receive(worker, 7), Floats({2, 4}));
}

TEST_P(Heirs, AskNobodyForAValueWhoHasJoinedWithoutIt) {
  for (const bool comes_last : {false, true}) {
    HeirsJob job(3, with());
    job.define();
    job.server.inherit(kLost);
    job.claim_without_value(0, 6);
    job.push(0, 7, {10, 20});
    if (!comes_last) job.claim_round_alone(2, 7);
    job.claim_without_value(1, 7);
    if (comes_last) job.claim_round_alone(2, 7);
    job.must_be_asked(1);  // whose turn it is not
    job.claim(1, 7, {1, 2});
    EXPECT_EQ(job.receive(0, 7), Floats({1, 2}));
    for (int worker : {0, 1, 2}) job.push(worker, 8, {100, 200});
    for (int worker : {0, 1, 2}) EXPECT_EQ(job.receive(worker, 8), Floats({300, 600}));
  }
}

TEST_P(Heirs, GoOnBehindARoundWhoseValueNobodyHasWhoIsLeft) {
  HeirsJob job(3, outliving(GetParam()));
  job.define();
  job.server.inherit(kLost);
  job.claim_without_value(0, 7);
  for (int worker : {1, 2}) job.claim_round_alone(worker, 7);
  job.must_be_asked(0);
  job.server.dismiss_worker(0);
  for (int worker : {1, 2}) job.push(worker, 8, {1, 2});
  for (int worker : {1, 2}) EXPECT_EQ(job.receive(worker, 8), Floats({2, 4}));
}

TEST_P(Heirs, RefuseAClaimOfARoundAloneWhereAnotherWorkerLacksItsValue) {
  HeirsJob job(2, with());
  job.define();
  job.server.inherit(kLost);
  job.claim_round_alone(1, 7);
  job.claim(0, 6, {9, 9});
  EXPECT_NE(job.failure().find("of a later round than another worker can have missed"), std::string::npos);

  HeirsJob other(2, with());
  other.define();
  other.server.inherit(kLost);
  other.claim(1, 7, {1, 2}, kKey, Claimed::kRoundAlone);  // with one, after all
  EXPECT_NE(other.failure().find("unexpected"), std::string::npos);
}

TEST_P(Heirs, TakeAValueUnaskedFromWhoLeaves) {
  HeirsJob job(2, with());
  job.define();
  job.define(2);
  job.server.inherit(kLost);
  for (uint32_t key : {1u, 2u}) {
    job.claim_without_value(0, 7, key);
    job.claim(0, 7, {1, 2}, key);
  }
  Header bye;
  bye.kind = FrameKind::kBye;
  job.peer(0).send(bye);
  job.claim_without_value(1, 6, 1);
  job.push(1, 7, {10, 20});
  EXPECT_EQ(job.receive(1, 7), Floats({1, 2}));
}

TEST_P(Heirs, NeedNoValueThatComesAfterAnotherOnes) {
  HeirsJob job(2, with());
  job.define();
  job.server.inherit(kLost);
  for (int worker : {0, 1}) job.claim_without_value(worker, 7);
  job.must_be_asked(1);
  job.claim(0, 7, {1, 2});  // unasked
  for (int worker : {0, 1}) job.push(worker, 8, {1, 1});
  for (int worker : {0, 1}) EXPECT_EQ(job.receive(worker, 8), Floats({2, 2}));
  job.claim(1, 7, {1, 2});
  for (int worker : {0, 1}) job.push(worker, 9, {2, 2});
  for (int worker : {0, 1}) EXPECT_EQ(job.receive(worker, 9), Floats({4, 4}));
}

TEST_P(Heirs, NeedNoValueThatIsStillComingWhenAnotherOnesHasCome) {
  HeirsJob job(2, with());
  job.define();
  job.server.inherit(kLost);
  for (int worker : {0, 1}) job.claim_without_value(worker, 7);
  job.must_be_asked(1);
  for (int worker : {0, 1}) job.claim_nothing_more(worker);
  Header unasked = HeirsJob::header(FrameKind::kClaim, 7, 2 * sizeof(float));
  set_inits(unasked, 1);
  std::vector<char> bytes(sizeof unasked + 2 * sizeof(float));
  std::memcpy(bytes.data(), &unasked, sizeof unasked);
  const size_t first = sizeof unasked + sizeof(float);
  const auto received = [&] { return job.server.counters().traffic.bytes_received; };
  const uint64_t before = received();
  job.peer(0).send_bytes(bytes.data(), first);
  EXPECT_TRUE(eventually([&] { return received() >= before + first; }));
  job.claim(1, 7, {1, 2});
  EXPECT_TRUE(eventually([&] { return !job.server.awaits_claims(); }));
  job.peer(0).send_bytes(bytes.data() + first, bytes.size() - first);
  for (int worker : {0, 1}) job.push(worker, 8, {1, 1});
  for (int worker : {0, 1}) EXPECT_EQ(job.receive(worker, 8), Floats({2, 2}));
}

TEST_P(Heirs, AnswerNobodyBeforeItsPushHasCome) {
  HeirsJob job(2, with());
  job.define();
  job.server.inherit(kLost);
  job.claim(0, 3, {1, 2});
  job.claim(1, 2, {7, 7});
  job.push(0, 4, {1, 1});  // nothing comes of that yet
  job.push(1, 3, {5, 5});
  EXPECT_EQ(job.receive(1, 3), Floats({1, 2}));
  job.push(1, 4, {2, 2});
  for (int worker : {0, 1}) EXPECT_EQ(job.receive(worker, 4), Floats({3, 3}));
}

TEST_P(Heirs, SumAnewWhatNobodyHas) {
  HeirsJob job(2, with());
  job.define();
  job.server.inherit(kLost);
  job.claim(0, 4, {1, 1});
  job.push(0, 5, {1, 2});
  job.push(0, 5, {1, 2});  // and no more
  EXPECT_NE(job.failure().find("out of turn"), std::string::npos);

  HeirsJob other(2, with());
  other.define();
  other.server.inherit(kLost);
  for (int worker : {1, 0}) {
    other.claim(worker, 4, {1, 1});
    other.push(worker, 5, {1, 2});
  }
  for (int worker : {0, 1}) EXPECT_EQ(other.receive(worker, 5), Floats({2, 4}));
}

TEST_P(Heirs, TellThatARoundHadNoGradientToWhoHasNotHeard) {
  HeirsJob job(2, with());
  job.define();
  job.server.inherit(kLost);
  job.claim(0, 5, {1, 2}, kKey, Claimed::kStayed);
  job.claim(1, 4, {1, 2});
  job.push(1, 5, {});
  job.receive(1, 5, /*is_absent=*/true);
}

// Who has pushed nothing may update by that, too.
TEST_P(Heirs, TellByWhatARoundIsToBeAppliedThatWasOverBefore) {
  HeirsJob job(2, with());
  job.define();
  job.server.inherit(kLost);
  job.claim(0, 5, {1, 2});
  job.claim(1, 4, {7, 7});
  job.push(1, 5, {});
  const Header got = job.peer(1).must_receive();
  EXPECT_EQ(got.round, 5u);
  EXPECT_EQ(got.scalars.lr, 5);
  Header push = HeirsJob::header(FrameKind::kPush, 6, 2 * sizeof(float));
  push.scalars.lr = 0.25;
  const float gradient[] = {1, 1};
  job.peer(0).send(push, gradient);
  job.push(1, 6, {});
  for (int worker : {0, 1}) EXPECT_EQ(job.peer(worker).must_receive().scalars.lr, 0.25);
}

TEST_P(Heirs, HaveTheFirstValueFromWhoHasIt) {
  HeirsJob job(3, with());
  job.define();
  job.server.inherit(kLost);
  job.claim(2, 0, {3, 4});
  job.peer(1).send(HeirsJob::header(FrameKind::kInit, 0, 0));  // claims nothing
  job.claim<float>(0, 0, {});
  const float first[] = {3, 4};
  job.peer(0).send(HeirsJob::header(FrameKind::kInit, 0, sizeof first), first);
  for (int worker : {0, 1}) EXPECT_EQ(job.receive(worker, 0), Floats({3, 4}));
  for (int worker : {0, 1, 2}) job.push(worker, 1, {1, 1});
  for (int worker : {0, 1, 2}) EXPECT_EQ(job.receive(worker, 1), Floats({3, 3}));
}

TEST_P(Heirs, TakeALastClaimForAllThatIsLeftOfThatServerAlone) {
  HeirsJob job(2, with());
  job.define();
  job.define(2);
  job.server.inherit(kLost);
  job.claim(0, 4, {1, 1});
  job.claim(1, 4, {1, 1});
  for (int worker : {0, 1}) job.claim_nothing_more(worker);
  job.push(0, 5, {1, 2});
  job.push(1, 5, {1, 2});
  for (int worker : {0, 1}) EXPECT_EQ(job.receive(worker, 5), Floats({2, 4}));
  Header another = HeirsJob::header(FrameKind::kClaim, 0, 0, kNoKey);
  another.part = static_cast<uint8_t>(Claimed::kNothing);
  another.slice = kHeir;  // whose heir it is not
  job.peer(0).send(another);
  EXPECT_NE(job.failure().find("unexpected"), std::string::npos);
}

TEST_P(Heirs, WaitForNoWorkerThatIsLost) {
  HeirsJob job(3, outliving(GetParam()));
  job.define();
  job.server.dismiss_worker(0);
  job.server.inherit(kLost);
  job.claim(2, 3, {1, 2});
  job.push(2, 4, {7, 7});
  job.server.dismiss_worker(1);
  EXPECT_EQ(job.receive(2, 4), Floats({7, 7}));
}

TEST_P(Heirs, HaveWhoIsAdmittedBehindAllClaims) {
  HeirsJob job(2, outliving(GetParam()));
  job.define();
  job.server.dismiss_worker(1);
  EXPECT_FALSE(job.server.awaits_claims());
  job.server.inherit(kLost);
  EXPECT_TRUE(job.server.awaits_claims());
  job.claim(0, 3, {1, 2});
  job.claim_nothing_more(0);
  EXPECT_TRUE(eventually([&] { return !job.server.awaits_claims(); }));
  EXPECT_EQ(job.server.admit_worker(1), "");
  job.replace(1);
  job.peer(1).send(HeirsJob::header(FrameKind::kInit, 0, 0));
  EXPECT_EQ(job.receive(1, 3), Floats({1, 2}));
  job.push(0, 4, {1, 1});
  job.push(1, 4, {2, 2});
  for (int worker : {0, 1}) EXPECT_EQ(job.receive(worker, 4), Floats({3, 3}));
}

// A job of so many workers, of which the last has departed, and another process has its rank.
std::unique_ptr<HeirsJob> job_with_one_that_came_later(int num_workers, int threads) {
  auto job = std::make_unique<HeirsJob>(num_workers, outliving(threads));
  const int last = num_workers - 1;
  job->server.dismiss_worker(last);
  EXPECT_EQ(job->server.admit_worker(last), "");
  job->replace(last);
  job->define();
  job->server.inherit(kLost);
  return job;
}

TEST_P(Heirs, GiveTheValueToWhoCameLaterAndAsksForItLastOfAll) {
  for (bool asks_before : {false, true}) {
    const auto job = job_with_one_that_came_later(3, GetParam());
    if (asks_before) job->peer(2).send(HeirsJob::header(FrameKind::kInit, 0, 0));
    job->claim(0, 3, {1, 2});
    job->claim(1, 3, {1, 2});
    if (!asks_before) {
      for (int worker : {0, 1, 2}) job->claim_nothing_more(worker);
      EXPECT_TRUE(eventually([&] { return !job->server.awaits_claims(); }));
      job->peer(2).send(HeirsJob::header(FrameKind::kInit, 0, 0));
    }
    EXPECT_EQ(job->receive(2, 3), Floats({1, 2}));
    for (int worker : {0, 1, 2}) job->push(worker, 4, {1, 1});
    for (int worker : {0, 1, 2}) EXPECT_EQ(job->receive(worker, 4), Floats({3, 3}));
  }
}

TEST_P(Heirs, CountFirstValuesOfWhoCameLaterAsOthersDo) {
  const auto job = job_with_one_that_came_later(2, GetParam());
  job->claim(0, 4, {1, 2}, kKey, Claimed::kValue, 2);
  job->claim(1, 3, {7, 7}, kKey, Claimed::kValue, 1);
  job->push(1, 4, {5, 5});
  EXPECT_EQ(job->receive(1, 4), Floats({1, 2}));
  for (int worker : {0, 1}) job->push(worker, 5, {1, 1});
  for (int worker : {0, 1}) EXPECT_EQ(job->receive(worker, 5), Floats({2, 2}));
  job->server.dismiss_worker(0);
  job->push(1, 6, {4, 4});
  EXPECT_EQ(job->receive(1, 6), Floats({4, 4}));
}

TEST_P(Heirs, AdmitInThePlaceOfWhoDepartedARoundBehind) {
  HeirsJob job(3, outliving(GetParam()));
  job.define();
  job.server.inherit(kLost);
  job.claim(0, 4, {1, 2});
  job.claim(1, 4, {1, 2});
  job.claim(2, 3, {7, 7});
  for (int worker : {0, 1, 2}) job.claim_nothing_more(worker);
  EXPECT_TRUE(eventually([&] { return !job.server.awaits_claims(); }));
  job.server.dismiss_worker(2);
  for (int worker : {0, 1}) job.push(worker, 5, {1, 1});
  for (int worker : {0, 1}) EXPECT_EQ(job.receive(worker, 5), Floats({2, 2}));
  EXPECT_EQ(job.server.admit_worker(2), "");
  job.replace(2);
  job.peer(2).send(HeirsJob::header(FrameKind::kInit, 0, 0));
  EXPECT_EQ(job.receive(2, 5), Floats({2, 2}));
  for (int worker : {0, 1, 2}) job.push(worker, 6, {1, 1});
  for (int worker : {0, 1, 2}) EXPECT_EQ(job.receive(worker, 6), Floats({3, 3}));
}

TEST_P(Heirs, GiveNobodyAValueThatIsLostWithItsGiver) {
  for (bool departs_first : {false, true})
    for (uint64_t round : {0u, 4u}) {
      HeirsJob job(3, outliving(GetParam()));
      job.define();
      job.define(2);
      job.server.inherit(kLost);
      if (departs_first) job.server.dismiss_worker(0);
      for (int worker : {1, 2}) {
        if (round > 0) job.claim(worker, round, {1, 2});
        job.peer(worker).send(HeirsJob::header(FrameKind::kInit, round, 0));  // of a new value, behind a round
      }
      if (!departs_first) {
        for (int worker : {0, 1, 2}) job.claim(worker, 4, {1, 1}, 2);  // a round of another key: all else has come, too
        const float gradient[] = {1, 1};
        for (int worker : {0, 1, 2})
          job.peer(worker).send(HeirsJob::header(FrameKind::kPush, 5, sizeof gradient, 2), gradient);
        for (int worker : {0, 1, 2}) EXPECT_EQ(job.receive(worker, 5), Floats({3, 3}));
        job.server.dismiss_worker(0);
      }
      EXPECT_NE(job.failure().find("with it a value of key 'key' that worker 1 (there) asks for"), std::string::npos);
    }
}

TEST_P(Heirs, HaveTheFirstValueOfAGiverThatIsLostFromWhoHasIt) {
  HeirsJob job(3, outliving(GetParam()));
  job.define();
  job.server.inherit(kLost);
  job.server.dismiss_worker(0);
  job.peer(1).send(HeirsJob::header(FrameKind::kInit, 0, 0));
  job.claim(2, 0, {3, 4});
  EXPECT_EQ(job.receive(1, 0), Floats({3, 4}));
  for (int worker : {1, 2}) job.push(worker, 1, {1, 1});
  for (int worker : {1, 2}) EXPECT_EQ(job.receive(worker, 1), Floats({2, 2}));
}

TEST_P(Heirs, TellTheNormOfWhatWasSummedBeforeAndHere) {
  HeirsJob job(2, with());
  job.define_norm();
  job.define(1);
  job.define(2);
  job.server.inherit(kLost);
  for (int worker : {0, 1}) {
    job.claim(worker, 4, {3, 4}, 1);  // summed
    job.claim<double>(worker, 3, {0, 0}, kNorm);
    job.claim(worker, 3, {0, 0}, 2);  // not yet
    job.begin_norm(worker, 4);
  }
  const float gradient[] = {1, 0};
  for (int worker : {0, 1}) job.peer(worker).send(HeirsJob::header(FrameKind::kPush, 4, sizeof gradient, 2), gradient);
  for (int worker : {0, 1}) {
    EXPECT_EQ(job.receive(worker, 4), Floats({2, 0}));
    EXPECT_EQ(job.receive<double>(worker, 4), std::vector<double>({29, 4}));
  }
}

TEST_P(Heirs, CountNothingTwiceOfANormThatHasOvertakenItsSum) {
  HeirsJob job(2, with());
  job.define_norm();
  job.define(1);
  job.server.inherit(kLost);
  for (int worker : {0, 1}) {
    job.claim<double>(worker, 4, {25, 2}, kNorm);  // of that round it was told
    job.claim(worker, 3, {3, 4}, 1);               // and its sum is still to come
    job.begin_norm(worker, 5);
  }
  for (int worker : {0, 1}) job.push(worker, 4, {1, 1});
  for (int worker : {0, 1}) EXPECT_EQ(job.receive(worker, 4), Floats({2, 2}));
  for (int worker : {0, 1}) job.push(worker, 5, {2, 0});
  for (int worker : {0, 1})
    for (int frame = 0; frame < 2; ++frame) {  // where they are worked on by two threads, in any order
      const Header got = job.peer(worker).must_receive();
      EXPECT_EQ(got.round, 5u);
      if (got.key != kNorm) continue;
      double norm[2];
      std::memcpy(norm, job.peer(worker).payload.data(), sizeof norm);
      EXPECT_EQ(norm[0], 16) << "that of the round before is 8";
      EXPECT_EQ(norm[1], 4);
    }
}

TEST_P(Heirs, HaveANewFirstValueFromWhoGivesIt) {
  HeirsJob job(2, with());
  job.define();
  job.server.inherit(kLost);
  const float value[] = {8, 9};
  job.claim(0, 4, {1, 2});
  job.peer(0).send(HeirsJob::header(FrameKind::kInit, 4, sizeof value), value);
  job.claim(1, 4, {1, 2});
  job.peer(1).send(HeirsJob::header(FrameKind::kInit, 4, 0));
  for (int worker : {0, 1}) EXPECT_EQ(job.receive(worker, 4), Floats({8, 9}));
}

TEST_P(Heirs, AreToldInVainOfKeysThatAreGone) {
  HeirsJob job(2, with());
  job.define();
  job.server.inherit(kLost);
  job.claim(0, 4, {1, 2}, 7);
  for (int worker : {0, 1}) job.claim(worker, 4, {1, 2});
  for (int worker : {0, 1}) job.push(worker, 5, {1, 1});
  for (int worker : {0, 1}) EXPECT_EQ(job.receive(worker, 5), Floats({2, 2}));
}

TEST(Heir, RefusesWhatCannotBe) {
  const auto failure_of = [](const auto& play) {
    HeirsJob job(2);
    job.define();
    job.server.inherit(kLost);
    play(job);
    return job.failure();
  };
  const auto has = [](const std::string& text, const char* what) { return text.find(what) != std::string::npos; };
  EXPECT_TRUE(has(failure_of([](HeirsJob& job) {
                    job.claim(0, 3, {1, 2});
                    job.claim(1, 1, {1, 2});
                  }),
                  "of a later round than another worker can have missed"));
  EXPECT_TRUE(has(failure_of([](HeirsJob& job) {
                    job.claim(0, 3, {8, 9}, kKey, Claimed::kValue,
                              2);  // in the place of the sum that the other one lacks
                    job.claim(1, 2, {1, 2});
                  }),
                  "a new first value"));
  EXPECT_TRUE(has(failure_of([](HeirsJob& job) { job.claim(0, 3, {1, 2, 3}); }), "of another size than agreed"));
  EXPECT_TRUE(has(failure_of([](HeirsJob& job) { job.claim(0, 3, {1, 2}, kKey, Claimed::kValue, 0); }), "unexpected"));
  EXPECT_TRUE(has(failure_of([](HeirsJob& job) {
                    job.claim(0, 3, {1, 2});
                    job.claim(0, 3, {1, 2});
                  }),
                  "out of turn"));
  EXPECT_TRUE(has(failure_of([](HeirsJob& job) {
                    job.claim_without_value(0, 3);
                    job.claim_without_value(0, 3);
                  }),
                  "out of turn"));
  EXPECT_TRUE(has(failure_of([](HeirsJob& job) {
                    job.claim_without_value(0, 3);
                    job.claim(0, 4, {1, 2});
                  }),
                  "out of turn"));
  EXPECT_TRUE(has(failure_of([](HeirsJob& job) {
                    job.claim_without_value(0, 3);
                    job.claim(0, 3, {1});
                  }),
                  "of another size than agreed"));
  EXPECT_TRUE(has(failure_of([](HeirsJob& job) {
                    Header own = HeirsJob::header(FrameKind::kClaim, 0, 0);
                    own.part = static_cast<uint8_t>(Claimed::kNothing);
                    own.slice = 1;
                    job.peer(0).send(own);
                  }),
                  "not inherited"));
}

TEST(Heir, IsNoneOfAServerThatUpdates) {
  HeirsJob job(1);
  job.define();
  EXPECT_THROW(job.server.inherit(kHeir), Error);
  job.server.set_optimizer(0, {"sgd", {}});
  EXPECT_THROW(job.server.inherit(kLost), Error);
}

}  // namespace
}  // namespace p3
