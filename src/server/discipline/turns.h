// Whose turn it is at one shard, as frames come in: which round each worker pushes next, who waits for whom, and what is
// completed for a worker that has departed.
// Threads: the receiver's, but for pushed() of a worker whose van is closed.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "p3/lateness.h"
#include "p3/wire.h"
#include "server/discipline/clocks.h"
#include "server/key.h"
#include "wire/failures.h"

namespace p3 {

class Turns {
 public:
  using Clock = std::chrono::steady_clock;

  explicit Turns(const ServerKey& key);

  // Whether the frame is this worker's to send, for itself or for its machine.
  bool may_send(const Header& header, int worker) const;
  // A push is for the round after the one that was published last, or without synchronous rounds after this worker's last
  // one. All else is about the value or state that it left.
  bool in_turn(const Header& header, int worker, uint64_t published) const;

  // A push of this worker, or of its machine, is in. Returns how long after the first one of the round; 0 without
  // synchronous rounds.
  double note_push(int worker, const Header& push, Clock::time_point now);
  // An init is in, whole, with the value or without. Returns how many of this worker's are.
  uint32_t note_init(int worker, uint64_t published, bool has_value);
  // The value is for those alone who ask for it: others may never do.
  void hand_over() { is_handed_over_ = true; }
  // Whether any init with a value is in.
  bool has_value() const { return has_value_; }

  // What others do that needs this worker too, and that it has not done.
  std::optional<Awaited> needs(int worker, uint64_t published) const;
  // The round of `other` that such a push would wait for; none if it would not.
  std::optional<uint64_t> would_wait_for_push_of(int other, const Header& push) const;
  // Whether an init of this worker would wait for one of `other`.
  bool would_wait_for_init_of(int other, int worker) const {
    return !catches_up(worker) && inits_[index_of(worker)] >= inits_[index_of(other)];
  }
  // Tells who has kept others waiting since the first push of the round, or since the first of those that wait for it. For
  // those who push as one, their leader stands.
  void note_late(Clock::time_point now, LateWorkers& late) const;

  // Of a key that was cut anew while it rested: all workers are behind that round. Returns how many inits of each count as
  // having come.
  uint32_t begin_behind(uint64_t round);

  // --- a server that is lost ---------------------------------------------------------------------------------------
  // Of a shard that is inherited: this worker has the value of round `landed`, of so many first ones. `published`: the
  // latest that any worker has; `has_value`: any has one. False: no worker can be so far behind.
  bool go_on_behind(int worker, uint64_t landed, uint32_t inits, uint64_t published, bool has_value);
  // The push that comes next of this worker is of the round that is over, and counts for nothing; take_ once.
  bool is_behind(int worker) const { return !behind_.empty() && behind_[index_of(worker)]; }
  bool take_behind(int worker) {
    if (!is_behind(worker)) return false;
    behind_[index_of(worker)] = false;
    return true;
  }

  // --- going on without a worker -----------------------------------------------------------------------------------
  // Why the job cannot go on without this worker, if so: it gave what others still need.
  std::optional<std::string> problem_of_dismissing(int worker) const;
  // The last round that this worker has pushed; 0: none.
  uint64_t pushed(int worker) const { return std::max<uint64_t>(next_round_[index_of(worker)], 1) - 1; }
  // Its pushes are to be completed for it from here on.
  void dismiss(int worker);
  bool is_dismissed(int worker) const { return completes() && is_dismissed_[index_of(worker)]; }
  // The round that is to be completed for this worker now, if one is; with a quorum, the one from which on nobody waits
  // for it.
  std::optional<uint64_t> to_complete(int worker, uint64_t published) const;
  bool completes() const { return !is_dismissed_.empty(); }
  // Why no process can take the place of a dismissed worker now, if so: not all is complete that others have begun.
  std::optional<std::string> problem_of_admitting(uint64_t published) const;
  // It is one again, behind the round that was published last; or, before the first value, from the beginning on.
  void admit(int worker, uint64_t published);
  // The connection of one that was admitted: its first frame asks for the value, if there is one.
  void enter(int worker);
  bool catches_up(int worker) const { return catches_up_[index_of(worker)]; }
  // That frame is what comes next, and is in; once.
  bool take_request(int worker) {
    if (!catches_up(worker)) return false;
    catches_up_[index_of(worker)] = false;
    return true;
  }

 private:
  static size_t index_of(int worker) { return static_cast<size_t>(worker); }
  // Whether each worker has rounds of its own.
  bool counts_each() const { return clocks_ || !is_aside_.empty(); }
  bool stands_aside(int worker) const { return is_aside_[index_of(worker)]; }
  // Whether it waits for the others there, and how many do; a dismissed one waits for nobody.
  bool waits_aside(int worker) const { return stands_aside(worker) && !is_dismissed(worker); }
  int waiting_aside() const;
  void note_late_clocks(Clock::time_point now, LateWorkers& late) const;
  void note_late_for_meeting(Clock::time_point now, LateWorkers& late) const;
  bool has_begun() const { return next_round_[index_of(key_.first())] > 0; }
  uint64_t last_begun() const { return *std::max_element(next_round_.begin(), next_round_.end()); }

  const ServerKey& key_;
  std::vector<uint64_t> next_round_;  // that each worker pushes next; 0: its first init is still to come
  std::vector<uint32_t> inits_;       // received from each worker
  bool has_value_ = false;
  bool is_handed_over_ = false;
  std::vector<bool> behind_;        // by worker; empty: the shard was not inherited
  std::vector<bool> catches_up_;    // between enter() and take_request()
  std::vector<bool> is_dismissed_;  // by worker; empty: none ever was
  int pushes_in_ = 0;               // of the round
  Clock::time_point first_push_;    // of the round
  // Without synchronous rounds, of what has come: and when the last push of each worker did.
  std::optional<Clocks> clocks_;
  std::vector<Clock::time_point> last_push_;
  // With a quorum: who stands aside until all do, and who is dismissed for ever; and which of these the shard has been told of. Empty:
  // there is none.
  std::vector<bool> is_aside_, is_known_gone_;
};

}  // namespace p3
