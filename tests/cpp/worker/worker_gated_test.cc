// Rounds whose gradient becomes ready piece by piece (Worker::ready).
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "worker/local_job.h"
#include "worker/worker_job.h"

namespace p3 {
namespace {

constexpr float kNotYet = -1e30f;  // what lies where nothing has been copied yet

// Whether a gradient may share its memory with what lands: but for ThreadSanitizer, which takes note of what sendmsg()
// reads when that has returned, and the answer may have come by then.
#ifdef __SANITIZE_THREAD__
constexpr bool kMayBeOne = false;
#else
constexpr bool kMayBeOne = true;
#endif

// A worker with a gated round of one key of so many slices, and another key whose slices are never gated.
struct Gated : OneServer {
  explicit Gated(size_t slices = 4) : OneServer(unix_pair()), landing(array(slices * kSlice)), small(array(1, 3)) {
    gradient.assign(slices * kSlice, kNotYet);
    gated = key(0, gradient.size());
    other = key(9, 1);
  }
  void push(int id = 0) {
    worker.push(gated, gradient.data(), landing.data(), 5, {}, results.expect(id), /*gated=*/true);
  }
  // The elements are copied, and announced.
  void copy(size_t end, float value = 1) {
    std::fill(gradient.begin() + static_cast<ptrdiff_t>(copied), gradient.begin() + static_cast<ptrdiff_t>(end), value);
    copied = end;
    worker.ready(gated, end);
  }
  // Nothing of the gated key is on its way: what is pushed now comes next. It may be pushed once for each round.
  void expect_nothing() {
    worker.push(other, small.data(), small.data(), 0, {}, results.expect(9));
    const Header next = server.must_receive();
    EXPECT_EQ(next.key, 9u) << "slice " << next.slice << " left before it was ready";
    answer(next, {3});
  }
  void expect_slice(uint32_t slice) {
    const Header push = server.must_receive();
    EXPECT_EQ(push.key, 0u);
    EXPECT_EQ(push.slice, slice);
    const auto* sent = reinterpret_cast<const float*>(server.payload.data());
    EXPECT_EQ(std::count(sent, sent + kSlice, kNotYet), 0);
    pushes.push_back(push);
  }

  std::vector<float> gradient;
  std::vector<float>&landing, &small;
  size_t copied = 0;
  int gated = 0, other = 0;
  std::vector<Header> pushes;
  // Before the gradient goes.
  ~Gated() { worker.close(0); }
};

TEST(GatedPush, EachSliceLeavesWhenItsLastElementIsReady) {
  Gated job;
  job.push();
  job.expect_nothing();
  job.copy(kSlice - 1);
  job.expect_nothing();
  job.copy(kSlice);
  job.expect_slice(0);
  job.copy(3 * kSlice + 7);
  job.expect_slice(1);
  job.expect_slice(2);
  job.expect_nothing();
  job.copy(4 * kSlice);
  job.expect_slice(3);
  for (const Header& push : job.pushes) job.answer(push, std::vector<float>(kSlice, 2));
  ASSERT_TRUE(job.results.wait_for(4));  // with three of the other key
  EXPECT_EQ(job.landing, std::vector<float>(4 * kSlice, 2));
}

TEST(GatedPush, MayBeReadyBeforeItsTurnHasCome) {
  OneServer job(unix_pair());
  std::vector<float>& value = job.array(10, 7);
  std::vector<float>& landing = job.array(10);
  const int key = job.worker.declare("late", 10, DType::kFloat32);
  job.worker.init(key, value.data(), landing.data(), 0, job.results.expect(0));
  job.worker.push(key, value.data(), landing.data(), 0, {}, job.results.expect(1), /*gated=*/true);
  job.worker.ready(key, 10);
  job.worker.ready(key, 3);  // fewer than before: nothing changes
  job.worker.agree(key, plan_of(5, 10));
  const Header init = job.server.must_receive();
  EXPECT_EQ(init.kind, FrameKind::kInit);
  job.answer(init, value);
  EXPECT_EQ(job.server.must_receive().kind, FrameKind::kPush);
}

TEST(GatedPush, OfAnEmptyKeyLeavesAtOnce) {
  OneServer job(unix_pair());
  float nothing = 0;
  job.worker.push(job.key(3, 0), &nothing, &nothing, 0, {}, job.results.expect(0), /*gated=*/true);
  EXPECT_EQ(job.server.must_receive().key, 3u);
}

// What ready() tells is of the first round that lacks elements.
TEST(GatedPush, RoundsFollowEachOther) {
  Gated job(1);
  job.push(0);
  job.push(1);
  job.copy(kSlice);
  job.expect_slice(0);
  job.worker.ready(job.gated, kSlice);  // of the second round, which has not begun
  job.answer(job.pushes[0], std::vector<float>(kSlice, 2));
  ASSERT_TRUE(job.results.wait_for(1));
  job.expect_slice(0);
  EXPECT_EQ(job.pushes[1].round, 2u);
}

TEST(GatedPush, IsReadOnlyWhenItLeavesAlsoIfItIsCompressed) {
  for (const Compression& compression : {Compression{Encoding::kFloat16, 0.5f}, Compression{Encoding::kTwoBit, 0.5f}}) {
    OneServer job(unix_pair());
    std::vector<float>& gradient = job.array(2 * kSlice, kNotYet);
    std::vector<float>& landing = job.array(2 * kSlice);
    std::vector<float> residual(kSlice);
    const int key = job.key(0, gradient.size(), compression);
    job.worker.push(key, gradient.data(), landing.data(), 0, {}, job.results.expect(0), /*gated=*/true);
    for (uint32_t slice = 0; slice < 2; ++slice) {
      float* const begin = gradient.data() + slice * kSlice;
      std::fill_n(begin, kSlice, 0.75f);
      job.worker.ready(key, (slice + 1) * kSlice);
      EXPECT_EQ(job.server.must_receive().slice, slice);
      std::fill(residual.begin(), residual.end(), 0.0f);
      std::vector<char> expected(encoded_bytes(compression, DType::kFloat32, kSlice));
      encode(compression, begin, residual.data(), expected.data(), kSlice);
      EXPECT_EQ(job.server.payload, expected);
    }
  }
}

// An urgent key that is still being copied holds up nobody, and overtakes as soon as it can.
TEST(GatedPush, PrioritiesHoldAmongWhatIsReady) {
  OneServer job(tcp_pair(4096));
  const uint64_t elements = 4 * kSlice;
  std::vector<float>& gradient = job.array(elements, 1);
  std::vector<float>& landing = job.array(elements);
  std::vector<float>& other = job.array(elements);
  const int urgent = job.key(0, elements), idle = job.key(7, elements);
  job.worker.push(urgent, gradient.data(), landing.data(), 0, {}, job.results.expect(0), /*gated=*/true);
  job.worker.push(idle, gradient.data(), other.data(), -7, {}, job.results.expect(7));
  ASSERT_TRUE(job.server.readable(kDeadlineMs));  // its first slice is under way, and blocked
  job.worker.ready(urgent, elements);
  std::vector<uint32_t> order;
  for (int i = 0; i < 8; ++i) order.push_back(job.server.must_receive().key);
  EXPECT_EQ(order, (std::vector<uint32_t>{7, 0, 0, 0, 0, 7, 7, 7}));
}

TEST(GatedPush, MayLandWhereItLeaves) {
  if (!kMayBeOne) GTEST_SKIP() << "ThreadSanitizer does not know when sendmsg() has read";
  OneServer job(unix_pair());
  std::vector<float>& both = job.array(3 * kSlice, kNotYet);
  const int key = job.key(0, both.size());
  job.worker.push(key, both.data(), both.data(), 0, {}, job.results.expect(0), /*gated=*/true);
  for (uint32_t slice = 0; slice < 3; ++slice) {  // while the next one is being copied, the value of this one comes
    std::fill_n(both.begin() + slice * kSlice, kSlice, 1.0f);
    job.worker.ready(key, (slice + 1) * kSlice);
    const Header push = job.server.must_receive();
    EXPECT_EQ(job.server.payload.size(), kSlice * sizeof(float));
    job.answer(push, std::vector<float>(kSlice, 2.0f + static_cast<float>(slice)));
  }
  ASSERT_TRUE(job.results.wait_for(1));
  for (uint32_t slice = 0; slice < 3; ++slice) EXPECT_EQ(both[slice * kSlice + 5], 2.0f + static_cast<float>(slice));
}

TEST(GatedPush, AnAnswerToWhatHasNotLeftIsRefused) {
  Gated job(2);
  job.push();
  job.copy(kSlice);
  job.expect_slice(0);
  Header second = job.pushes[0];
  second.slice = 1;
  job.answer(second, std::vector<float>(kSlice, 2));
  ASSERT_TRUE(job.results.wait_for(1));
  EXPECT_NE(job.results.text(0).find("an answer to no push"), std::string::npos) << job.results.text(0);
  EXPECT_EQ(job.landing[kSlice], 0);
  job.worker.ready(job.gated, 2 * kSlice);  // the copy ends; nobody minds
}

TEST(GatedPush, CloseSaysWhatWasStillBeingCopied) {
  Gated job(2);
  job.push();
  job.copy(kSlice);
  job.expect_slice(0);
  EXPECT_FALSE(job.worker.close(0));
  ASSERT_TRUE(job.results.wait_for(1));
  EXPECT_NE(
      job.results.text(0).find("while the gradient of round 1 of key 'key0' was still being copied on this worker"),
      std::string::npos)
      << job.results.text(0);
}

TEST(GatedPush, EndsWithTheJob) {
  Gated job(2);
  job.push();
  job.server.close();
  ASSERT_TRUE(job.results.wait_for(1));
  EXPECT_NE(job.results.text(0).find("lost server 0 (there)"), std::string::npos) << job.results.text(0);
  job.worker.ready(job.gated, 2 * kSlice);
}

TEST(GatedSkip, WaitsUntilTheLandingArrayMayBeWritten) {
  Gated job(2);
  job.worker.skip(job.gated, job.landing.data(), 0, job.results.expect(0), /*gated=*/true);
  job.expect_nothing();
  job.worker.ready(job.gated, 2 * kSlice);
  for (uint32_t slice = 0; slice < 2; ++slice) {
    const Header skip = job.server.must_receive();
    EXPECT_EQ(static_cast<Encoding>(skip.encoding), Encoding::kAbsent);
    job.answer(skip, std::vector<float>(kSlice, 4));
  }
  ASSERT_TRUE(job.results.wait_for(2));
  EXPECT_EQ(job.landing, std::vector<float>(2 * kSlice, 4));
}

TEST(GatedSkip, OfRowsIsRefused) {
  OneServer job(unix_pair());
  const int rows = job.worker.declare_rows("rows", 4, 2, DType::kFloat32);
  EXPECT_THROW(job.worker.skip(rows, nullptr, 0, job.results.expect(0), /*gated=*/true), Error);
}

// --- jobs of real cores: whatever the order in which pieces become ready, the sums have the same bits ----------------

// One round in which worker w's part of key k is made ready in random pieces by a thread for each worker.
std::vector<std::vector<float>> sums(const std::vector<int>& machines, bool gated, unsigned seed) {
  const std::vector<uint64_t> sizes = {1, 999, 1000, 5500, 20001};
  const auto count = machines.size();
  std::vector<std::vector<std::vector<float>>> arrays(count), others(count);  // by worker and key: gradients, and sums
  Job job(machines, /*aggregated=*/true);
  std::vector<int> keys;
  for (uint64_t elements : sizes) {
    keys.push_back(job.declare(elements));
    std::vector<float> zeros(elements);
    std::vector<std::vector<float>> landings(count, zeros);
    EXPECT_EQ(job.init(keys.back(), zeros, landings), "");
    for (auto& of_worker : arrays) of_worker.emplace_back(elements, kNotYet);
    for (auto& of_worker : others) of_worker.emplace_back(elements, kNotYet);
  }
  std::vector<std::thread> copying;
  for (size_t w = 0; w < count; ++w)
    copying.emplace_back([&, w] {
      std::mt19937 random(seed + static_cast<unsigned>(w));
      std::vector<std::vector<float>> sources;
      std::vector<uint64_t> copied(sizes.size(), 0);
      for (size_t k = 0; k < sizes.size(); ++k)
        sources.push_back(random_values(sizes[k], 100 * static_cast<unsigned>(w) + static_cast<unsigned>(k)));
      for (size_t k = 0; k < sizes.size(); ++k) {
        if (!gated) std::copy(sources[k].begin(), sources[k].end(), arrays[w][k].begin());
        auto& landings = kMayBeOne ? arrays : others;
        job.workers[w]->push(keys[k], arrays[w][k].data(), landings[w][k].data(), static_cast<int32_t>(random() % 5),
                             {}, job.pending.done(), gated);
      }
      while (gated && copied != sizes) {
        const size_t k = random() % sizes.size();
        const uint64_t piece = std::min(random() % 4000, sizes[k] - copied[k]);
        std::copy_n(sources[k].begin() + static_cast<ptrdiff_t>(copied[k]), piece,
                    arrays[w][k].begin() + static_cast<ptrdiff_t>(copied[k]));
        copied[k] += piece;
        job.workers[w]->ready(keys[k], copied[k]);
      }
    });
  for (std::thread& thread : copying) thread.join();
  EXPECT_EQ(job.pending.wait_for(count * sizes.size()), "");
  const auto& landed = kMayBeOne ? arrays : others;
  for (size_t w = 1; w < count; ++w) EXPECT_EQ(landed[w], landed[0]) << "worker " << w;
  return landed[0];
}

TEST(GatedSums, HaveTheSameBitsWhateverIsReadyFirst) {
  const unsigned seed = std::random_device{}();
  SCOPED_TRACE("seed " + std::to_string(seed));
  for (const auto& machines : kPlacements) EXPECT_EQ(sums(machines, true, seed), sums(machines, false, seed));
}

}  // namespace
}  // namespace p3
