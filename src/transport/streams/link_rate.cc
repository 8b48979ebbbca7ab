#include "p3/link_rate.h"

#include <algorithm>

#include "transport/streams/network_card.h"

namespace p3 {
namespace {

// A measurement takes so much at least: less passes at once through a token bucket, or into the kernel's memory.
constexpr uint64_t kBytesPerMeasurement = 1 << 20;
constexpr std::chrono::milliseconds kLeastTime{10};
constexpr uint64_t kMemory = 256;  // measurements

}  // namespace

LinkRate::LinkRate() : card_(std::make_unique<NetworkCard>()) {}
LinkRate::~LinkRate() = default;

void LinkRate::add_connection(int fd) {
  ++connections_;
  ++version_;
  if (fd < 0 || card_->is_known()) return;
  *card_ = NetworkCard::of(fd);
  card_then_ = card_->bytes_sent();
}

void LinkRate::remove_connection() {
  --connections_;
  ++version_;
}

void LinkRate::wrote(uint64_t bytes) {
  written_ += bytes;
  if (written_ < kBytesPerMeasurement) return;
  const auto now = std::chrono::steady_clock::now();
  if (now - since_ < kLeastTime) return;
  const auto card_now = card_->bytes_sent();
  const uint64_t of_card = card_then_ && card_now && *card_now > *card_then_ ? *card_now - *card_then_ : 0;
  const double seconds = std::chrono::duration<double>(now - since_).count();
  measured(static_cast<uint64_t>(static_cast<double>(std::max(written_, of_card)) / seconds));
  written_ = 0;
  card_then_ = card_now;
  since_ = now;
}

void LinkRate::measured(uint64_t rate) {
  const uint64_t before = rate_;
  rate_ = std::max(rate, before - before / kMemory);
  ++version_;
}

void LinkRate::agree(const LinkShare& link) {
  if (link.connections == 0 || link.bytes_per_second == 0) return;
  if (link.bytes_per_second == agreed_rate_ && link.connections == agreed_connections_) return;
  agreed_rate_ = link.bytes_per_second;
  agreed_connections_ = link.connections;
  ++version_;
}

// A worker and a server share most machines' links, and the other one has about as many connections.
LinkShare LinkRate::share() const {
  if (agreed_connections_ > 0) return {agreed_rate_, agreed_connections_};
  return {rate_, 2 * std::max<uint64_t>(connections_, 1)};
}

}  // namespace p3
