#include "p3/link_rate.h"

#include <algorithm>
#include <utility>

#include "transport/streams/network_card.h"

namespace p3 {
namespace {

// A measurement takes so much at least: less passes at once through a token bucket, or into the kernel's memory.
constexpr uint64_t kBytesPerMeasurement = 1 << 20;
constexpr std::chrono::milliseconds kLeastTime{10};
constexpr uint64_t kMemory = 256;  // measurements, of the rate and of who is full

}  // namespace

LinkRate::LinkRate() : card_(std::make_unique<NetworkCard>()) {}
LinkRate::~LinkRate() = default;

void LinkRate::leaves_by_card_of(int fd) {
  if (card_->is_known()) return;
  *card_ = NetworkCard::of(fd);
  card_then_ = card_->bytes_sent();
}

void LinkRate::filled(uint64_t& noted) {
  is_full_ = true;
  if (std::exchange(noted, period_) == period_ || ++filled_ <= connections_) return;
  connections_ = filled_;
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
  const auto rate = static_cast<uint64_t>(static_cast<double>(std::max(written_, of_card)) / seconds);
  if (std::exchange(is_full_, false) && rate > full_rate_) full_rate_ = rate;
  measured(rate);
  written_ = 0;
  card_then_ = card_now;
  since_ = now;
}

void LinkRate::measured(uint64_t rate) {
  const uint64_t before = rate_;
  rate_ = std::max(rate, before - before / kMemory);
  if (++measurements_ == kMemory) {
    ++period_;
    measurements_ = 0;
    if (filled_ > 0) connections_ = std::exchange(filled_, 0);  // else there was little to send
  }
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
