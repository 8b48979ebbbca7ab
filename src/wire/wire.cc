#include "p3/wire.h"

#include <cmath>

#include "base/crc32c.h"
#include "p3/dtype.h"

namespace p3 {
namespace {

bool is_known(FrameKind kind) { return kind >= FrameKind::kPush && kind <= FrameKind::kAsk; }
bool is_known(Encoding encoding) { return encoding <= kLastEncoding; }

bool is_whole(double number) {  // also false for what is no number
  return number >= 0 && number <= static_cast<double>(kLastSnapshot) && number == std::floor(number);
}

}  // namespace

std::string malformed(const Header& header, bool checksums) {
  if (header.magic != Header::kMagic) return "a frame that does not begin with P3's magic number";
  if (header.version != Header::kVersion)
    return "a frame of protocol version " + std::to_string(header.version) + "; this node speaks version " +
           std::to_string(Header::kVersion) + " (install the same p3-training on all nodes)";
  if (!is_known(header.kind)) return "a frame of unknown kind " + std::to_string(static_cast<int>(header.kind));
  const bool may_have_checksum = checksums && has_checksum(header.kind);
  if ((header.crc32c != 0 && !may_have_checksum) || header.of_machine > 1)
    return "a frame with reserved bits set (P3_CHECKSUM must be the same on all nodes)";
  if (header.of_machine != 0 && !is_push(header.kind) && header.kind != FrameKind::kValue &&
      header.kind != FrameKind::kChange && header.kind != FrameKind::kRows)
    return "a frame for a whole machine that can only be one worker's";
  if (header.kind == FrameKind::kCapture && !is_whole(header.scalars.updates))
    return "a request for a snapshot of no round";
  if (header.contributors != 0 && (header.of_machine == 0 || !is_push(header.kind)))
    return "a frame that counts workers where there are none to count";
  if (carries_slice(header.kind)) {
    const auto encoding = static_cast<Encoding>(header.encoding);
    if (!is_known(static_cast<DType>(header.dtype)))
      return "a slice of unknown element type " + std::to_string(header.dtype);
    if (!is_known(encoding)) return "a slice of unknown encoding " + std::to_string(header.encoding);
    if (header.of_machine != 0 && is_push(header.kind) && (encoding == Encoding::kAbsent) != (header.contributors == 0))
      return "a machine's sum of " + std::to_string(header.contributors) + " workers";
    if (encoding == Encoding::kAbsent && header.payload_bytes != 0)
      return "an absent slice that announces " + std::to_string(header.payload_bytes) + " bytes";
  } else if (header.kind == FrameKind::kFields) {
    if (header.payload_bytes > kMostFields * sizeof(double) || header.payload_bytes % sizeof(double) != 0)
      return "numbers of an optimizer in " + std::to_string(header.payload_bytes) + " bytes";
  } else if (header.kind == FrameKind::kFail) {
    if (header.payload_bytes > kMaxFailTextBytes)
      return "a failure text of " + std::to_string(header.payload_bytes) + " bytes";
  } else if (header.payload_bytes != 0) {
    return "a frame without contents that announces " + std::to_string(header.payload_bytes) + " bytes";
  }
  return {};
}

uint32_t checksum_of(Header header, const void* payload) {
  header.crc32c = 0;
  return crc32c(crc32c(0, &header, sizeof header), payload, header.payload_bytes);
}

}  // namespace p3
