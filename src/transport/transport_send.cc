// The sender of a Transport, and whoever takes over its role.
#include <sys/epoll.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "base/epoll.h"
#include "transport/transport.h"

namespace p3 {

// Among equals the vans take turns, or the slices of a key would keep one server busy and then the next.
Van* Transport::most_urgent_writable() {
  Van* best = nullptr;
  for (size_t i = 1; i <= vans_.size(); ++i) {
    Van* van = vans_[(last_written_ + i) % vans_.size()].get();
    if (van->writable && !van->broken && van->can_move(precedence_) &&
        (best == nullptr || van->next_urgency(precedence_).is_sooner_than(best->next_urgency(precedence_))))
      best = van;
  }
  return best;
}

void Transport::note_queued(const Van& van, const Header& header) {
  if (pushes_go_first_ && is_push(header.kind) && !van.is_local()) waiting_pushes_.queued(header.round);
}

void Transport::note_gone(const Van& van, const Header& header) {
  if (!pushes_go_first_ || !is_push(header.kind) || van.is_local()) return;
  waiting_pushes_.left(header.round);
  tell(waiting_pushes_.news());
}

void Transport::tell(const std::optional<Header>& news) {
  if (!news) return;
  precedence_.told(Precedence::kItself, *news);
  for (auto& van : vans_)
    if (van->is_local() && !van->is_lost()) van->push({*news}, Clock::now());
}

void Transport::yield(const Van& van, const Header& told) {
  bool wakes;
  {
    MutexLock lock(mutex_);
    precedence_.told(van.number, told);
    // Newer rounds may hold back less than an older one did. Who sends looks again by itself.
    wakes = !sending_ && most_urgent_writable() != nullptr && std::exchange(sender_sleeps_, false);
  }
  if (wakes) wake(send_wake_);
}

bool Transport::nothing_to_send() const {
  return std::none_of(vans_.begin(), vans_.end(), [](const auto& van) { return van->has_work() && !van->broken; });
}

void Transport::queue_pings(Clock::time_point now) {
  const auto heartbeat = seconds(options_.heartbeat_s);  // not per van: this runs for every frame
  for (auto& van : vans_) {
    if (van->can_move(precedence_) || van->state() != Van::State::kOpen || now - van->last_write < heartbeat) continue;
    Header ping;
    ping.round = handler_.last_round();
    ping.priority = std::numeric_limits<int32_t>::max();
    if (van->is_watch()) set_link_share(ping, {link_.rate(), link_.connections()});
    van->push({ping}, now);
  }
}

// Those whose time has come, if nobody sends. Returns when the next one's comes.
Transport::Clock::time_point Transport::try_streams_again(Clock::time_point now) {
  auto next = Van::kNever;
  for (auto& van : vans_) {
    if (van->try_again_at == Van::kNever) continue;
    if (van->is_lost() || van->broken)
      van->try_again_at = Van::kNever;
    else if (van->try_again_at <= now)
      van->try_again_at = sending_ || van->stream().try_again() ? now + Stream::kTryAgainAfter : Van::kNever;
    next = std::min(next, van->try_again_at);
  }
  return next;
}

void Transport::send_loop() {
  epoll_event events[64];
  while (phase_ < Phase::kStopping) {
    bool write;
    int sleep_ms = milliseconds(options_.heartbeat_s / 2);
    {
      MutexLock lock(mutex_);
      const auto now = Clock::now();
      // What a van is writing belongs to who holds the role; without it not even has_work() may be asked.
      if (!sending_) queue_pings(now);
      write = !sending_ && role_wanted_ == 0 && most_urgent_writable() != nullptr;
      if (write) {
        sending_ = true;
      } else if (phase_ >= Phase::kFinishing && !sending_ && nothing_to_send()) {
        break;
      } else {
        const auto wakes_at = std::min(now + std::chrono::milliseconds(sleep_ms), try_streams_again(now));
        sleep_ms = static_cast<int>(std::chrono::ceil<std::chrono::milliseconds>(wakes_at - now).count());
        sender_wakes_at_ = wakes_at;
        sender_sleeps_ = true;
      }
    }
    if (write) {
      write_frames(std::numeric_limits<int>::max());
      continue;
    }
    ++system_calls_;
    const int count = epoll_wait(send_epoll_, events, 64, sleep_ms);
    MutexLock lock(mutex_);
    sender_sleeps_ = false;
    for (int i = 0; i < count; ++i) {
      if (Van* van = static_cast<Van*>(events[i].data.ptr)) {
        van->writable = true;
        ++van->edges;
      } else {
        note_woken(send_wake_);
      }
    }
  }
  {
    MutexLock lock(mutex_);
    while (sending_) stopped_.wait(lock);  // not for long: who sends here sees that this node fails or stops
    advance(Phase::kAllSent);
  }
  if (error()) announce_failure();
  stopped_.notify_all();
  release();
}

// Writes the most urgent frames that can move, at most `limit`. The caller holds the sending role and loses it here.
// True: the sender must be woken, for what is left or to end.
bool Transport::write_frames(int limit) {
  auto try_again_at = Van::kNever;  // of what is written here, the first
  for (int i = 0;; ++i) {
    Van* van;
    uint64_t edges = 0;
    {
      MutexLock lock(mutex_);
      const auto now = Clock::now();
      queue_pings(now);  // an idle van must not look dead because another one is busy
      van = most_urgent_writable();
      if (van == nullptr || i == limit || phase_ == Phase::kStopping || role_wanted_ > 0) {
        sending_ = false;
        // Who replaces a van, or the ending sender, may wait for the role.
        if (phase_ >= Phase::kFinishing || role_wanted_ > 0) stopped_.notify_all();
        return van != nullptr || phase_ >= Phase::kFinishing ||
               (try_again_at < sender_wakes_at_ && std::exchange(sender_sleeps_, false));
      }
      last_written_ = static_cast<size_t>(van->number);
      van->begin_frames(now, precedence_);
      van->last_write = now;
      if (van->stream().may_stand_still()) {
        van->try_again_at = now + Stream::kTryAgainAfter;
        try_again_at = std::min(try_again_at, van->try_again_at);
      }
      edges = van->edges;
    }
    link_.writes_round(van->writes().front().header.round);
    switch (van->write_some()) {
      case Van::Progress::kFrameDone:
        wake_for(*van);
        if (pushes_go_first_) {
          MutexLock lock(mutex_);
          for (const Frame& frame : van->writes()) note_gone(*van, frame.header);
        }
        for (const Frame& frame : van->writes())
          if (frame.context != nullptr) handler_.sent(frame);
        break;
      case Van::Progress::kBlocked: {
        MutexLock lock(mutex_);
        if (van->edges == edges) van->writable = false;
        if (!pushes_go_first_ || van->is_local()) break;
        const auto& blocked = van->writes();
        const auto push =
            std::find_if(blocked.begin(), blocked.end(), [](const Frame& frame) { return is_push(frame.header.kind); });
        if (push != blocked.end()) tell(waiting_pushes_.news(push->header.round));
        break;
      }
      default: {
        // The receiver tells of the loss, unless the peer had said goodbye: it sees the same connection end, and reads
        // first what the peer may have said before.
        MutexLock lock(mutex_);
        van->writable = false;
        van->broken = true;  // and keeps the frame, which may have to be given back
      }
    }
  }
}

// Waits until who sends has stopped, which is soon, and takes the role. False: this node fails, and gives all back.
bool Transport::take_role() {
  MutexLock lock(mutex_);
  ++role_wanted_;
  while (sending_) stopped_.wait(lock);
  --role_wanted_;
  if (error_) return false;
  return sending_ = true;
}

void Transport::leave_role() {
  {
    MutexLock lock(mutex_);
    sending_ = sender_sleeps_ = false;
  }
  stopped_.notify_all();
  wake(send_wake_);
}

void Transport::drop_van(int number) {
  Van& van = *vans_[static_cast<size_t>(number)];
  if (van.is_lost() || !take_role()) return;
  const bool was_read = van.state() < Van::State::kEnded;
  std::vector<Frame> unsent;
  {
    MutexLock lock(mutex_);
    van.drop(unsent);
    for (const Frame& frame : unsent) note_gone(van, frame.header);
    precedence_.gone(van.number);
  }
  // A frozen peer may keep the descriptors open that it shares with us, and they would stay in the epolls.
  epoll_ctl(send_epoll_, EPOLL_CTL_DEL, van.stream().write_fd(), nullptr);
  if (was_read) epoll_ctl(receive_epoll_, EPOLL_CTL_DEL, van.stream().read_fd(), nullptr);
  if (van.paused.exchange(false)) --paused_vans_;
  van.stream().end_writing();
  van.stream().close();
  for (const Frame& frame : unsent)
    if (frame.context != nullptr) handler_.sent(frame);
  leave_role();
}

void Transport::replace_van(int number, std::unique_ptr<Stream> stream) {
  Van& van = *vans_[static_cast<size_t>(number)];
  if (!take_role()) return;
  {
    MutexLock lock(mutex_);
    stream->count_calls_in(&system_calls_);
    if (!van.is_watch()) stream->share_link(&link_);
    van.replace(std::move(stream), Clock::now());
  }
  serve(van);
  leave_role();
}

void Transport::replace_watch(std::unique_ptr<Stream> stream) {
  run_in_receiver([&] {
    const auto watch = std::find_if(vans_.begin(), vans_.end(), [](const auto& van) { return van->is_watch(); });
    drop_van((*watch)->number);
    replace_van((*watch)->number, std::move(stream));
  });
}

void Transport::announce_failure() {
  std::string text;
  {
    MutexLock lock(mutex_);
    text = error_->what();
    for (auto& van : vans_) van->drop_queue();
  }
  text.resize(std::min<size_t>(text.size(), kMaxFailTextBytes));
  Header header;
  header.kind = FrameKind::kFail;
  header.payload_bytes = static_cast<uint32_t>(text.size());
  for (auto& van : vans_) {
    if (van->is_lost()) continue;
    // Behind a half written frame the text would be taken for its payload; that peer sees the connection end instead.
    if (!van->mid_frame()) {
      van->give_up_frames();
      {
        MutexLock lock(mutex_);  // for traffic()
        van->push({header, text.data()}, Clock::now());
        van->begin_frames(Clock::now());
      }
      van->write_some();
    }
    van->give_up_frames();
    van->stream().end_writing();
  }
}

}  // namespace p3
