// The recorder: whatever is recorded is in the file, whole, whoever recorded it and however the process ended.
#include "p3/trace.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstring>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include "transport/numbers.h"

namespace p3 {
namespace {

class File {
 public:
  File() {
    char name[] = "/tmp/p3-trace-test-XXXXXX";
    ::close(mkstemp(name));
    path_ = name;
  }
  ~File() { ::unlink(path_.c_str()); }

  int open() const { return ::open(path_.c_str(), O_WRONLY | O_APPEND | O_CLOEXEC); }

  // What is in the file; fails on anything but the magic and whole events.
  std::vector<TraceEvent> events() const {
    std::ifstream file(path_, std::ios::binary);
    const std::string content{std::istreambuf_iterator<char>(file), {}};
    EXPECT_EQ(content.substr(0, sizeof kTraceMagic), std::string(kTraceMagic, sizeof kTraceMagic));
    const size_t bytes = content.size() - sizeof kTraceMagic;
    EXPECT_EQ(bytes % sizeof(TraceEvent), 0u);
    std::vector<TraceEvent> events(bytes / sizeof(TraceEvent));
    std::memcpy(static_cast<void*>(events.data()), content.data() + sizeof kTraceMagic, bytes);
    return events;
  }

 private:
  std::string path_;
};

TraceEvent event(uint32_t key, uint32_t slice) {
  TraceEvent made;
  made.key = key;
  made.slice = slice;
  made.kind = TraceKind::kSummed;
  return made;
}

// The slices that were recorded for a key, in the order of the file.
std::vector<uint32_t> slices_of(const std::vector<TraceEvent>& events, uint32_t key) {
  std::vector<uint32_t> slices;
  for (const TraceEvent& one : events)
    if (one.key == key && one.kind == TraceKind::kSummed) slices.push_back(one.slice);
  return slices;
}

TEST(Trace, AnEventKeepsWhatTheHeaderSays) {
  File file;
  Header header;
  header.kind = FrameKind::kPush;
  header.key = 7;
  header.slice = 3;
  header.round = (uint64_t{1} << 32) + 9;
  header.payload_bytes = 1234;
  header.priority = -5;
  {
    Recorder recorder(file.open());
    trace_at(&recorder, Recorder::Clock::time_point(std::chrono::nanoseconds(42)), TraceKind::kSendEnd, header, 2);
  }
  const auto events = file.events();
  ASSERT_EQ(events.size(), 2u);
  EXPECT_EQ(events[0].time_ns, 42);
  EXPECT_EQ(events[0].key, 7u);
  EXPECT_EQ(events[0].slice, 3u);
  EXPECT_EQ(events[0].round, 9u);
  EXPECT_EQ(events[0].bytes, 1234u);
  EXPECT_EQ(events[0].priority, -5);
  EXPECT_EQ(events[0].peer, 2);
  EXPECT_EQ(events[0].kind, TraceKind::kSendEnd);
  EXPECT_EQ(events[0].frame, FrameKind::kPush);
  EXPECT_EQ(events[1].kind, TraceKind::kEnd);
}

TEST(Trace, TimesAreThoseOfClockMonotonic) {
  const auto now_ns = [] {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return int64_t{1000000000} * now.tv_sec + now.tv_nsec;
  };
  File file;
  const int64_t before = now_ns();
  {
    Recorder recorder(file.open());
    trace(&recorder, TraceKind::kSummed, Header{});
  }
  const int64_t after = now_ns();
  EXPECT_GE(file.events()[0].time_ns, before);
  EXPECT_LE(file.events()[0].time_ns, after);
}

TEST(Trace, WithoutARecorderNothingHappens) { trace(nullptr, TraceKind::kSummed, Header{}); }

TEST(Trace, EveryThreadsEventsAreInTheFileInItsOrder) {
  constexpr uint32_t kThreads = 4, kEvents = 5000;  // not a multiple of a chunk
  File file;
  {
    Recorder recorder(file.open());
    std::vector<std::thread> threads;
    for (uint32_t key = 0; key < kThreads; ++key)
      threads.emplace_back([&recorder, key] {
        for (uint32_t i = 0; i < kEvents; ++i) recorder.record(event(key, i));
      });
    for (std::thread& thread : threads) thread.join();
  }
  const auto events = file.events();
  EXPECT_EQ(events.size(), kThreads * kEvents + 1);
  for (uint32_t key = 0; key < kThreads; ++key) EXPECT_EQ(slices_of(events, key), up_to(kEvents)) << key;
}

TEST(Trace, OneThreadMayFillTwoRecorders) {
  File first_file, second_file;
  {
    Recorder first(first_file.open()), second(second_file.open());
    for (uint32_t i = 0; i < 1000; ++i) {
      first.record(event(1, i));
      second.record(event(2, i));
    }
  }
  EXPECT_EQ(slices_of(first_file.events(), 1), up_to(1000));
  EXPECT_EQ(slices_of(first_file.events(), 2), up_to(0));
  EXPECT_EQ(slices_of(second_file.events(), 2), up_to(1000));
}

TEST(Trace, AKilledProcessLeavesItsFullChunks) {
  File file;
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    Recorder recorder(file.open());
    for (uint32_t i = 0; i < 1500; ++i) recorder.record(event(1, i));
    kill(getpid(), SIGKILL);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFSIGNALED(status));
  const auto slices = slices_of(file.events(), 1);
  EXPECT_GE(slices.size(), 1024u);
  EXPECT_EQ(slices, up_to(static_cast<uint32_t>(slices.size())));
}

TEST(Trace, WhatIsRecordedAfterTheEndIsDropped) {
  File file;
  Recorder recorder(file.open());
  recorder.record(event(1, 0));
  recorder.close();
  for (uint32_t i = 1; i < 2000; ++i) recorder.record(event(1, i));
  recorder.close();
  EXPECT_EQ(slices_of(file.events(), 1), up_to(1));
  EXPECT_EQ(file.events().size(), 2u);
}

TEST(Trace, AFullDiskEndsTheRecordingAndNothingElse) {
  testing::internal::CaptureStderr();
  {
    Recorder recorder(::open("/dev/full", O_WRONLY | O_CLOEXEC));
    for (uint32_t i = 0; i < 2000; ++i) recorder.record(event(1, i));
  }
  EXPECT_EQ(testing::internal::GetCapturedStderr(),
            "p3: a file of P3_TRACE cannot be written: No space left on device. The trace ends here.\n");
}

}  // namespace
}  // namespace p3
