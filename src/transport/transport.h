// The vans of one node and the two threads that serve them: a sender, which always takes the most urgent frame whose
// van can accept bytes, and a receiver, which reads payloads straight to where they belong.
//
// A thread of the core that has something to send and finds nobody sending takes over the sending role for a few frames
// instead of waking the sender: a wake-up costs more than a small frame, most of all in a virtual machine. The role is
// one flag under the lock; whoever holds it alone writes to vans.
//
// Threads: send(), fail(), traffic() from any thread. The Handler is called by the receiver thread (receive_*, work,
//          left), by who holds the sending role (sent), or by the last of the two threads to stop (failed). Nobody
//          ever blocks on a peer.
// Memory:  payloads to send are borrowed until Handler::sent, or until Handler::failed: after failed() no borrowed
//          memory is touched any more, in either direction.
// Loss:    a Handler may go on without a van whose peer is lost, and any node without the scheduler if it is to. What was to leave on it is given back through
//          Handler::sent, also what is sent to it later, until replace_van() puts another connection in its place.
// Failure: the first Error wins. Every van on which no frame is half written carries it to its peer (kFail), then
//          both threads end. A peer's kFail becomes this node's error, text unchanged: causes travel by the core alone.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <future>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "p3/error.h"
#include "p3/link_rate.h"
#include "p3/node.h"
#include "p3/thread_annotations.h"
#include "p3/wire.h"
#include "transport/precedence.h"
#include "transport/van.h"
#include "wire/failures.h"

namespace p3 {

class Transport {
 public:
  class Handler {
   public:
    virtual ~Handler() = default;
    // Checks a frame that carries a slice against what was agreed, before a byte of its payload goes anywhere: returns
    // where it goes (anything if it has none), or throws Error(kProtocol).
    virtual void* receive_into(int van, const Header& header) = 0;
    // Throws the Error for a frame of that van which is `what`.
    [[noreturn]] virtual void refuse(int van, const Header& header, const char* what) const = 0;
    // The payload is complete, and is what was sent. May throw Error.
    virtual void received(int van, const Header& header, void* payload) = 0;
    // Nothing more can be read just now, or a turn is over: does one piece of the handler's own queued work. True:
    // there is more, and the receiver comes back after a look at the vans.
    virtual bool work() { return false; }
    // The payload of a frame that has a context is no longer borrowed. Of a lost van, also by who calls send().
    virtual void sent(const Frame& frame) = 0;
    // The peer said goodbye. May throw Error if it is still needed.
    virtual void left(int van) = 0;
    // The connection has ended, its peer is silent, or has failed: as `loss` says. True: this node goes on without it.
    virtual bool lost(int, const Error& /*loss*/) { return false; }
    // What this node, or those it serves, are waiting for from that peer.
    virtual std::optional<Awaited> waiting_for(int van) const = 0;
    // The last round that this node has completed; heartbeats carry it. Any thread; takes no lock.
    virtual uint64_t last_round() const { return 0; }
    // Called on the receiver thread, several times in a time-out.
    virtual void look(std::chrono::steady_clock::time_point) {}
    // When ring() is to be called at the latest, if nothing comes before: the receiver does not wait longer. Who sets it to
    // an earlier time calls ask_for_work().
    virtual std::optional<std::chrono::steady_clock::time_point> alarm() const { return {}; }
    virtual void ring(std::chrono::steady_clock::time_point) {}
    // Once.
    virtual void failed(const Error&) {}
  };

  struct Outgoing {
    int van;
    Frame frame;
  };

  Transport(NodeOptions options, Handler& handler);
  ~Transport();  // stop()

  // Before start(). Returns the van's number. `stream` null: the van is lost from the beginning, until replace_van().
  // `peer`: as in the trace (trace.h); kNoPeer: no slices go there.
  // `is_bounded`: the peer may ask for more than it reads; see hold().
  int add_van(std::unique_ptr<Stream> stream, std::string label, int peer = kNoPeer, bool is_bounded = false);
  void start();

  // Queues frames; one lock for all of them. Ignored after a failure. kHere lets the caller, if it is a thread of the
  // core, write some of what is queued itself; in work() when that has done all it does before the next look at the vans,
  // so that the answers to many small frames leave in few writes. kLater: more follows, so the sender is not woken; it
  // finds the frames when it looks next, after half a heartbeat at the latest.
  enum class Write { kBySender, kHere, kLater };
  void send(const std::vector<Outgoing>& frames, Write write = Write::kBySender);
  // From here on this node's pushes go before values that it and the servers of its machine send, where those yield
  // (precedence.h). Any thread.
  void put_pushes_first() { pushes_go_first_ = true; }
  bool puts_pushes_first() const { return pushes_go_first_; }
  // Has the receiver call work() soon, or again, if it is asked from there. From any thread.
  void ask_for_work();

  // The handler keeps so many bytes for the peer of a van, besides the frames that wait to leave: what it has sent and
  // nobody has worked on. While all that is more than NodeOptions::max_held_bytes, a bounded van is not read; so its peer
  // must wait, and cannot make this node grow. Bounded are the vans to those who ask: a server's to workers, a leader's
  // to the other workers of its machine. Who asks always reads, so nobody waits in a circle. Any thread.
  void hold(int van, uint64_t bytes) { vans_[static_cast<size_t>(van)]->hold(bytes); }
  void let_go(int van, uint64_t bytes);
  // Runs `task` on the receiver thread, between two frames, and returns when it is done. Throws what it throws, or the
  // failure that came before it. Not from a thread of the core.
  void run_in_receiver(std::function<void()> task);
  // In such a task: ends the van's connection, as if it had been lost and the handler went on. If it was, does nothing.
  void drop_van(int van);
  // In one, or from the Handler.
  bool is_lost(int van) const { return vans_[static_cast<size_t>(van)]->is_lost(); }
  // Of a van that is lost.
  void replace_van(int van, std::unique_ptr<Stream> stream);
  // Puts another connection in the place of the one to the scheduler, lost or not. With outlives_scheduler. Not from a
  // thread of the core. Throws as run_in_receiver().
  void replace_watch(std::unique_ptr<Stream> stream);

  void fail(const Error& error);
  std::optional<Error> error() const;

  // Says goodbye on every van behind everything queued, waits until all has left (at most timeout_s), and stops.
  // `until_read`: not before the peers have ended their side as well, as a node does that reads a goodbye and the end; a
  // connection that is closed while bytes come in is reset, and what the peer has not received yet is lost. Nobody waits
  // for a watch; and for a peer that stays silent half of what makes it dead.
  bool finish(double timeout_s, bool until_read = false);
  void stop();
  void abandon_after_fork();

  // An eventfd that fail() makes readable for good; signal() does the same for the handler's own reasons.
  int event_fd() const { return event_fd_; }
  void signal();

  // That a frame which is being received goes by: of pushes, and of what hands them on. Receiver thread.
  const SharedFields& received_fields(int van) const { return vans_[static_cast<size_t>(van)]->received_fields(); }

  const std::string& label(int van) const { return vans_[static_cast<size_t>(van)]->label(); }
  const NodeOptions& options() const { return options_; }
  Traffic traffic() const;  // of all vans
  uint64_t system_calls() const { return system_calls_; }
  Traffic traffic_with(const std::vector<int>& vans) const;
  // LinkRate's.
  uint64_t take_full_rate() { return link_.take_full_rate(); }

 private:
  using Clock = std::chrono::steady_clock;

  // Of the life of this node's vans; it only moves forward.
  enum class Phase : uint8_t {
    kConfiguring,  // before start()
    kRunning,
    kFinishing,  // the sender ends when the queues are empty
    kAllSent,    // it has
    kLingering,  // what comes counts for nothing any more
    kAllEnded,   // the peers have ended their side as well
    kStopping,   // both threads end: of stop(), or of error_
  };
  void advance(Phase to) P3_REQUIRES(mutex_) { phase_ = std::max(phase_.load(), to); }

  void send_loop();
  bool write_frames(int limit);
  void receive_loop();
  int wait_ms(double most_s) const;
  Van* most_urgent_writable() P3_REQUIRES(mutex_);
  bool nothing_to_send() const P3_REQUIRES(mutex_);
  void note_queued(const Van& van, const Header& header) P3_REQUIRES(mutex_);
  void note_gone(const Van& van, const Header& header) P3_REQUIRES(mutex_);
  void tell(const std::optional<Header>& news) P3_REQUIRES(mutex_);
  void yield(const Van& van, const Header& told);
  void queue_pings(Clock::time_point now) P3_REQUIRES(mutex_);
  Clock::time_point try_streams_again(Clock::time_point now) P3_REQUIRES(mutex_);
  void announce_failure();
  void lose(Van& van);
  bool goes_on_without(Van& van, const Error& loss);
  bool take_role();
  void leave_role();
  void run_tasks();
  bool work(Clock::time_point since);
  bool is_receiver() const { return std::this_thread::get_id() == receiver_id_; }
  void serve(Van& van);
  void accuse_silent_peers(Clock::time_point now);
  void read_from(Van& van);
  void read_turn(Van& van);
  bool take_frames(Van& van);
  bool take(Van& van, Van::Event event);
  bool holds_too_much(const Van& van) const;
  void read_to_the_end(Van& van);
  bool ended(Van& van);
  void linger(Clock::time_point deadline);
  void tell_if_all_have_ended();
  void pause(Van& van);
  void resume_vans();
  bool may_resume(const Van& van) const;
  void wake_for(const Van& van);
  void note_reading_of_paused(Clock::time_point now);
  void release();
  // Raises and clears the events of its own threads.
  void wake(int event);
  void note_woken(int event);

  NodeOptions options_;
  Handler& handler_;
  LinkRate link_;
  std::atomic<uint64_t> system_calls_{0};
  std::vector<std::unique_ptr<Van>> vans_;
  int event_fd_ = -1;
  int send_epoll_ = -1, send_wake_ = -1;
  int receive_epoll_ = -1, receive_wake_ = -1;

  mutable Mutex mutex_;  // also the vans' queues: see van.h
  CondVar stopped_;
  std::optional<Error> error_ P3_GUARDED_BY(mutex_);
  std::atomic<bool> has_failed_{false};            // there is one: scripts ask for every gradient
  std::atomic<Phase> phase_{Phase::kConfiguring};  // written under the lock
  bool sender_sleeps_ P3_GUARDED_BY(mutex_) = false;
  Clock::time_point sender_wakes_at_ P3_GUARDED_BY(mutex_){};  // at the latest, if it sleeps
  bool sending_ P3_GUARDED_BY(mutex_) = false;                 // somebody holds the sending role
  int role_wanted_ P3_GUARDED_BY(mutex_) = 0;                  // who sends gives it up soon
  size_t last_written_ P3_GUARDED_BY(mutex_) = 0;              // the van whose turn it was
  std::atomic<bool> pushes_go_first_{false};                   // those of this node; else no frame costs a look at that
  WaitingPushes waiting_pushes_ P3_GUARDED_BY(mutex_);         // then
  Precedence precedence_ P3_GUARDED_BY(mutex_);
  std::deque<std::packaged_task<void()>> tasks_ P3_GUARDED_BY(mutex_);  // for the receiver
  std::atomic<int> threads_holding_{2};
  std::atomic<std::thread::id> receiver_id_{};
  std::optional<std::pair<Error, Clock::time_point>> loss_;  // receiver: of a peer, and when to fail of it
  bool work_asked_ = false;                                  // receiver: by itself
  bool is_working_ = false, has_put_off_ = false;            // receiver: in work(), and what it sends
  int paused_vans_ = 0;                                      // receiver
  std::thread sender_, receiver_;
};

}  // namespace p3
