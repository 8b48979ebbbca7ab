// What a host hands to its card at once: an Ethernet frame, or a TCP segment of many packets that the card is to cut up
// (TSO). On the link each packet counts alone; packets of one segment that arrive together are handed over together, as a
// real card and its driver do it (GRO).
// Threads: none of it changes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace p3::relay {

// What precedes a frame of a TAP device with IFF_VNET_HDR: what is left to the card. It is virtio_net_hdr, whose header of
// Linux is none of C++.
struct Offload {
  static constexpr uint8_t kChecksumMissing = 1, kOnePacket = 0, kTcpSegment = 1;
  uint8_t flags = 0;  // kChecksumMissing
  uint8_t kind = 0;   // kOnePacket, or kTcpSegment over IPv4
  uint16_t header_bytes = 0;
  uint16_t packet_payload = 0;              // of a segment, each packet's but the last
  uint16_t sum_begins = 0, sum_offset = 0;  // of the checksum: behind this offset, and at that one from there
};
static_assert(sizeof(Offload) == 10);

class Frame {
 public:
  // The most that a TAP device hands over, with what precedes it.
  static constexpr size_t kMostBytes = sizeof(Offload) + 14 + (1 << 16);

  // As read from a TAP device with IFF_VNET_HDR. Null: nothing that one can make sense of.
  static std::shared_ptr<const Frame> of(const char* data, size_t size);

  int packets() const { return packets_; }
  size_t bytes_of(int packet) const;  // of its Ethernet frame
  bool is_ip() const;
  const uint8_t* destination() const { return bytes_.data(); }  // six bytes

  // Some of its packets, behind each other, as a TAP device takes them.
  void append_to(std::vector<uint8_t>& out, int first, int count) const;

 private:
  Frame(const Offload& offload, std::vector<uint8_t> bytes);

  size_t payload_bytes() const { return bytes_.size() - header_bytes_; }
  // Makes the headers those of `payload` bytes from an offset on.
  void correct(uint8_t* headers, int first, size_t offset, size_t payload) const;

  Offload offload_;  // of all packets together
  std::vector<uint8_t> bytes_;
  int packets_ = 1;
  size_t header_bytes_;        // all, of a single packet
  size_t packet_payload_ = 0;  // of each but the last
};

}  // namespace p3::relay
