// When a round of a slice closes that need not wait for all workers, and who is answered when: it closes when all that take
// part have pushed, or when `least` workers have, and `grace` has passed since the last of these.
//
// A worker that pushes for its n-th time when n rounds have closed is late. Its push counts in the round that is open, and
// it is answered at once; any other push is answered when its round closes. A worker that pushes no more for a while
// stands aside: no round waits for it. Once all do, they meet: what has come closes a round, all are answered, and then
// all are level again, whoever has been behind.
//
// Nobody waits forever, whatever `least` is and however many slices there are in how many fragments: of the workers that
// do not stand aside, let one be least far in the order in which all of them push, which is the same for all. If it waits,
// it is for its n-th push of a slice, of which n - 1 rounds have closed. All others have pushed that slice n times, or
// will without waiting for this one, and none of these n-th pushes was late: so they are all in the round, which closes.
// What closes rounds earlier, by `least` and `grace`, brings forward what would come anyway.
//
// A worker that leaves the job is waited for no more, and not answered. What it has pushed counts, also if that is noticed
// afterwards.
//
// Source: quorum and grace as in Decoupled DiLoCo (arXiv 2604.21428).
// Threads: none of its own.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

namespace p3 {

class Quorum {
 public:
  using Clock = std::chrono::steady_clock;

  struct Answer {
    int worker;
    bool is_in_value;  // its last push; false: it is late, and in a round to come
  };
  struct Settled {
    bool closes = false;    // the open round, with what has come
    bool have_met = false;  // all, so that all these answers are the last ones before they go on
    std::vector<Answer> answers{};
  };

  Quorum(size_t workers, size_t least, Clock::duration grace) : least_(least), grace_(grace), workers_(workers) {}

  // Its last push is not answered yet.
  bool waits(int worker) const { return its(worker).waits && !its(worker).is_gone; }

  // Of a worker that does not wait; then settle(). True: the push is late.
  bool push(int worker, Clock::time_point now) {
    Worker& one = its(worker);
    ++one.pushes;
    one.waits = true;
    if (!one.is_in) {
      one.is_in = true;
      if (++in_ == least_) had_least_at_ = now;
    }
    return one.pushes <= closed_;
  }
  void stand_aside(int worker) { its(worker).waits = its(worker).is_aside = true; }
  void leave(int worker) { its(worker).is_gone = true; }

  // What is to be done by now.
  Settled settle(Clock::time_point now) {
    Settled made;
    made.closes = is_over(now);
    // Before close(): who is late by the count of rounds that have closed so far is answered now in any case.
    for (int worker = 0; worker < static_cast<int>(workers_.size()); ++worker) {
      const Worker& one = its(worker);
      const bool is_late = one.pushes <= closed_;
      if (waits(worker) && !one.is_aside && (made.closes || is_late)) made.answers.push_back({worker, made.closes});
    }
    if (made.closes) close();
    for (const Answer& answer : made.answers) its(answer.worker).waits = false;
    made.have_met = in_ == 0 && all([](const Worker& one) { return !one.takes_part(); });
    if (!made.have_met) return made;
    closed_ = 0;
    for (int worker = 0; worker < static_cast<int>(workers_.size()); ++worker) {
      if (waits(worker)) made.answers.push_back({worker, true});
      const bool is_gone = its(worker).is_gone;
      its(worker) = {};
      its(worker).is_gone = is_gone;
    }
    return made;
  }
  // When the open round is over, if nobody does anything before; none: nobody can tell.
  std::optional<Clock::time_point> is_over_at() const {
    return had_least_at_ ? std::optional(*had_least_at_ + grace_) : std::nullopt;
  }

 private:
  struct Worker {
    uint64_t pushes = 0;  // since all were level
    bool is_in = false;   // one of them counts in the open round
    bool waits = false;
    bool is_aside = false;
    bool is_gone = false;  // from the job

    bool takes_part() const { return !is_aside && !is_gone; }
  };

  const Worker& its(int worker) const { return workers_[static_cast<size_t>(worker)]; }
  Worker& its(int worker) { return workers_[static_cast<size_t>(worker)]; }
  template <typename Is>
  bool all(Is is) const {
    return std::all_of(workers_.begin(), workers_.end(), is);
  }

  bool is_over(Clock::time_point now) const {
    return in_ > 0 && (all([](const Worker& one) { return one.is_in || !one.takes_part(); }) ||
                       (had_least_at_ && now - *had_least_at_ >= grace_));
  }
  void close() {
    ++closed_;
    in_ = 0;
    had_least_at_.reset();
    for (Worker& one : workers_) one.is_in = false;
  }

  const size_t least_;
  const Clock::duration grace_;
  std::vector<Worker> workers_;
  uint64_t closed_ = 0;  // since all were level
  size_t in_ = 0;        // workers, of the open round
  std::optional<Clock::time_point> had_least_at_{};
};

}  // namespace p3
