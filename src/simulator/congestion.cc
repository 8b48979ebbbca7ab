#include "simulator/congestion.h"

#include <algorithm>
#include <cmath>

namespace p3::simulator {
namespace {

constexpr double kCubicGrowth = 0.4;  // packets per cubic second

constexpr double kStartupGain = 2.885;  // 2 / ln 2
constexpr double kWindowGain = 2;
constexpr double kPhaseGains[] = {1.25, 0.75, 1, 1, 1, 1, 1, 1};
constexpr int kPhases = 8;
constexpr uint64_t kRateRounds = 10;
constexpr double kAggregation_s = 0.1;  // of the rate that it may add to the window, at most
constexpr double kGreatestBurst = 65536;
constexpr double kBurst_s = 1.0 / 1024;  // what leaves as one, of the rate

}  // namespace

std::unique_ptr<CongestionControl> CongestionControl::make(Congestion kind, double packet_bytes) {
  switch (kind) {
    case Congestion::kCubic:
      return std::make_unique<Cubic>(packet_bytes);
    case Congestion::kBbr:
      return std::make_unique<Bbr>(packet_bytes);
    case Congestion::kNone:
      break;
  }
  return nullptr;
}

void Cubic::on_ack(const Ack& ack) {
  // Nobody knows what the path bears of a window that is not used.
  if (ack.in_flight + ack.bytes < window_ / 2) return;
  if (window_ < slow_start_until_) {
    window_ += ack.bytes;
    return;
  }
  if (grows_since_ < 0) grows_since_ = ack.now;
  const double packets_at_loss = window_at_loss_ / packet_;
  const double back_after_s = std::cbrt(packets_at_loss * (1 - kLeft) / kCubicGrowth);
  const double since_s = ack.now - grows_since_ + ack.rtt_s;
  const double aim = (packets_at_loss + kCubicGrowth * std::pow(since_s - back_after_s, 3)) * packet_;
  // Never slower than Reno would with this loss of three tenths: half a packet for each window.
  const double reno = 3 * (1 - kLeft) / (1 + kLeft) * packet_ * ack.bytes / window_;
  window_ += std::max(reno, std::min(aim - window_, window_ / 2) * ack.bytes / window_);
}

void Cubic::on_loss(double now, double delivered) {
  if (delivered < recovered_at_) return;  // of the same window
  recovered_at_ = delivered + window_;
  window_at_loss_ = window_;
  window_ = slow_start_until_ = std::max(2 * packet_, window_ * kLeft);
  grows_since_ = now;
}

double Bbr::window() const {
  if (probes_rtt_until_ >= 0) return kLeastPackets * packet_;
  if (rates_.empty()) return Cubic::kFirstPackets * packet_;
  const double gain = mode_ == Mode::kProbeBandwidth ? kWindowGain : kStartupGain;
  const double burst = std::clamp(rate() * kBurst_s, 2 * packet_, kGreatestBurst);
  const double extra = std::min(aggregated_, rate() * kAggregation_s);
  return std::max(kLeastPackets * packet_, gain * path_bytes() + 3 * burst + extra);
}

double Bbr::bytes_per_s() const {
  if (rates_.empty()) return std::numeric_limits<double>::infinity();
  switch (mode_) {
    case Mode::kStartup:
      return kStartupGain * rate();
    case Mode::kDrain:
      return rate() / kStartupGain;
    case Mode::kProbeBandwidth:
      break;
  }
  return kPhaseGains[phase_] * rate();
}

void Bbr::on_ack(const Ack& ack) {
  note_rate(ack);
  note_aggregation(ack);
  note_rtt(ack);
  change_mode(ack);
}

void Bbr::note_rate(const Ack& ack) {
  if (ack.delivered_at_send >= round_ends_at_) {
    ++rounds_;
    round_ends_at_ = ack.delivered;
    if (mode_ == Mode::kStartup && !rates_.empty()) {
      rounds_without_growth_ = rate() > 1.25 * full_rate_ ? 0 : rounds_without_growth_ + 1;
      full_rate_ = std::max(full_rate_, rate());
    }
  }
  if (ack.interval_s <= 0) return;
  const double sample = (ack.delivered - ack.delivered_at_send) / ack.interval_s;
  while (!rates_.empty() && rates_.back().second <= sample) rates_.pop_back();
  rates_.emplace_back(rounds_, sample);
  while (rates_.front().first + kRateRounds < rounds_) rates_.pop_front();
}

void Bbr::note_rtt(const Ack& ack) {
  const bool is_old = ack.now > least_rtt_at_ + kRttWindow_s;
  if (ack.rtt_s <= least_rtt_s_ || (is_old && probes_rtt_until_ >= 0)) {
    least_rtt_s_ = ack.rtt_s;
    least_rtt_at_ = ack.now;
  } else if (is_old) {
    probes_rtt_until_ = ack.now + kProbeRtt_s;
  }
  if (probes_rtt_until_ >= 0 && ack.now > probes_rtt_until_) probes_rtt_until_ = -1;
}

void Bbr::note_aggregation(const Ack& ack) {
  const double expected = rate() * (ack.now - burst_since_);
  if (burst_bytes_ <= expected) {
    burst_since_ = ack.now;
    burst_bytes_ = 0;
  }
  burst_bytes_ += ack.bytes;
  aggregated_ = std::max(aggregated_, burst_bytes_ - rate() * (ack.now - burst_since_));
}

void Bbr::change_mode(const Ack& ack) {
  if (mode_ == Mode::kStartup && rounds_without_growth_ >= 3) mode_ = Mode::kDrain;
  if (mode_ == Mode::kDrain && ack.in_flight <= path_bytes()) {
    mode_ = Mode::kProbeBandwidth;
    phase_ = 2;
    phase_since_ = ack.now;
  }
  if (mode_ == Mode::kProbeBandwidth && ack.now - phase_since_ > least_rtt_s_) {
    phase_ = (phase_ + 1) % kPhases;
    phase_since_ = ack.now;
  }
}

}  // namespace p3::simulator
