// What a worker tells of its optimizer's numbers where they are not those that were announced.
#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <vector>

#include "worker/worker_job.h"

namespace p3 {
namespace {

RoundSettings settings(const FieldValues& fields) {
  return {RoundScalars{}, fields.empty() ? nullptr : std::make_shared<const FieldValues>(fields)};
}

struct FieldsJob : OneServer {
  FieldsJob() : OneServer(unix_pair()) {}

  void push(int key, uint64_t elements, const RoundSettings& with, int32_t priority = 0) {
    worker.push(key, array(elements).data(), array(elements).data(), priority, with, results.expect(key));
  }
  // The next frame that is no other fields, and how often those were told before it; they hold from then on.
  Header receive(int told) {
    int times = 0;
    Header header = server.must_receive();
    for (; header.kind == FrameKind::kFields; header = server.must_receive(), ++times) {
      fields.resize(header.payload_bytes / sizeof(double));
      if (!fields.empty()) std::memcpy(fields.data(), server.payload.data(), header.payload_bytes);
    }
    EXPECT_EQ(times, told);
    return header;
  }

  FieldValues fields;
};

TEST(WorkerFields, AreToldOnceBeforeThePushesThatGoByThem) {
  FieldsJob job;
  const int key = job.key(1, 3 * kSlice);
  job.push(key, 3 * kSlice, settings({}));
  for (int i = 0; i < 3; ++i) job.answer(job.receive(0), std::vector<float>(kSlice));
  ASSERT_TRUE(job.results.wait_for(1));
  job.push(key, 3 * kSlice, settings({0.5, 0}));
  for (int i = 0; i < 3; ++i) job.answer(job.receive(i == 0), std::vector<float>(kSlice));
  EXPECT_EQ(job.fields, (FieldValues{0.5, 0}));
  ASSERT_TRUE(job.results.wait_for(2));
  job.push(key, 3 * kSlice, settings({0.5, 0}));  // the same numbers, though not the same object
  for (int i = 0; i < 3; ++i) job.answer(job.receive(0), std::vector<float>(kSlice));
  ASSERT_TRUE(job.results.wait_for(3));
  job.push(key, 3 * kSlice, settings({}));
  for (int i = 0; i < 3; ++i) job.answer(job.receive(i == 0), std::vector<float>(kSlice));
  EXPECT_EQ(job.fields, FieldValues{});
}

// Whatever order the queue brings them in, and what has no numbers of its own between them.
TEST(WorkerFields, HoldForWhatLeavesBehindThemThoughPrioritiesOvertake) {
  FieldsJob job;
  std::vector<int> keys;
  for (uint32_t i = 0; i < 40; ++i) {
    keys.push_back(job.key(i, 4 * kSlice));
    job.push(keys.back(), 4 * kSlice, settings(i % 3 == 0 ? FieldValues{} : FieldValues{double(i % 3)}),
             static_cast<int32_t>(i * 7 % 40));
    job.worker.init(job.key(100 + i, 1), job.array(1).data(), job.array(1).data(), 0, job.results.expect(-1));
  }
  for (int frames = 0, pushes = 0; frames < 40 * 5; ++frames) {
    Header header = job.server.must_receive();
    for (; header.kind == FrameKind::kFields; header = job.server.must_receive()) {
      job.fields.resize(header.payload_bytes / sizeof(double));
      if (!job.fields.empty()) std::memcpy(job.fields.data(), job.server.payload.data(), header.payload_bytes);
    }
    if (header.kind != FrameKind::kPush) continue;
    EXPECT_EQ(job.fields, header.key % 3 == 0 ? FieldValues{} : FieldValues{double(header.key % 3)}) << ++pushes;
  }
}

}  // namespace
}  // namespace p3
