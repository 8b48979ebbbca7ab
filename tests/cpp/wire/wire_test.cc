#include "p3/wire.h"

#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <vector>

namespace p3 {
namespace {

// docs/protocol.md shows this very frame.
TEST(Wire, TheBytesOfAHeaderArePinned) {
  Header header;
  header.kind = FrameKind::kPush;
  header.dtype = 2;
  header.key = 0x01020304;
  header.slice = 0x0a0b0c0d;
  header.round = 417;
  header.priority = -2;
  header.payload_bytes = 200000;
  header.of_machine = 1;
  header.contributors = 260;
  header.scalars = {1.0, 0.5, 0.25, 3.0, 0.75};
  const std::vector<uint8_t> expected = {
      0x50, 0x33, 0x64, 0x57, 0x08, 0x01, 0x02, 0x00,  // "P3dW", version, kind, type, encoding
      0x04, 0x03, 0x02, 0x01, 0x0d, 0x0c, 0x0b, 0x0a,  // key, slice
      0xa1, 0x01, 0,    0,    0,    0,    0,    0,     // round
      0xfe, 0xff, 0xff, 0xff, 0x40, 0x0d, 0x03, 0x00,  // priority, payload bytes
      0,    0,    0,    0,    0,    0x01, 0x04, 0x01,  // checksum, part, of a machine, contributors
      0,    0,    0,    0,    0,    0,    0xf0, 0x3f,  // lr
      0,    0,    0,    0,    0,    0,    0xe0, 0x3f,  // wd
      0,    0,    0,    0,    0,    0,    0xd0, 0x3f,  // rescale
      0,    0,    0,    0,    0,    0,    0x08, 0x40,  // updates
      0,    0,    0,    0,    0,    0,    0xe8, 0x3f,  // schedule
  };
  std::vector<uint8_t> bytes(sizeof(Header));
  std::memcpy(bytes.data(), &header, sizeof header);
  EXPECT_EQ(bytes, expected);
}

TEST(Wire, AHeaderOfEachKindIsWellFormed) {
  for (uint8_t kind = 1; kind <= 15; ++kind) {
    Header header;
    header.kind = static_cast<FrameKind>(kind);
    EXPECT_EQ(malformed(header, false), "") << int(kind);
  }
}

TEST(Wire, EachForbiddenFieldIsNamed) {
  const auto reason = [](auto change) {
    Header header;
    header.kind = FrameKind::kPush;
    change(header);
    return malformed(header, false);
  };
  EXPECT_NE(reason([](Header& h) { h.magic = 0; }).find("magic"), std::string::npos);
  EXPECT_NE(reason([](Header& h) { h.version = 9; }).find("version 9"), std::string::npos);
  EXPECT_NE(reason([](Header& h) { h.kind = static_cast<FrameKind>(0); }).find("kind 0"), std::string::npos);
  EXPECT_NE(reason([](Header& h) { h.kind = static_cast<FrameKind>(20); }).find("kind 20"), std::string::npos);
  EXPECT_NE(reason([](Header& h) { h.of_machine = 2; }).find("reserved"), std::string::npos);
  EXPECT_NE(reason([](Header& h) { h.contributors = 1; }).find("counts workers"), std::string::npos);
  EXPECT_NE(reason([](Header& h) { h.of_machine = 1; }).find("sum of 0 workers"), std::string::npos);
  const auto of_machine_in = [](FrameKind kind) {
    return [kind](Header& h) {
      h.kind = kind;
      h.of_machine = 1;
    };
  };
  EXPECT_NE(reason(of_machine_in(FrameKind::kInit)).find("whole machine"), std::string::npos);
  EXPECT_EQ(reason(of_machine_in(FrameKind::kValue)), "");
  EXPECT_NE(reason([](Header& h) { h.encoding = 99; }).find("encoding 99"), std::string::npos);
  EXPECT_NE(reason([](Header& h) { h.crc32c = 1; }).find("reserved"), std::string::npos);
  EXPECT_NE(reason([](Header& h) { h.dtype = 99; }).find("type 99"), std::string::npos);
  const auto huge = [](FrameKind kind) {
    return [kind](Header& h) {
      h.kind = kind;
      h.payload_bytes = 1u << 30;
    };
  };
  EXPECT_NE(reason(huge(FrameKind::kFail)).find("1073741824"), std::string::npos);
  EXPECT_NE(reason(huge(FrameKind::kPing)).find("1073741824"), std::string::npos);
  EXPECT_NE(reason(huge(FrameKind::kBye)).find("1073741824"), std::string::npos);
  EXPECT_NE(reason(huge(FrameKind::kFields)).find("1073741824"), std::string::npos);
  const auto fields = [](uint32_t bytes) {
    return [bytes](Header& h) {
      h.kind = FrameKind::kFields;
      h.payload_bytes = bytes;
    };
  };
  EXPECT_EQ(reason(fields(kMostFields * 8)), "");
  EXPECT_EQ(reason(fields(kMostFields * 8 + 8)), "numbers of an optimizer in 136 bytes");
  EXPECT_EQ(reason(fields(12)), "numbers of an optimizer in 12 bytes");
}

TEST(Wire, EveryKindThatCarriesASliceMayBeAbsentWithoutAnyPayload) {
  using K = FrameKind;
  for (K kind : {K::kPush, K::kInit, K::kValue, K::kFetch, K::kStore, K::kPart, K::kChange, K::kClaim, K::kAsk}) {
    EXPECT_TRUE(carries_slice(kind));
    Header header;
    header.kind = kind;
    header.encoding = static_cast<uint8_t>(Encoding::kAbsent);
    header.part = kMaster;
    EXPECT_EQ(malformed(header, false), "");
    header.payload_bytes = 4;
    EXPECT_EQ(malformed(header, false), "an absent slice that announces 4 bytes");
    header.encoding = static_cast<uint8_t>(Encoding::kTwoBit);
    EXPECT_EQ(malformed(header, false), "");
  }
  for (K kind : {K::kPing, K::kFail, K::kBye, K::kFields, K::kYield}) EXPECT_FALSE(carries_slice(kind));
}

}  // namespace
}  // namespace p3
