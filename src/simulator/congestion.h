// How many bytes of a connection may be on their way, and how fast they may leave: CUBIC or BBR, as far as it decides.
//
// Left out: what handles packets that come out of order, ECN, the reaction to a retransmission timeout, HyStart.
// Units: bytes, seconds. Threads: none.
#pragma once

#include <cstdint>
#include <deque>
#include <limits>
#include <memory>
#include <utility>

#include "simulator/job.h"

namespace p3::simulator {

struct Ack {
  double now = 0;
  double bytes = 0;              // of the segment that has arrived
  double rtt_s = 0;              // since that left
  double in_flight = 0;          // now
  double delivered = 0;          // of the connection so far
  double delivered_at_send = 0;  // when the segment left
  double interval_s = 0;         // in which the difference was delivered
};

class CongestionControl {
 public:
  virtual ~CongestionControl() = default;
  virtual double window() const = 0;
  virtual double bytes_per_s() const { return std::numeric_limits<double>::infinity(); }  // at which segments may leave
  virtual void on_ack(const Ack& ack) = 0;
  virtual void on_loss(double now, double delivered) = 0;

  // Null for kNone.
  static std::unique_ptr<CongestionControl> make(Congestion kind, double packet_bytes);
};

class Cubic : public CongestionControl {
 public:
  explicit Cubic(double packet_bytes) : packet_(packet_bytes), window_(kFirstPackets * packet_bytes) {}
  double window() const override { return window_; }
  void on_ack(const Ack& ack) override;
  void on_loss(double now, double delivered) override;

  static constexpr double kFirstPackets = 10;
  static constexpr double kLeft = 0.7;  // of the window after a loss

 private:
  const double packet_;
  double window_;
  double slow_start_until_ = std::numeric_limits<double>::infinity();
  double window_at_loss_ = 0;
  double grows_since_ = -1;  // < 0: since nothing was lost
  double recovered_at_ = 0;  // bytes delivered by which one loss has been answered
};

class Bbr : public CongestionControl {
 public:
  explicit Bbr(double packet_bytes) : packet_(packet_bytes) {}
  double window() const override;
  double bytes_per_s() const override;
  void on_ack(const Ack& ack) override;
  void on_loss(double, double) override {}  // one loss alone means nothing to it

  static constexpr double kLeastPackets = 4;
  static constexpr double kRttWindow_s = 10;
  static constexpr double kProbeRtt_s = 0.2;

 private:
  enum class Mode { kStartup, kDrain, kProbeBandwidth };

  void note_rate(const Ack& ack);
  void note_rtt(const Ack& ack);
  void note_aggregation(const Ack& ack);
  void change_mode(const Ack& ack);
  double rate() const { return rates_.empty() ? 0 : rates_.front().second; }
  double path_bytes() const { return rate() * least_rtt_s_; }

  const double packet_;
  Mode mode_ = Mode::kStartup;
  // The greatest of the last ten round trips, with the number of its own; falling.
  std::deque<std::pair<uint64_t, double>> rates_;
  uint64_t rounds_ = 0;
  double round_ends_at_ = 0;  // bytes delivered
  double least_rtt_s_ = std::numeric_limits<double>::infinity();
  double least_rtt_at_ = 0;
  double probes_rtt_until_ = -1;
  double full_rate_ = 0;
  int rounds_without_growth_ = 0;
  int phase_ = 0;
  double phase_since_ = 0;
  double burst_since_ = 0, burst_bytes_ = 0, aggregated_ = 0;  // acknowledgements that came faster than the rate
};

}  // namespace p3::simulator
