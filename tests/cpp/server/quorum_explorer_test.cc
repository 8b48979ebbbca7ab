// Local steps with a quorum, explored: workers of any speeds, frames in any order, as many fragments, slices, delays and
// deaths as chance has it. Nobody waits forever, each difference that has come counts exactly once, answers say rightly
// whether it has, a round closes when it is over and not before, and whoever meets has the same values.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <deque>
#include <map>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "server/discipline/quorum/quorum.h"

namespace p3 {
namespace {

using Clock = Quorum::Clock;

// `Rule`: Quorum, or one with a fault.
template <typename Rule>
class World {
 public:
  explicit World(uint32_t seed) : random_(seed) {
    workers_.resize(1 + below(5));
    least_ = 1 + below(workers_.size());
    grace_ = std::chrono::seconds(below(4));
    every_ = 1 + below(6);
    fragments_ = 1 + below(every_);
    delay_ = below(every_);
    for (size_t i = fragments_ * (1 + below(2)); i > 0; --i) slices_.emplace_back(workers_.size(), least_, grace_);
    may_die_ = below(2) == 1;
    for (Worker& its : workers_) {
      its.speed = 1 + below(8);
      its.frames.resize(slices_.size());
      its.awaited.resize(slices_.size());
    }
  }

  // What is wrong in it; empty: nothing.
  std::string explore() {
    for (int meeting = 0; meeting < 3; ++meeting) {
      for (Worker& its : workers_) its.begin(below(25));
      while (problem_.empty() && !have_all_met()) move();
      check_meeting();
    }
    return problem_;
  }

  size_t late = 0, alone = 0;  // answers without the worker's push; rounds without some worker

 private:
  enum class What { kDifference, kAside, kGone };
  struct Frame {
    What what;
    int difference;
  };

  struct Worker {
    void begin(size_t its_steps) {
      steps = its_steps;
      step = 0;
      must_merge.reset();
      stands_aside.clear();
      met.clear();
    }
    bool awaits_any(const std::vector<size_t>& slices) const {
      return std::any_of(slices.begin(), slices.end(), [this](size_t slice) { return awaited[slice].has_value(); });
    }

    size_t speed = 1;
    bool is_dead = false;
    size_t steps = 0, step = 0;               // until it meets the others
    std::vector<std::deque<Frame>> frames;    // on their way, by slice
    std::vector<std::optional<int>> awaited;  // its difference whose answer has not come, by slice
    std::optional<size_t> must_merge;         // a fragment, in this step
    std::set<size_t> stands_aside;            // of which slices it has said so
    std::map<size_t, std::vector<int>> met;   // the value that it has met with, by slice
  };

  struct Slice {
    Slice(size_t workers, size_t least, Clock::duration grace) : rule(workers, least, grace) {}

    Rule rule;
    std::map<int, int> open{};  // differences of the open round, and of whom they are
    std::set<int> in{}, aside{}, gone{};
    std::optional<Clock::time_point> had_least_at{};
    std::vector<int> value{};  // what counts in it
    std::set<int> came{};
  };

  size_t below(size_t most) { return random_() % most; }
  void fail(const char* problem) {
    if (problem_.empty()) problem_ = problem;
  }

  // --- as p3/frontend/local_steps/trainer.py has it ------------------------------------------------------------------

  std::vector<size_t> slices_of(size_t fragment) const {
    std::vector<size_t> made;
    for (size_t slice = fragment; slice < slices_.size(); slice += fragments_) made.push_back(slice);
    return made;
  }
  std::optional<size_t> due(size_t step) const {
    for (size_t fragment = 0; fragment < fragments_; ++fragment)
      if (step > 0 && step % every_ == fragment * every_ / fragments_) return fragment;
    return {};
  }

  // Or it waits; or it has nothing to do any more.
  bool can_go_on(const Worker& its) const {
    if (its.is_dead || its.stands_aside.size() == slices_.size()) return false;
    if (its.must_merge) return !its.awaits_any(slices_of(*its.must_merge));
    return its.step < its.steps || next_to_leave(its).has_value();
  }
  // Of which slice it stands aside next: first those that it does not await, then in their order.
  std::optional<size_t> next_to_leave(const Worker& its) const {
    for (size_t slice = 0; slice < slices_.size(); ++slice)
      if (its.stands_aside.count(slice) == 0 && !its.awaited[slice]) return slice;
    return {};
  }
  void go_on(Worker& its) {
    if (its.must_merge) return its.must_merge.reset();
    if (its.step == its.steps) {
      const size_t slice = *next_to_leave(its);
      its.stands_aside.insert(slice);
      return its.frames[slice].push_back({What::kAside, 0});
    }
    ++its.step;
    if (const auto fragment = due(its.step))
      for (size_t slice : slices_of(*fragment)) {
        its.awaited[slice] = ++differences_;
        its.frames[slice].push_back({What::kDifference, differences_});
      }
    if (its.step > delay_) its.must_merge = due(its.step - delay_);
  }

  // --- as src/server has it ------------------------------------------------------------------------------------------

  void deliver(int worker, size_t number) {
    Slice& slice = slices_[number];
    const Frame frame = workers_[static_cast<size_t>(worker)].frames[number].front();
    workers_[static_cast<size_t>(worker)].frames[number].pop_front();
    if (frame.what == What::kDifference) {
      slice.rule.push(worker, now_);
      slice.open[frame.difference] = worker;
      slice.came.insert(frame.difference);
      if (slice.in.insert(worker).second && slice.in.size() == least_) slice.had_least_at = now_;
      settle(number);
    } else if (frame.what == What::kAside) {
      slice.rule.stand_aside(worker);
      slice.aside.insert(worker);
      settle(number);
    } else {
      slice.rule.leave(worker);
      slice.gone.insert(worker);
      settle(number);
    }
  }

  void settle(size_t number) {
    Slice& slice = slices_[number];
    std::set<int> accounted = slice.aside;
    accounted.insert(slice.gone.begin(), slice.gone.end());
    const size_t not_taking_part = accounted.size();
    accounted.insert(slice.in.begin(), slice.in.end());
    const bool is_over = !slice.in.empty() && (accounted.size() == workers_.size() ||
                                               (slice.had_least_at && now_ - *slice.had_least_at >= grace_));
    const Quorum::Settled settled = slice.rule.settle(now_);
    if (settled.closes != is_over)
      return fail(is_over ? "a round is over, and not closed" : "a round closes too early");
    if (is_over) {
      alone += accounted.size() < workers_.size();
      for (const auto& [difference, worker] : slice.open) slice.value.push_back(difference);
      slice.open.clear();
      slice.in.clear();
      slice.had_least_at.reset();
    }
    if (settled.have_met && (not_taking_part != workers_.size() || !slice.open.empty()))
      fail("not all are there who are said to have met");
    if (settled.have_met) slice.aside.clear();
    for (const auto [worker, is_in_value] : settled.answers) answer(worker, number, is_in_value, settled.have_met);
  }
  void answer(int worker, size_t number, bool is_in_value, bool have_met) {
    Worker& its = workers_[static_cast<size_t>(worker)];
    const std::vector<int>& value = slices_[number].value;
    if (its.is_dead) return;
    if (its.awaited[number]) {
      if (is_in_value != (std::count(value.begin(), value.end(), *its.awaited[number]) > 0))
        fail("an answer is wrong about whether a difference has counted");
      late += !is_in_value;
      its.awaited[number].reset();
    } else if (have_met && its.stands_aside.count(number) > 0) {
      its.met[number] = value;
    } else {
      fail("an answer that nobody waits for");
    }
  }

  // --- chance ----------------------------------------------------------------------------------------------------------

  void move() {
    struct Move {
      enum { kGoOn, kDeliver, kTime } kind;
      int worker;
      size_t slice;
    };
    std::vector<Move> moves;
    for (size_t worker = 0; worker < workers_.size(); ++worker) {
      const Worker& its = workers_[worker];
      for (size_t i = 0; i < its.speed; ++i) {
        if (can_go_on(its)) moves.push_back({Move::kGoOn, static_cast<int>(worker), 0});
        for (size_t slice = 0; slice < slices_.size(); ++slice)
          if (!its.frames[slice].empty()) moves.push_back({Move::kDeliver, static_cast<int>(worker), slice});
      }
    }
    for (size_t slice = 0; slice < slices_.size(); ++slice)
      if (slices_[slice].rule.is_over_at()) moves.push_back({Move::kTime, 0, slice});
    if (moves.empty()) return fail("all wait for each other");
    const Move& one = moves[below(moves.size())];
    if (one.kind == Move::kGoOn) go_on(workers_[static_cast<size_t>(one.worker)]);
    if (one.kind == Move::kDeliver) deliver(one.worker, one.slice);
    if (one.kind == Move::kTime) pass_time(one.slice);
    if (may_die_ && below(100) == 0) let_die(workers_[below(workers_.size())]);
  }
  // An alarm may ring late.
  void pass_time(size_t slice) {
    now_ += std::chrono::seconds(below(3));
    if (*slices_[slice].rule.is_over_at() <= now_) settle(slice);
  }
  // Part of what was on its way is lost, and each server comes to know of the death before the rest, or after. Somebody
  // stays.
  void let_die(Worker& its) {
    const auto living = std::count_if(workers_.begin(), workers_.end(), [](const Worker& one) { return !one.is_dead; });
    if (its.is_dead || living == 1) return;
    its.is_dead = true;
    for (auto& frames : its.frames) {
      frames.resize(below(frames.size() + 1), {});
      frames.insert(frames.begin() + static_cast<long>(below(frames.size() + 1)), {What::kGone, 0});
    }
  }

  bool have_all_met() const {
    return std::all_of(workers_.begin(), workers_.end(), [this](const Worker& its) {
      const auto& frames = its.frames;
      const auto is_empty = [](const auto& one) { return one.empty(); };
      return its.is_dead ? std::all_of(frames.begin(), frames.end(), is_empty) : its.met.size() == slices_.size();
    });
  }
  void check_meeting() {
    for (size_t number = 0; number < slices_.size() && problem_.empty(); ++number) {
      const Slice& slice = slices_[number];
      const Worker& any =
          *std::find_if(workers_.begin(), workers_.end(), [](const Worker& its) { return !its.is_dead; });
      for (const Worker& its : workers_)
        if (!its.is_dead && its.met.at(number) != any.met.at(number)) fail("who has met has different values");
      std::set<int> counted(slice.value.begin(), slice.value.end());
      if (counted.size() != slice.value.size()) fail("a difference counts twice");
      for (const auto& [difference, worker] : slice.open)  // which came to notice behind the meeting
        if (slice.gone.count(worker) > 0) counted.insert(difference);
      if (counted != slice.came) fail("a difference that has come does not count");
    }
  }

  std::mt19937 random_;
  std::vector<Worker> workers_;
  size_t least_, every_, fragments_, delay_;
  Clock::duration grace_;
  std::deque<Slice> slices_;
  bool may_die_;
  int differences_ = 0;
  Clock::time_point now_{};
  std::string problem_;
};

constexpr uint32_t kWorlds = 600;

TEST(QuorumExplorer, FindsNothing) {
  const uint32_t seed = std::random_device()();
  size_t late = 0, alone = 0;
  for (uint32_t world = 0; world < kWorlds; ++world) {
    World<Quorum> explored(seed + world);
    ASSERT_EQ(explored.explore(), "") << "seed " << seed + world;
    late += explored.late;
    alone += explored.alone;
  }
  EXPECT_GT(late, kWorlds);  // what it is about has happened
  EXPECT_GT(alone, kWorlds);
}

// --- and that it would: rules with a fault -----------------------------------------------------------------------------

struct AnswersNobodyLate : Quorum {
  using Quorum::Quorum;
  Settled settle(Clock::time_point now) {
    Settled made = Quorum::settle(now);
    const auto is_late = [](const Answer& one) { return !one.is_in_value; };
    made.answers.erase(std::remove_if(made.answers.begin(), made.answers.end(), is_late), made.answers.end());
    return made;
  }
};

struct SaysThatAllCounts : Quorum {
  using Quorum::Quorum;
  Settled settle(Clock::time_point now) {
    Settled made = Quorum::settle(now);
    for (Answer& one : made.answers) one.is_in_value = true;
    return made;
  }
};

struct ClosesWithOneTooFew : Quorum {
  ClosesWithOneTooFew(size_t workers, size_t least, Clock::duration grace)
      : Quorum(workers, std::max<size_t>(least - 1, 1), grace) {}
};

struct WaitsForWhoStandsAside : Quorum {
  WaitsForWhoStandsAside(size_t workers, size_t least, Clock::duration grace)
      : Quorum(workers, least, grace), workers_(workers) {}
  void stand_aside(int worker) {
    aside_.insert(worker);
    if (aside_.size() < workers_) return;
    for (int each : aside_) Quorum::stand_aside(each);
    aside_.clear();
  }
  size_t workers_;
  std::set<int> aside_;
};

struct WaitsForTheGoneBehindAMeeting : Quorum {
  using Quorum::Quorum;
  void leave(int worker) { stand_aside(worker); }
};

template <typename Rule>
std::set<std::string> problems() {
  std::set<std::string> found;
  for (uint32_t world = 0; world < kWorlds / 6; ++world) found.insert(World<Rule>(world).explore());
  return found;
}

TEST(QuorumExplorer, FindsWhatIsWrong) {
  EXPECT_TRUE(problems<AnswersNobodyLate>().count("all wait for each other"));
  EXPECT_TRUE(problems<SaysThatAllCounts>().count("an answer is wrong about whether a difference has counted"));
  EXPECT_TRUE(problems<ClosesWithOneTooFew>().count("a round closes too early"));
  EXPECT_TRUE(problems<WaitsForWhoStandsAside>().count("a round is over, and not closed"));
  EXPECT_TRUE(problems<WaitsForTheGoneBehindAMeeting>().count("a round is over, and not closed"));
}

}  // namespace
}  // namespace p3
