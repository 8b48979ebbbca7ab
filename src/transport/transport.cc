#include "transport/transport.h"

#include <pthread.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <numeric>
#include <utility>

#include "base/epoll.h"

namespace p3 {
namespace {

// So many frames are written by a thread that has other things to do, before it leaves the rest to the sender.
constexpr int kWritesHere = 8;

// Of a van that has had no connection yet: nobody asks a lost one for anything but its end.
class NoStream final : public Stream {
 public:
  IoResult write(const iovec*, int) override { return {0, ENOTCONN, false, false}; }
  IoResult read(const iovec*, int) override { return {0, ENOTCONN, false, false}; }
  int read_fd() const override { return -1; }
  int write_fd() const override { return -1; }
  uint32_t write_event() const override { return 0; }
  void end_writing() override {}
  void close() override {}
};

}  // namespace

Transport::Transport(NodeOptions options, Handler& handler) : options_(std::move(options)), handler_(handler) {
  event_fd_ = checked(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK), "eventfd");
  send_wake_ = checked(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK), "eventfd");
  receive_wake_ = checked(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK), "eventfd");
  send_epoll_ = checked(epoll_create1(EPOLL_CLOEXEC), "epoll_create1");
  receive_epoll_ = checked(epoll_create1(EPOLL_CLOEXEC), "epoll_create1");
  add_to_epoll(send_epoll_, send_wake_, EPOLLIN, nullptr);
  add_to_epoll(receive_epoll_, receive_wake_, EPOLLIN, nullptr);
}

Transport::~Transport() {
  stop();
  for (int fd : {event_fd_, send_wake_, receive_wake_, send_epoll_, receive_epoll_}) ::close(fd);
}

int Transport::add_van(std::unique_ptr<Stream> stream, std::string label, int peer, bool is_bounded) {
  const int number = static_cast<int>(vans_.size());
  const bool is_lost = stream == nullptr;
  if (is_lost) stream = std::make_unique<NoStream>();
  stream->count_calls_in(&system_calls_);
  if (peer != kNoPeer) stream->share_link(&link_);  // else hosts would differ in the number of their connections
  vans_.push_back(std::make_unique<Van>(number, std::move(stream), std::move(label), peer, options_, is_bounded));
  if (is_lost) vans_.back()->advance(Van::State::kLost);
  return number;
}

void Transport::start() {
  const auto now = Clock::now();
  for (auto& van : vans_) {
    van->last_read = van->last_write = now;
    if (!van->is_lost()) serve(*van);
  }
  {
    MutexLock lock(mutex_);
    advance(Phase::kRunning);
  }
  sender_ = std::thread([this] { send_loop(); });
  receiver_ = std::thread([this] { receive_loop(); });
  pthread_setname_np(sender_.native_handle(), "p3-sender");  // as top and gdb show them
  pthread_setname_np(receiver_.native_handle(), "p3-receiver");
}

void Transport::serve(Van& van) {
  add_to_epoll(send_epoll_, van.stream().write_fd(), van.stream().write_event() | EPOLLET, &van);
  add_to_epoll(receive_epoll_, van.stream().read_fd(), EPOLLIN | EPOLLRDHUP, &van);
}

void Transport::send(const std::vector<Outgoing>& frames, Write write) {
  if (write == Write::kHere && is_receiver() && is_working_) {
    has_put_off_ = true;
    write = Write::kLater;
  }
  bool here = false;
  bool wakes = false;
  std::vector<Frame> unsent;
  {
    MutexLock lock(mutex_);
    if (phase_ == Phase::kStopping) return;
    const auto now = Clock::now();
    for (const Outgoing& out : frames) {
      Van& van = *vans_[static_cast<size_t>(out.van)];
      if (!van.is_lost()) {
        van.push(out.frame, now);
        note_queued(van, out.frame.header);
      } else if (out.frame.context != nullptr) {
        unsent.push_back(out.frame);
      }
    }
    if (!sending_ && role_wanted_ == 0) {  // else who sends will find them
      if (write == Write::kHere)
        here = sending_ = true;
      else if (write == Write::kBySender && most_urgent_writable() != nullptr)  // else a stream that is full wakes it
        wakes = std::exchange(sender_sleeps_, false);
    }
  }
  for (const Frame& frame : unsent) handler_.sent(frame);
  if (here) wakes = write_frames(kWritesHere);
  if (wakes) wake(send_wake_);
}

void Transport::ask_for_work() {
  if (is_receiver())
    work_asked_ = true;
  else
    wake(receive_wake_);
}

// --- ending --------------------------------------------------------------------------------------------------------

void Transport::fail(const Error& error) {
  bool has_threads;
  {
    MutexLock lock(mutex_);
    if (phase_ == Phase::kStopping) return;
    has_threads = phase_ != Phase::kConfiguring;
    error_ = error;
    has_failed_ = true;
    advance(Phase::kStopping);
  }
  wake(send_wake_);
  wake(receive_wake_);
  stopped_.notify_all();
  if (!has_threads) {
    handler_.failed(error);
    signal();
  }
}

// The last thread to let go of borrowed memory tells the handler.
void Transport::release() {
  if (threads_holding_.fetch_sub(1) != 1) return;
  const std::optional<Error> failure = error();
  if (!failure) return;
  handler_.failed(*failure);
  signal();
}

std::optional<Error> Transport::error() const {
  if (!has_failed_) return {};
  MutexLock lock(mutex_);
  return error_;
}

void Transport::signal() { wake(event_fd_); }

void Transport::wake(int event) {
  ++system_calls_;
  raise_event(event);
}

void Transport::note_woken(int event) {
  ++system_calls_;
  clear_event(event);
}

bool Transport::finish(double timeout_s, bool until_read) {
  if (!sender_.joinable()) return true;  // never started, or stopped
  const auto deadline = Clock::now() + seconds(timeout_s);
  Header bye;
  bye.kind = FrameKind::kBye;
  {
    MutexLock lock(mutex_);
    if (!error_)
      for (auto& van : vans_)
        if (!van->is_lost()) van->push({bye}, Clock::now());
    precedence_.end();
    advance(Phase::kFinishing);
  }
  wake(send_wake_);
  bool sent;
  {
    MutexLock lock(mutex_);
    while (phase_ < Phase::kAllSent && stopped_.wait_until(lock, deadline)) continue;
    sent = phase_ == Phase::kAllSent;
  }
  if (sent && until_read) linger(std::min(deadline, Clock::now() + seconds(options_.timeout_s / 2)));
  stop();
  return sent;
}

void Transport::linger(Clock::time_point deadline) {
  MutexLock lock(mutex_);
  for (auto& van : vans_)
    if (!van->is_lost() && !van->is_watch()) van->stream().end_writing();
  advance(Phase::kLingering);
  wake(receive_wake_);
  while (phase_ < Phase::kAllEnded && stopped_.wait_until(lock, deadline)) continue;
}

void Transport::tell_if_all_have_ended() {
  const bool all = std::all_of(vans_.begin(), vans_.end(),
                               [](const auto& van) { return van->state() >= Van::State::kEnded || van->is_watch(); });
  if (!all) return;
  {
    MutexLock lock(mutex_);
    advance(Phase::kAllEnded);
  }
  stopped_.notify_all();
}

void Transport::stop() {
  {
    MutexLock lock(mutex_);
    advance(Phase::kStopping);
  }
  wake(send_wake_);
  wake(receive_wake_);
  if (sender_.joinable()) sender_.join();
  if (receiver_.joinable()) receiver_.join();
  {
    MutexLock lock(mutex_);
    while (sending_) stopped_.wait(lock);  // a thread of the handler may be writing still
  }
  for (auto& van : vans_) van->stream().close();
}

void Transport::abandon_after_fork() {
  for (auto& van : vans_) van->stream().close();
}

Traffic Transport::traffic() const {
  std::vector<int> all(vans_.size());
  std::iota(all.begin(), all.end(), 0);
  return traffic_with(all);
}

Traffic Transport::traffic_with(const std::vector<int>& vans) const {
  Traffic total;
  MutexLock lock(mutex_);
  for (int van : vans) vans_[static_cast<size_t>(van)]->add_to(total);
  return total;
}

}  // namespace p3
