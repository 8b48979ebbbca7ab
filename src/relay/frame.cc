#include "relay/frame.h"

#include <net/ethernet.h>
#include <netinet/in.h>

#include <algorithm>
#include <cstring>

namespace p3::relay {
namespace {

constexpr size_t kEthernet = 14;
// Offsets in the headers of IPv4 and of TCP.
constexpr size_t kLength = 2, kIdentity = 4, kProtocol = 9, kIpChecksum = 10, kAddresses = 12;
constexpr size_t kSequence = 4, kFlags = 13, kTcpChecksum = 16;
constexpr uint8_t kFin = 0x01, kPush = 0x08, kCongestionWindowReduced = 0x80;
constexpr size_t kLeastIp = 20, kLeastTcp = 20;

uint32_t big_16(const uint8_t* at) { return static_cast<uint32_t>(at[0] << 8 | at[1]); }

void put_16(uint8_t* at, uint32_t value) {
  at[0] = static_cast<uint8_t>(value >> 8);
  at[1] = static_cast<uint8_t>(value);
}

uint32_t big_32(const uint8_t* at) { return big_16(at) << 16 | big_16(at + 2); }

void put_32(uint8_t* at, uint32_t value) {
  put_16(at, value >> 16);
  put_16(at + 2, value);
}

// The Internet's sum (RFC 1071) of an even number of bytes.
uint32_t sum_of(const uint8_t* at, size_t bytes, uint32_t sum = 0) {
  for (size_t i = 0; i < bytes; i += 2) sum += big_16(at + i);
  while (sum >> 16) sum = (sum & 0xffff) + (sum >> 16);
  return sum;
}

size_t ip_bytes(const uint8_t* ip) { return static_cast<size_t>(ip[0] & 0xf) * 4; }
size_t tcp_bytes(const uint8_t* tcp) { return static_cast<size_t>(tcp[12] >> 4) * 4; }

}  // namespace

std::shared_ptr<const Frame> Frame::of(const char* data, size_t size) {
  Offload offload;
  if (size < sizeof offload + kEthernet) return nullptr;
  std::memcpy(&offload, data, sizeof offload);
  const auto* begin = reinterpret_cast<const uint8_t*>(data) + sizeof offload;
  return std::shared_ptr<const Frame>(new Frame(offload, {begin, begin + (size - sizeof offload)}));
}

Frame::Frame(const Offload& offload, std::vector<uint8_t> bytes)
    : offload_(offload), bytes_(std::move(bytes)), header_bytes_(bytes_.size()) {
  if (offload_.kind != Offload::kTcpSegment || offload_.packet_payload == 0) return;
  if (bytes_.size() < kEthernet + kLeastIp + kLeastTcp) return;
  const uint8_t* ip = bytes_.data() + kEthernet;
  if (kEthernet + ip_bytes(ip) + kLeastTcp > bytes_.size()) return;
  const size_t headers = kEthernet + ip_bytes(ip) + tcp_bytes(ip + ip_bytes(ip));
  if (headers >= bytes_.size()) return;
  header_bytes_ = headers;
  packet_payload_ = offload_.packet_payload;
  packets_ = static_cast<int>((payload_bytes() + packet_payload_ - 1) / packet_payload_);
}

size_t Frame::bytes_of(int packet) const {
  if (packets_ == 1) return bytes_.size();
  const size_t before = static_cast<size_t>(packet) * packet_payload_;
  return header_bytes_ + std::min(packet_payload_, payload_bytes() - before);
}

bool Frame::is_ip() const { return big_16(bytes_.data() + 12) == ETHERTYPE_IP; }

void Frame::append_to(std::vector<uint8_t>& out, int first, int count) const {
  Offload offload = offload_;
  if (count < packets_) offload.header_bytes = static_cast<uint16_t>(header_bytes_);
  if (count == 1) {
    offload.kind = Offload::kOnePacket;
    offload.packet_payload = 0;
  }
  const auto* its_bytes = reinterpret_cast<const uint8_t*>(&offload);
  out.insert(out.end(), its_bytes, its_bytes + sizeof offload);
  if (count == packets_) {
    out.insert(out.end(), bytes_.begin(), bytes_.end());
    return;
  }
  const size_t offset = static_cast<size_t>(first) * packet_payload_;
  const size_t payload = std::min(static_cast<size_t>(count) * packet_payload_, payload_bytes() - offset);
  const size_t begin = out.size();
  const uint8_t* from = bytes_.data() + header_bytes_ + offset;
  out.insert(out.end(), bytes_.begin(), bytes_.begin() + static_cast<std::ptrdiff_t>(header_bytes_));
  out.insert(out.end(), from, from + payload);
  correct(out.data() + begin, first, offset, payload);
}

void Frame::correct(uint8_t* headers, int first, size_t offset, size_t payload) const {
  uint8_t* ip = headers + kEthernet;
  uint8_t* tcp = ip + ip_bytes(ip);
  put_16(ip + kLength, static_cast<uint32_t>(header_bytes_ - kEthernet + payload));
  put_16(ip + kIdentity, big_16(ip + kIdentity) + static_cast<uint32_t>(first));
  put_16(ip + kIpChecksum, 0);
  put_16(ip + kIpChecksum, ~sum_of(ip, ip_bytes(ip)));

  put_32(tcp + kSequence, big_32(tcp + kSequence) + static_cast<uint32_t>(offset));
  if (first > 0) tcp[kFlags] &= static_cast<uint8_t>(~kCongestionWindowReduced);
  if (offset + payload < payload_bytes()) tcp[kFlags] &= static_cast<uint8_t>(~(kFin | kPush));
  // The sum of the pseudo header alone: the rest is left to the card that is never there.
  const size_t of_tcp = tcp_bytes(tcp) + payload;
  put_16(tcp + kTcpChecksum, sum_of(ip + kAddresses, 8, ip[kProtocol] + static_cast<uint32_t>(of_tcp)));
}

}  // namespace p3::relay
