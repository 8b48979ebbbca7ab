// The link that leaves this machine: how fast it is, and how many connections fill it.
//
// All of them derive their windows from this. A window that follows the rate of its own connection does not stay fair:
// who has had less gets a smaller one, and so less again. And windows that differ between the processes of a job leave
// links half empty that are full both ways. So each process says what its link carries, and all go by what the job has
// agreed on (docs/decisions.md).
// Threads: who writes; rate(), connections(), take_full_rate() and agree() any. Memory: outlives the streams that it is given to.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>

#include "p3/wire.h"

namespace p3 {

class NetworkCard;  // transport/streams/network_card.h

class LinkRate {
 public:
  using Clock = std::chrono::steady_clock;

  LinkRate();
  ~LinkRate();

  // `fd`: of a connection that leaves through it. The first one that a network card is known of says which card counts.
  void leaves_by_card_of(int fd);

  // A connection did not take all that it was to write. `noted`: the caller keeps it for that connection, 0 at first.
  void filled(uint64_t& noted);
  // How many have been full of late. The others, such as those to workers that only their leader sends to, need no part
  // of the link, and if they counted, those that do would have too little of it.
  uint64_t connections() const { return connections_; }
  // What is written from here on is of this round. First values go from every server to every worker, so those that they
  // have filled, if rounds will not, count no longer. Who writes.
  void writes_round(uint64_t round) {
    if (round > 0 && !in_rounds_) begin_rounds();
  }

  // So many bytes have been taken by one of them. The rate is measured so, and by what the card has sent in the same time
  // for other processes. Not the kernel's delivery rate, which takes what a token bucket lets pass at once for the rate
  // of the path.
  void wrote(uint64_t bytes);
  // In place of that, of a connection whose path is long: so many bytes have arrived since it told last, less than
  // `round_trip` ago. What the kernel has taken there may wait for the link.
  void delivered(uint64_t bytes, std::chrono::microseconds round_trip) { delivered(bytes, round_trip, Clock::now()); }
  void delivered(uint64_t bytes, std::chrono::microseconds round_trip, Clock::time_point now);
  void measured(uint64_t rate);
  // Whether connections of long paths are to send a little faster than their share, for the time of a measurement, now and
  // then: what all send by their share is no more than the link was known to carry. Who writes.
  bool probes() const;
  // Bytes per second; 0: not known yet. The greatest of late, because often there is less to send.
  uint64_t rate() const { return rate_; }

  // The greatest that was measured while a connection was full, since this was asked last; 0: none was. Of a link that has
  // less to send than it could, nobody knows how fast it is.
  uint64_t take_full_rate() { return full_rate_.exchange(0); }

  // What all processes of the job go by from here on.
  void agree(const LinkShare& link);
  // That; before, what this process knows.
  LinkShare share() const;
  // Changes whenever share() may have.
  uint64_t version() const { return version_; }

 private:
  void begin_rounds();
  uint64_t sent_by_card();
  void measured(uint64_t rate, uint64_t memory);

  std::unique_ptr<NetworkCard> card_;
  std::atomic<uint64_t> connections_{0}, rate_{0}, version_{0};
  uint64_t period_ = 1, measurements_ = 0;  // in this period
  uint64_t filled_ = 0;                     // connections, in this period
  bool in_rounds_ = false;                  // first values are over
  bool is_full_ = false;                    // one was, since_
  std::atomic<uint64_t> full_rate_{0};
  std::atomic<uint64_t> agreed_rate_{0}, agreed_connections_{0};  // 0: nothing is agreed yet
  uint64_t written_ = 0;                                          // since_
  std::optional<uint64_t> card_then_;                             // what the card had sent, since_
  Clock::time_point since_ = Clock::now();
  uint64_t delivered_ = 0;  // since delivering_since_, without a pause, at last delivered_at_
  Clock::time_point delivering_since_{}, delivered_at_{};
  uint64_t coming_up_ = 0, steady_ = 0;  // the greatest rate so far, and how often it has hardly grown
};

}  // namespace p3
