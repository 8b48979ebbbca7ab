// The receiver of a Transport.
#include <sys/epoll.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "base/epoll.h"
#include "transport/transport.h"

namespace p3 {
namespace {

// One van may keep the receiver this long before the others get their turn.
constexpr size_t kReadsPerTurn = 16;
// At once, of what nobody wants any more.
constexpr size_t kDiscardedBytes = 64 << 10;
// So long the handler may work before the next look at the vans: for one large slice, or for many small ones.
constexpr std::chrono::microseconds kWorkPerLook{100};
// A payload's rest may stay away so long, or a quarter of what makes a peer dead; then each byte of it counts.
constexpr double kMostPatienceS = 5;

}  // namespace

void Transport::receive_loop() {
  receiver_id_ = std::this_thread::get_id();
  epoll_event events[64];
  auto last_turn = Clock::now(), last_look = last_turn;
  bool more_work = false;
  while (phase_ < Phase::kStopping) {
    const double tick_s = std::min(options_.heartbeat_s, options_.timeout_s / 4);
    ++system_calls_;
    const int count = epoll_wait(receive_epoll_, events, 64, more_work ? 0 : wait_ms(tick_s));
    const auto now = Clock::now();
    // A process that was itself stopped for a while must not blame its peers for the silence.
    if (now - last_turn > seconds(options_.timeout_s / 2))
      for (auto& van : vans_) van->last_read = now;
    last_turn = now;
    try {
      for (int i = 0; i < count && phase_ < Phase::kStopping; ++i) {
        if (events[i].data.ptr == nullptr)
          note_woken(receive_wake_);
        else
          read_from(*static_cast<Van*>(events[i].data.ptr));
      }
      if (phase_ >= Phase::kLingering) {
        for (auto& van : vans_) van->await_any();  // of what is discarded no rest is awaited
        tell_if_all_have_ended();
      } else {
        accuse_silent_peers(now);
      }
      if (now - last_look >= seconds(tick_s)) {
        last_look = now;
        handler_.look(now);
      }
      if (const auto alarm = handler_.alarm(); alarm && *alarm <= now) handler_.ring(now);
      run_tasks();
      resume_vans();
      more_work = work(now);
    } catch (const Error& error) {
      fail(error);
    } catch (const std::exception& error) {  // out of memory
      fail(Error(ErrorKind::kStopped, options_.label + ": " + error.what() + " while receiving."));
    }
  }
  {
    std::deque<std::packaged_task<void()>> never_run;  // who waits for one hears of it, once the lock is free
    MutexLock lock(mutex_);
    tasks_.swap(never_run);
  }
  release();
}

// Until the handler's alarm, rounded up, so that it is not too early by then.
int Transport::wait_ms(double most_s) const {
  const int most = milliseconds(most_s);
  const auto alarm = handler_.alarm();
  if (!alarm) return most;
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(*alarm - Clock::now()).count();
  return static_cast<int>(std::clamp<decltype(left)>(left, 0, most));
}

// What it sends meanwhile leaves together. Returns whether there is more to do.
bool Transport::work(Clock::time_point since) {
  work_asked_ = false;
  is_working_ = true;
  bool more;
  do more = phase_ < Phase::kStopping && handler_.work();
  while (more && Clock::now() < since + kWorkPerLook);
  is_working_ = false;
  if (std::exchange(has_put_off_, false)) send({}, Write::kHere);
  return more || work_asked_;  // while it worked: a frame left, and let another round begin
}

void Transport::run_in_receiver(std::function<void()> task) {
  std::packaged_task<void()> packaged(std::move(task));
  std::future<void> done = packaged.get_future();
  {
    MutexLock lock(mutex_);
    if (phase_ > Phase::kConfiguring && phase_ < Phase::kStopping) tasks_.push_back(std::move(packaged));
  }
  packaged = {};
  wake(receive_wake_);
  try {
    done.get();
  } catch (const std::future_error&) {
    throw error().value_or(Error(ErrorKind::kStopped, options_.label + " has stopped."));
  }
}

void Transport::run_tasks() {
  std::deque<std::packaged_task<void()>> tasks;
  {
    MutexLock lock(mutex_);
    tasks.swap(tasks_);
  }
  for (auto& task : tasks) task();
}

void Transport::read_from(Van& van) {
  if (phase_ >= Phase::kLingering) return read_to_the_end(van);
  read_turn(van);
  van.await_rest();
}

void Transport::read_turn(Van& van) {
  for (size_t reads = 0; take_frames(van) && phase_ < Phase::kStopping; ++reads) {
    if (reads == kReadsPerTurn || (reads > 0 && van.has_read_all())) return;
    switch (van.read_some()) {
      case Van::Progress::kBlocked:
        return;
      case Van::Progress::kEnd:
      case Van::Progress::kBroken:
        if (!ended(van) && phase_ < Phase::kFinishing) lose(van);
        return;
      default:
        break;
    }
    van.last_read = Clock::now();
  }
}

bool Transport::holds_too_much(const Van& van) const {
  return van.is_bounded && !van.broken && van.held_bytes() > options_.max_held_bytes;
}

// Hands out what has been read. False: nothing more is to be read from this van.
bool Transport::take_frames(Van& van) {
  while (true) {
    if (holds_too_much(van)) {
      pause(van);
      return false;
    }
    const Van::Event event = van.next();
    if (event == Van::Event::kNothing) return true;
    if (!take(van, event)) return false;
  }
}

// False: the van was dropped.
bool Transport::take(Van& van, Van::Event event) {
  const Header& header = van.received_header();
  if (event == Van::Event::kHeader) {
    const std::string reason = malformed(header, options_.checksums);
    if (!reason.empty()) throw frame_malformed(options_.label, van.label(), reason);
    if (carries_slice(header.kind)) {
      van.payload_goes_to(handler_.receive_into(van.number, header));
    } else if (header.kind == FrameKind::kFields) {
      van.payload_goes_to(van.room_for_fields(header.payload_bytes));
    } else {
      van.fail_text.resize(header.payload_bytes);
      van.payload_goes_to(van.fail_text.data());
    }
  } else if (!van.is_intact()) {
    // A payload may lie where it belongs by now, but until received() nobody takes it for a value.
    handler_.refuse(van.number, header, "not what its checksum says: the network or a host's memory altered it");
  } else if (header.kind == FrameKind::kFields) {
    van.take_fields();
  } else if (carries_slice(header.kind)) {
    handler_.received(van.number, header, van.received_payload());
  } else if (header.kind == FrameKind::kFail) {
    const Error failure(ErrorKind::kRemote, van.fail_text);
    if (!goes_on_without(van, failure)) throw failure;
    return false;
  } else if (header.kind == FrameKind::kYield) {
    if (!van.is_local()) handler_.refuse(van.number, header, "of another machine, whose link is not this one's");
    yield(van, header);
  } else if (header.kind == FrameKind::kPing) {
    if (van.is_watch()) link_.agree(link_share(header));
  } else if (header.kind == FrameKind::kBye) {
    van.advance(Van::State::kPeerLeft);
    if (phase_ < Phase::kFinishing) handler_.left(van.number);
  }
  return true;
}

// Nothing more comes. Returns whether the peer has said goodbye before; it then waits for our end: see finish().
bool Transport::ended(Van& van) {
  const bool said_goodbye = van.state() == Van::State::kPeerLeft;
  van.advance(Van::State::kEnded);
  yield(van, Header());  // it has no pushes any more
  epoll_ctl(receive_epoll_, EPOLL_CTL_DEL, van.stream().read_fd(), nullptr);
  if (said_goodbye) van.stream().end_writing();
  return said_goodbye;
}

void Transport::read_to_the_end(Van& van) {
  std::vector<char> nothing(kDiscardedBytes);
  const iovec part{nothing.data(), nothing.size()};
  IoResult result;
  do result = van.stream().read(&part, 1);
  while (result.bytes > 0 && phase_ < Phase::kStopping);
  if (result.end || (result.error != 0 && result.error != EAGAIN)) ended(van);
}

void Transport::pause(Van& van) {
  epoll_ctl(receive_epoll_, EPOLL_CTL_DEL, van.stream().read_fd(), nullptr);
  van.paused = true;
  van.bytes_sent_then = van.bytes_sent();
  ++paused_vans_;
}

// Half of what may be held, so that one frame does not wake and pause us again.
bool Transport::may_resume(const Van& van) const { return van.held_bytes() <= options_.max_held_bytes / 2; }

void Transport::wake_for(const Van& van) {
  if (van.paused && may_resume(van)) wake(receive_wake_);
}

void Transport::let_go(int van_number, uint64_t bytes) {
  Van& van = *vans_[static_cast<size_t>(van_number)];
  van.let_go(bytes);
  wake_for(van);
}

// A broken one, too: reading tells of the loss.
void Transport::resume_vans() {
  if (paused_vans_ == 0) return;
  for (auto& van : vans_) {
    if (!van->paused || (!van->broken && !may_resume(*van))) continue;
    van->paused = false;
    --paused_vans_;
    van->last_read = Clock::now();
    add_to_epoll(receive_epoll_, van->stream().read_fd(), EPOLLIN | EPOLLRDHUP, van.get());
    read_from(*van);  // of frames that have been read already no event tells
  }
}

// While we do not read a peer, what it takes of our bytes is its heartbeat.
void Transport::note_reading_of_paused(Clock::time_point now) {
  if (paused_vans_ == 0) return;
  MutexLock lock(mutex_);
  for (auto& van : vans_) {
    if (!van->paused) continue;
    const uint64_t sent = van->bytes_sent();
    if (std::exchange(van->bytes_sent_then, sent) != sent || !van->has_queued()) van->last_read = now;
  }
}

// A peer that has failed cannot say why behind half a frame, but it tells others, who pass it on. So where one ends in the
// middle of a frame, the cause has a moment to come from elsewhere before the loss itself counts as the cause.
void Transport::lose(Van& van) {
  const Error loss =
      peer_lost(options_.label, van.label(), van.error(), handler_.waiting_for(van.number), handler_.last_round());
  if (goes_on_without(van, loss)) return;
  if (!van.mid_receive()) throw loss;
  if (!loss_) loss_ = {loss, Clock::now() + seconds(std::min(options_.heartbeat_s, options_.timeout_s / 4))};
}

void Transport::accuse_silent_peers(Clock::time_point now) {
  note_reading_of_paused(now);
  if (loss_ && now >= loss_->second) throw loss_->first;
  const auto is_silent_for = [&](const Van& van, double silence_s) {
    return van.state() == Van::State::kOpen && now - van.last_read > seconds(silence_s);
  };
  const double patience_s = std::min(options_.timeout_s / 4, kMostPatienceS);
  for (const auto& van : vans_) {
    if (is_silent_for(*van, patience_s)) van->await_any();  // a few bytes are a sign of life, too
    if (!is_silent_for(*van, options_.timeout_s)) continue;
    const auto others = std::count_if(vans_.begin(), vans_.end(), [&](const auto& other) {
      return other->state() == Van::State::kOpen && other != van;
    });
    const bool all = others > 0 && std::all_of(vans_.begin(), vans_.end(), [&](const auto& other) {
                       return other->state() != Van::State::kOpen || is_silent_for(*other, options_.timeout_s / 2);
                     });
    const Error loss =
        van->paused ? peer_reads_nothing(options_.label, van->label(), options_.timeout_s, all, van->held_bytes())
                    : peer_silent(options_.label, van->label(), options_.timeout_s, all,
                                  handler_.waiting_for(van->number), handler_.last_round());
    if (!goes_on_without(*van, loss)) throw loss;
  }
}

bool Transport::goes_on_without(Van& van, const Error& loss) {
  const bool may_be_replaced = van.is_watch() && options_.outlives_scheduler && loss.kind() == ErrorKind::kPeerLost;
  if (!may_be_replaced && !handler_.lost(van.number, loss)) return false;
  drop_van(van.number);
  return true;
}

}  // namespace p3
