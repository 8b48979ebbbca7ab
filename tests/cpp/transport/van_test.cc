// How many calls a van makes for its frames, and that these are the same ones however the calls cut them.
#include "transport/van.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <iterator>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "transport/numbers.h"

namespace p3 {
namespace {

constexpr size_t kReadAhead = 4 << 10;  // the van's own

// Takes and gives at most so many bytes in a call, and counts the calls.
class Wire final : public Stream {
 public:
  explicit Wire(size_t bytes_in_a_call) : most_(bytes_in_a_call) {}

  IoResult write(const iovec* parts, int count) override {
    ++calls;
    IoResult result;
    for (int i = 0; i < count; ++i) {
      const size_t size = std::min(parts[i].iov_len, most_ - result.bytes);
      const char* from = static_cast<const char*>(parts[i].iov_base);
      bytes.insert(bytes.end(), from, from + size);
      result.bytes += size;
    }
    return result;
  }
  IoResult read(const iovec* parts, int count) override {
    ++calls;
    IoResult result;
    result.end = given_ == bytes.size();
    for (int i = 0; i < count; ++i) {
      const size_t size = std::min({parts[i].iov_len, most_ - result.bytes, bytes.size() - given_});
      if (size > 0) std::memcpy(parts[i].iov_base, bytes.data() + given_, size);
      given_ += size;
      result.bytes += size;
    }
    return result;
  }
  int read_fd() const override { return -1; }
  int write_fd() const override { return -1; }
  uint32_t write_event() const override { return 0; }
  void end_writing() override {}
  void close() override {}

  std::vector<char> bytes;
  int calls = 0;

 private:
  const size_t most_;
  size_t given_ = 0;
};

struct End {
  explicit End(size_t bytes_in_a_call = SIZE_MAX, bool checksums = false)
      : van(0, std::make_unique<Wire>(bytes_in_a_call), "a peer", 0, options(checksums), /*is_bounded=*/false),
        wire(static_cast<Wire&>(van.stream())) {}

  static NodeOptions options(bool checksums) {
    NodeOptions made;
    made.checksums = checksums;
    return made;
  }

  Van van;
  Wire& wire;
};

class Content {
 public:
  explicit Content(size_t most_bytes) {
    for (size_t i = 0; i < most_bytes; ++i) bytes_.push_back(static_cast<char>(i * i >> 5));
  }
  Frame frame(uint32_t slice, uint32_t bytes, int32_t priority = 0) const {
    Frame made;
    made.header.kind = FrameKind::kPush;
    made.header.slice = slice;
    made.header.priority = priority;
    made.header.payload_bytes = bytes;
    made.payload = bytes_.data() + slice % 7;
    return made;
  }
  bool is_of(const Header& header, const std::vector<char>& payload) const {
    return payload.size() == header.payload_bytes &&
           std::equal(payload.begin(), payload.end(), bytes_.begin() + header.slice % 7);
  }

 private:
  std::vector<char> bytes_;
};

std::chrono::steady_clock::time_point now() { return std::chrono::steady_clock::now(); }

// All that is queued. Returns how often frames were taken off the queue for it.
int write_all(Van& van) {
  int turns = 0;
  for (; van.has_work(); ++turns) {
    van.begin_frames(now());
    while (van.write_some() == Van::Progress::kBlocked) continue;
  }
  return turns;
}

// The slices that come, in order, until the bytes end; each must be what was sent.
std::vector<uint32_t> read_all(Van& van, const Content& content) {
  std::vector<uint32_t> came;
  std::vector<char> payload;
  while (van.read_some() == Van::Progress::kMoved)
    for (Van::Event event = van.next(); event != Van::Event::kNothing; event = van.next()) {
      const Header& header = van.received_header();
      if (event == Van::Event::kHeader) {
        payload.assign(header.payload_bytes, 0);
        van.payload_goes_to(payload.data());
        continue;
      }
      EXPECT_TRUE(content.is_of(header, payload)) << header.slice;
      EXPECT_TRUE(van.is_intact()) << header.slice;
      came.push_back(header.slice);
    }
  return came;
}

TEST(Van, SmallFramesLeaveInOneWriteAndAreReadInOne) {
  constexpr uint32_t kFrames = 20;
  const Content content(200);
  End from, to;
  for (uint32_t i = 0; i < kFrames; ++i) from.van.push(content.frame(i, 100), now());
  EXPECT_EQ(write_all(from.van), 1);
  EXPECT_EQ(from.wire.calls, 1);
  EXPECT_EQ(from.van.writes().size(), kFrames) << "who owns their payloads must be told of each";
  Traffic traffic;
  from.van.add_to(traffic);
  EXPECT_EQ(traffic.slices_sent, kFrames);
  EXPECT_EQ(traffic.bytes_sent, kFrames * (sizeof(Header) + 100));
  EXPECT_EQ(traffic.held_bytes, 0u);
  to.wire.bytes = from.wire.bytes;
  EXPECT_EQ(read_all(to.van, content), up_to(kFrames));
  EXPECT_EQ(to.wire.calls, 2) << "the second one found the end";
}

TEST(Van, WhatLeavesInOneWriteIsNoMoreThanAFewKilobytesAndInOrder) {
  const Content content(5000);
  End from, to;
  from.van.push(content.frame(3, 1900, 0), now());
  from.van.push(content.frame(4, 1900, 0), now());
  from.van.push(content.frame(1, 1900, 2), now());
  from.van.push(content.frame(2, 4900, 1), now());
  from.van.push(content.frame(0, 1900, 3), now());
  EXPECT_EQ(write_all(from.van), 3) << "the two most urgent ones, the large one, and the two others";
  to.wire.bytes = from.wire.bytes;
  EXPECT_EQ(read_all(to.van, content), up_to(5));
}

TEST(Van, AFrameThatComesWhileOthersAreWrittenDoesNotJoinThem) {
  const Content content(200);
  End from(100), to;
  from.van.push(content.frame(0, 100), now());
  from.van.push(content.frame(1, 100), now());
  from.van.begin_frames(now());
  EXPECT_EQ(from.van.write_some(), Van::Progress::kBlocked);
  from.van.push(content.frame(2, 100, 9), now());
  from.van.begin_frames(now());
  while (from.van.write_some() == Van::Progress::kBlocked) continue;
  EXPECT_EQ(from.van.writes().size(), 2u);
  write_all(from.van);
  to.wire.bytes = from.wire.bytes;
  EXPECT_EQ(read_all(to.van, content), up_to(3));
}

// Frames larger and smaller than what is read ahead, those that end with it, and a byte more or less.
TEST(Van, FramesAreTheSameHoweverCallsCutThem) {
  const unsigned seed = std::random_device{}();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937 random(seed);
  const Content content(5 * kReadAhead);
  const size_t edge = kReadAhead - sizeof(Header);
  for (const bool checksums : {false, true})
    for (const size_t in_a_call :
         {size_t{1}, size_t{79}, size_t{81}, size_t{1000}, kReadAhead, size_t{30000}, SIZE_MAX}) {
      SCOPED_TRACE(in_a_call);
      End from(in_a_call, checksums), to(in_a_call, checksums);
      for (uint32_t i = 0; i < 60; ++i) {
        const size_t sizes[] = {0,    1,        random() % 300, edge - 1,
                                edge, edge + 1, kReadAhead,     random() % (4 * kReadAhead)};
        from.van.push(content.frame(i, static_cast<uint32_t>(sizes[random() % std::size(sizes)])), now());
      }
      write_all(from.van);
      to.wire.bytes = from.wire.bytes;
      ASSERT_EQ(read_all(to.van, content), up_to(60));
      EXPECT_FALSE(to.van.mid_receive());
    }
}

TEST(Van, KnowsWhetherTheEndCameInTheMiddleOfAFrame) {
  const Content content(2 * kReadAhead);
  End from;
  for (uint32_t size : {100u, 50u, static_cast<uint32_t>(kReadAhead + 100)})
    from.van.push(content.frame(0, size), now());
  write_all(from.van);
  const std::vector<char>& all = from.wire.bytes;
  const size_t second = sizeof(Header) + 100, third = second + sizeof(Header) + 50;
  for (size_t size = 0; size <= all.size(); ++size) {
    End to;
    to.wire.bytes.assign(all.begin(), all.begin() + static_cast<std::ptrdiff_t>(size));
    const size_t whole = size >= all.size() ? 3 : size >= third ? 2 : size >= second ? 1 : 0;
    ASSERT_EQ(read_all(to.van, content).size(), whole) << size;
    ASSERT_EQ(to.van.mid_receive(), size != 0 && size != second && size != third && size != all.size()) << size;
  }
}

TEST(Van, OfAConnectionThatIsLostAllIsGivenBackThatHadNotLeft) {
  const Content content(200);
  End from(150);
  for (uint32_t i = 0; i < 5; ++i) from.van.push(content.frame(i, 100), now());
  from.van.begin_frames(now());
  EXPECT_EQ(from.van.write_some(), Van::Progress::kBlocked);
  from.van.push(content.frame(5, 100), now());
  std::vector<Frame> unsent;
  from.van.drop(unsent);
  std::vector<uint32_t> slices;
  for (const Frame& frame : unsent) slices.push_back(frame.header.slice);
  EXPECT_EQ(slices, up_to(6));
  EXPECT_EQ(from.van.held_bytes(), 0u);

  End to;
  from.van.replace(std::make_unique<Wire>(SIZE_MAX), now());
  from.van.push(content.frame(0, 10), now());
  write_all(from.van);
  to.wire.bytes = static_cast<Wire&>(from.van.stream()).bytes;
  EXPECT_EQ(read_all(to.van, content), up_to(1)) << "nothing is left of the connection before";
}

// What an encoder makes of its frames is made when they leave, and where they lie then.
class Plus final : public Encoder {
 public:
  void encode(const Header& header, const void* source, void* payload) override {
    for (uint32_t i = 0; i < header.payload_bytes; ++i)
      static_cast<char*>(payload)[i] = static_cast<char>(static_cast<const char*>(source)[i] + 1);
  }
};

TEST(Van, EncodedFramesLeaveTogetherWithOthers) {
  std::vector<char> source(100, 'a');
  Plus plus;
  for (const uint32_t frames : {1u, 3u}) {
    End from(SIZE_MAX, /*checksums=*/true), to(SIZE_MAX, true);
    for (uint32_t i = 0; i < frames; ++i) {
      Frame frame;
      frame.header.kind = FrameKind::kPush;
      frame.header.payload_bytes = 100;
      frame.payload = source.data();
      if (i != 1) frame.encoder = &plus;
      from.van.push(frame, now());
    }
    EXPECT_EQ(write_all(from.van), 1);
    to.wire.bytes = from.wire.bytes;
    ASSERT_EQ(to.van.read_some(), Van::Progress::kMoved);
    std::vector<char> payload(100);
    for (uint32_t i = 0; i < frames; ++i) {
      ASSERT_EQ(to.van.next(), Van::Event::kHeader);
      to.van.payload_goes_to(payload.data());
      ASSERT_EQ(to.van.next(), Van::Event::kFrame);
      EXPECT_TRUE(to.van.is_intact());
      EXPECT_EQ(std::string(payload.begin(), payload.end()), std::string(100, i == 1 ? 'a' : 'b'));
    }
    EXPECT_EQ(source, std::vector<char>(100, 'a'));
  }
}

TEST(Van, FieldsLeaveAheadOfThePushesThatGoByThem) {
  const Content content(200);
  End from, to;
  for (uint32_t i = 0; i < 4; ++i) {
    Frame frame = content.frame(i, 100);
    frame.goes_by_fields = true;
    if (i == 1 || i == 2) frame.fields = std::make_shared<const FieldValues>(FieldValues{0.5, 0.25});
    from.van.push(frame, now());
  }
  EXPECT_EQ(write_all(from.van), 1);
  to.wire.bytes = from.wire.bytes;
  ASSERT_EQ(to.van.read_some(), Van::Progress::kMoved);
  std::vector<char> payload(100);
  std::string came;
  for (Van::Event event = to.van.next(); event != Van::Event::kNothing; event = to.van.next()) {
    const Header& header = to.van.received_header();
    const bool tells = header.kind == FrameKind::kFields;
    if (event == Van::Event::kHeader) {
      to.van.payload_goes_to(tells ? to.van.room_for_fields(header.payload_bytes) : payload.data());
    } else if (tells) {
      to.van.take_fields();
      came += 'f';
    } else {
      const bool goes_by = to.van.received_fields() != nullptr;
      EXPECT_EQ(goes_by, header.slice == 1 || header.slice == 2);
      came += static_cast<char>('0' + header.slice);
    }
  }
  EXPECT_EQ(came, "0f12f3");
}

}  // namespace
}  // namespace p3
