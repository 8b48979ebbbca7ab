#include "relay/frame.h"

#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <vector>

namespace p3::relay {
namespace {

constexpr size_t kHeaders = 14 + 20 + 32;  // TCP with time stamps
constexpr size_t kIp = 14, kTcp = 14 + 20;
constexpr uint32_t kSequence = 0xfffffff0;  // so that it comes round

// A segment of so many bytes that the card is to cut up, FIN, PSH and CWR set.
std::vector<char> segment(size_t payload, uint16_t packet_payload) {
  Offload offload{};
  offload.flags = Offload::kChecksumMissing;
  offload.kind = packet_payload == 0 ? Offload::kOnePacket : Offload::kTcpSegment;
  offload.packet_payload = packet_payload;
  offload.sum_begins = kTcp;
  offload.sum_offset = 16;
  offload.header_bytes = kHeaders + 100;  // what lies in one piece of memory, as Linux has it
  std::vector<char> made(sizeof offload + kHeaders + payload);
  std::memcpy(made.data(), &offload, sizeof offload);
  auto* frame = reinterpret_cast<uint8_t*>(made.data()) + sizeof offload;
  frame[12] = 0x08;  // IPv4
  frame[kIp] = 0x45;
  frame[kIp + 5] = 9;  // its identity
  frame[kIp + 9] = 6;  // TCP
  for (size_t i = 12; i < 20; ++i) frame[kIp + i] = static_cast<uint8_t>(10 * i);
  for (size_t i = 0; i < 4; ++i) frame[kTcp + 4 + i] = static_cast<uint8_t>(kSequence >> (24 - 8 * i));
  frame[kTcp + 12] = 8 << 4;
  frame[kTcp + 13] = 0x80 | 0x10 | 0x08 | 0x01;
  for (size_t i = 0; i < payload; ++i) frame[kHeaders + i] = static_cast<uint8_t>(i % 251);
  return made;
}

std::shared_ptr<const Frame> frame(const std::vector<char>& made) { return Frame::of(made.data(), made.size()); }

uint32_t big(const uint8_t* at, int bytes) {
  uint32_t value = 0;
  for (int i = 0; i < bytes; ++i) value = value << 8 | at[i];
  return value;
}

uint32_t internet_sum(const uint8_t* at, size_t bytes, uint32_t sum = 0) {
  for (size_t i = 0; i < bytes; i += 2) sum += big(at + i, 2);
  while (sum >> 16) sum = (sum & 0xffff) + (sum >> 16);
  return sum;
}

TEST(Frame, ASegmentCountsAsThePacketsThatItBecomes) {
  const auto whole = frame(segment(2500, 1000));
  ASSERT_NE(whole, nullptr);
  ASSERT_EQ(whole->packets(), 3);
  EXPECT_EQ(whole->bytes_of(0), kHeaders + 1000);
  EXPECT_EQ(whole->bytes_of(2), kHeaders + 500);
  EXPECT_TRUE(whole->is_ip());
}

TEST(Frame, WhatIsNoLongSegmentIsOnePacket) {
  const auto one = frame(segment(700, 0));
  EXPECT_EQ(one->packets(), 1);
  EXPECT_EQ(one->bytes_of(0), kHeaders + 700);
  EXPECT_EQ(frame(segment(1000, 1000))->packets(), 1);
}

TEST(Frame, WholeItIsHandedOverAsItCame) {
  const auto made = segment(2500, 1000);
  std::vector<uint8_t> out;
  frame(made)->append_to(out, 0, 3);
  EXPECT_EQ(std::string(out.begin(), out.end()), std::string(made.begin(), made.end()));
}

struct Part {
  int first, count;
  size_t offset, payload;
  uint8_t flags;
};

class FramePart : public testing::TestWithParam<Part> {};

TEST_P(FramePart, HasHeadersOfItsOwn) {
  const Part part = GetParam();
  std::vector<uint8_t> out;
  frame(segment(2500, 1000))->append_to(out, part.first, part.count);
  ASSERT_EQ(out.size(), sizeof(Offload) + kHeaders + part.payload);
  Offload offload;
  std::memcpy(&offload, out.data(), sizeof offload);
  EXPECT_EQ(offload.kind, part.count == 1 ? Offload::kOnePacket : Offload::kTcpSegment);
  EXPECT_EQ(offload.packet_payload, part.count == 1 ? 0 : 1000);
  EXPECT_EQ(offload.header_bytes, kHeaders);
  EXPECT_EQ(offload.flags, Offload::kChecksumMissing);

  const uint8_t* its = out.data() + sizeof offload;
  EXPECT_EQ(big(its + kIp + 2, 2), kHeaders - kIp + part.payload);
  EXPECT_EQ(big(its + kIp + 4, 2), 9u + static_cast<uint32_t>(part.first));
  EXPECT_EQ(internet_sum(its + kIp, 20), 0xffffu);
  EXPECT_EQ(big(its + kTcp + 4, 4), kSequence + static_cast<uint32_t>(part.offset));
  EXPECT_EQ(its[kTcp + 13], part.flags);
  EXPECT_EQ(big(its + kTcp + 16, 2), internet_sum(its + kIp + 12, 8, 6 + 32 + static_cast<uint32_t>(part.payload)));
  for (size_t i = 0; i < part.payload; ++i) ASSERT_EQ(its[kHeaders + i], (part.offset + i) % 251) << i;
}

// CWR is the first one's, FIN and PSH are the last one's.
INSTANTIATE_TEST_SUITE_P(Parts, FramePart,
                         testing::Values(Part{0, 1, 0, 1000, 0x90}, Part{1, 1, 1000, 1000, 0x10},
                                         Part{2, 1, 2000, 500, 0x19}, Part{0, 2, 0, 2000, 0x90},
                                         Part{1, 2, 1000, 1500, 0x19}));

TEST(Frame, NonsenseIsRefusedOrPassesWhole) {
  const std::vector<char> short_one(sizeof(Offload) + 13);
  EXPECT_EQ(frame(short_one), nullptr);
  auto cut = segment(2500, 1000);
  cut.resize(sizeof(Offload) + 30);
  EXPECT_EQ(frame(cut)->packets(), 1);
}

}  // namespace
}  // namespace p3::relay
