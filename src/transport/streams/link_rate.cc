#include "p3/link_rate.h"

#include <algorithm>
#include <utility>

#include "transport/streams/network_card.h"

namespace p3 {
namespace {

// A measurement takes so much at least: less passes at once through a token bucket, or into the kernel's memory.
constexpr uint64_t kBytesPerMeasurement = 1 << 20;
constexpr std::chrono::milliseconds kLeastTime{10};
constexpr uint64_t kMemory = 256;      // measurements, of the rate and of who is full
constexpr uint64_t kShortMemory = 64;  // of rates of long paths, each measured for two round trips or more

constexpr uint64_t kBetweenProbes = 32;  // measurements

uint64_t rate_of(uint64_t bytes, double seconds) { return static_cast<uint64_t>(static_cast<double>(bytes) / seconds); }

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

void LinkRate::begin_rounds() {
  in_rounds_ = true;
  ++period_;
  measurements_ = filled_ = connections_ = 0;
  ++version_;
}

void LinkRate::wrote(uint64_t bytes) {
  written_ += bytes;
  if (written_ < kBytesPerMeasurement) return;
  const auto now = Clock::now();
  if (now - since_ < kLeastTime) return;
  const double seconds = std::chrono::duration<double>(now - since_).count();
  const uint64_t rate = rate_of(std::max(written_, sent_by_card()), seconds);
  if (std::exchange(is_full_, false) && rate > full_rate_) full_rate_ = rate;
  measured(rate);
  written_ = 0;
  since_ = now;
}

// For two round trips at least: the card takes what leaves a window at once. A sixteenth of what it sends are headers and
// acknowledgements. And nothing is known before connections have come up, as BBR has it: what is three times no longer a
// quarter more than before is the link.
void LinkRate::delivered(uint64_t bytes, std::chrono::microseconds round_trip, Clock::time_point now) {
  const bool pauses = now - std::exchange(delivered_at_, now) > round_trip;
  delivered_ += bytes;
  const auto lasted = now - delivering_since_;
  if (!pauses && (delivered_ < kBytesPerMeasurement || lasted < 2 * round_trip)) return;
  const double seconds = std::chrono::duration<double>(lasted).count();
  const uint64_t rate = std::max(rate_of(delivered_, seconds), rate_of(sent_by_card() / 16 * 15, seconds));
  delivered_ = 0;
  delivering_since_ = now;
  if (pauses) return;
  if (rate_ > 0) return measured(rate, kShortMemory);
  if (rate > coming_up_ * 5 / 4) steady_ = 0;
  coming_up_ = std::max(coming_up_, rate);
  if (++steady_ > 3) measured(coming_up_, kShortMemory);
}

// Since this was asked last, with all headers; 0: nobody knows.
uint64_t LinkRate::sent_by_card() {
  const auto now = card_->bytes_sent();
  const auto then = std::exchange(card_then_, now);
  return then && now && *now > *then ? *now - *then : 0;
}

bool LinkRate::probes() const { return measurements_ % kBetweenProbes == 0; }

void LinkRate::measured(uint64_t rate) { measured(rate, kMemory); }

void LinkRate::measured(uint64_t rate, uint64_t memory) {
  const uint64_t before = rate_;
  rate_ = std::max(rate, before - before / memory);
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
