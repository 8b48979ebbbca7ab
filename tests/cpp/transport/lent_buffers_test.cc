// Lending buffers: what is kept, and what finding those that came back costs.
#include "transport/lent_buffers.h"

#include <gtest/gtest.h>

#include <deque>

namespace p3 {
namespace {

Frame lend(LentBuffers& lent, BufferPool& pool, int borrowers = 1) {
  return lent.lend({}, PooledBuffer(pool, 64), 64, borrowers);
}

void bring_back(const Frame& frame) { static_cast<Lender*>(frame.context)->taken_back(); }

TEST(LentBuffers, ContentGoesBackWithTheLastBorrower) {
  BufferPool pool;
  LentBuffers lent;
  const Frame frame = lend(lent, pool, 2);
  bring_back(frame);
  EXPECT_FALSE(lent.is_idle());
  EXPECT_EQ(pool.bytes_in_use(), 64u);
  bring_back(frame);
  EXPECT_EQ(pool.bytes_in_use(), 0u);  // before anybody looks
  EXPECT_TRUE(lent.is_idle());
}

// A leader behind a slow link has lent most of a model's slices before the first of them has left.
TEST(LentBuffers, LookAFewTimesAtEachHoweverManyAreOut) {
  constexpr uint64_t kSlices = 20000;
  BufferPool pool;
  LentBuffers lent;
  std::deque<Frame> out;
  for (uint64_t i = 0; i < kSlices; ++i) out.push_back(lend(lent, pool));
  EXPECT_LE(lent.looks(), 2 * kSlices);
  for (uint64_t i = 0; i < kSlices; ++i) {  // as many come back as leave
    bring_back(out.front());
    out.pop_front();
    out.push_back(lend(lent, pool));
  }
  EXPECT_LE(lent.looks(), 5 * kSlices);
  for (const Frame& frame : out) bring_back(frame);
  EXPECT_EQ(pool.bytes_in_use(), 0u);
  EXPECT_TRUE(lent.is_idle());
}

TEST(LentBuffers, ForgetThoseThatCameBackWhenFewAreOut) {
  BufferPool pool;
  LentBuffers lent;
  for (int i = 0; i < 10000; ++i) {
    bring_back(lend(lent, pool));
    ASSERT_LE(lent.kept(), 32u);
  }
}

}  // namespace
}  // namespace p3
