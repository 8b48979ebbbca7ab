#include "transport/transport.h"

#include <pthread.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <limits>
#include <numeric>
#include <utility>

#include "base/event.h"

namespace p3 {
namespace {

// One van may keep the receiver this long before the others get their turn.
constexpr size_t kReadsPerTurn = 16;
// So many frames are written by a thread that has other things to do, before it leaves the rest to the sender.
constexpr int kWritesHere = 8;
// At once, of what nobody wants any more.
constexpr size_t kDiscardedBytes = 64 << 10;

int checked(int result, const char* call) {
  if (result < 0) throw Error(ErrorKind::kUsage, std::string(call) + ": " + strerror(errno));
  return result;
}

void add_to_epoll(int epoll, int fd, uint32_t events, Van* van) {
  epoll_event event{};
  event.events = events;
  event.data.ptr = van;  // null: the wake-up
  checked(epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event), "epoll_ctl");
}

std::chrono::steady_clock::duration seconds(double value) {
  return std::chrono::duration_cast<std::chrono::steady_clock::duration>(std::chrono::duration<double>(value));
}

int milliseconds(double value_s) { return std::max(1, static_cast<int>(value_s * 1e3)); }

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
  vans_.push_back(std::make_unique<Van>(number, std::move(stream), std::move(label), peer, options_.trace.get(),
                                        options_.checksums, is_bounded));
  return number;
}

void Transport::start() {
  const auto now = Clock::now();
  const auto connections = std::count_if(
      vans_.begin(), vans_.end(), [](const auto& van) { return van->stream().leaves_machine() && !van->is_watch(); });
  sharing_link_ = std::max(1, static_cast<int>(connections));
  for (auto& van : vans_) {
    van->last_read = van->last_write = now;
    serve(*van);
  }
  {
    MutexLock lock(mutex_);
    takes_tasks_ = true;
  }
  started_ = true;
  sender_ = std::thread([this] { send_loop(); });
  receiver_ = std::thread([this] { receive_loop(); });
  pthread_setname_np(sender_.native_handle(), "p3-sender");  // as top and gdb show them
  pthread_setname_np(receiver_.native_handle(), "p3-receiver");
}

void Transport::serve(Van& van) {
  van.stream().share_link(sharing_link_);
  add_to_epoll(send_epoll_, van.stream().write_fd(), van.stream().write_event() | EPOLLET, &van);
  add_to_epoll(receive_epoll_, van.stream().read_fd(), EPOLLIN | EPOLLRDHUP, &van);
}

void Transport::send(const std::vector<Outgoing>& frames, Write write) {
  bool here = false;
  bool wake = false;
  std::vector<Frame> unsent;
  {
    MutexLock lock(mutex_);
    if (error_ || stopping_) return;
    const auto now = Clock::now();
    for (const Outgoing& out : frames) {
      Van& van = *vans_[static_cast<size_t>(out.van)];
      if (!van.is_lost())
        van.push(out.frame, now);
      else if (out.frame.context != nullptr)
        unsent.push_back(out.frame);
    }
    if (!sending_ && role_wanted_ == 0) {  // else who sends will find them
      most_urgent_waiting();
      if (write == Write::kHere)
        here = sending_ = true;
      else
        wake = std::exchange(sender_sleeps_, false);
    }
  }
  for (const Frame& frame : unsent) handler_.sent(frame);
  if (here) wake = write_frames(kWritesHere);
  if (wake) raise_event(send_wake_);
}

void Transport::ask_for_work() {
  if (std::this_thread::get_id() == receiver_id_)
    work_asked_ = true;
  else
    raise_event(receive_wake_);
}

// --- the sender ----------------------------------------------------------------------------------------------------

// Among equals the vans take turns, or the slices of a key would keep one server busy and then the next.
Van* Transport::most_urgent_writable() {
  Van* best = nullptr;
  for (size_t i = 1; i <= vans_.size(); ++i) {
    Van* van = vans_[(last_written_ + i) % vans_.size()].get();
    if (van->writable && !van->broken && van->has_work() &&
        (best == nullptr || van->next_urgency().is_sooner_than(best->next_urgency())))
      best = van;
  }
  return best;
}

// Of all frames that wait to leave this machine, here or in a process that shares memory with this one; tells those of
// this node's. Nobody else is sending.
uint64_t Transport::most_urgent_waiting() {
  uint64_t own = 0, all = 0;
  for (const auto& van : vans_) {
    if (van->is_lost()) continue;  // what a dead process has told last stays in the memory that it shared
    own = std::max(own, van->waiting_to_leave());
    all = std::max(all, van->stream().peer_waiting());
  }
  for (const auto& van : vans_) van->stream().tell_waiting(own);
  return std::max(own, all);
}

bool Transport::nothing_to_send() const {
  return std::none_of(vans_.begin(), vans_.end(), [](const auto& van) { return van->has_work() && !van->broken; });
}

void Transport::queue_pings(Clock::time_point now) {
  const auto heartbeat = seconds(options_.heartbeat_s);  // not per van: this runs for every frame
  for (auto& van : vans_) {
    if (van->has_work() || van->state() != Van::State::kOpen || now - van->last_write < heartbeat) continue;
    Header ping;
    ping.round = handler_.last_round();
    ping.priority = std::numeric_limits<int32_t>::max();
    van->push({ping}, now);
  }
}

void Transport::send_loop() {
  epoll_event events[64];
  while (!failing_ && !stopping_) {
    bool write;
    {
      MutexLock lock(mutex_);
      // What a van is writing belongs to who holds the role; without it not even has_work() may be asked.
      if (!sending_) queue_pings(Clock::now());
      write = !sending_ && role_wanted_ == 0 && most_urgent_writable() != nullptr;
      if (write) {
        sending_ = true;
      } else if (finishing_ && !sending_ && nothing_to_send()) {
        break;
      } else {
        sender_sleeps_ = true;
      }
    }
    if (write) {
      write_frames(std::numeric_limits<int>::max());
      continue;
    }
    const int count = epoll_wait(send_epoll_, events, 64, milliseconds(options_.heartbeat_s / 2));
    MutexLock lock(mutex_);
    sender_sleeps_ = false;
    for (int i = 0; i < count; ++i) {
      if (Van* van = static_cast<Van*>(events[i].data.ptr)) {
        van->writable = true;
        ++van->edges;
      } else {
        clear_event(send_wake_);
      }
    }
  }
  {
    MutexLock lock(mutex_);
    while (sending_) stopped_.wait(lock);  // not for long: who sends here sees that this node fails or stops
    sender_done_ = true;
  }
  if (failing_) announce_failure();
  stopped_.notify_all();
  release();
}

// Writes the most urgent frames that can move, at most `limit`. The caller holds the sending role and loses it here.
// True: the sender must be woken, for what is left or to end.
bool Transport::write_frames(int limit) {
  for (int i = 0;; ++i) {
    Van* van;
    uint64_t edges = 0;
    bool yields = false;
    {
      MutexLock lock(mutex_);
      const uint64_t most_urgent = most_urgent_waiting();
      const auto now = Clock::now();
      queue_pings(now);  // an idle van must not look dead because another one is busy
      van = most_urgent_writable();
      if (van == nullptr || i == limit || failing_ || stopping_ || role_wanted_ > 0) {
        sending_ = false;
        // Who replaces a van, or the ending sender, may wait for the role.
        if (failing_ || stopping_ || finishing_ || role_wanted_ > 0) stopped_.notify_all();
        return van != nullptr || finishing_;
      }
      last_written_ = static_cast<size_t>(van->number);
      van->begin_frame(now);
      van->last_write = now;
      edges = van->edges;
      yields = van->stream().leaves_machine() && van->waiting_to_leave() < most_urgent;
    }
    van->stream().yield(yields);
    switch (van->write_some()) {
      case Van::Progress::kFrameDone:
        wake_for(*van);
        if (van->sent_frame().context != nullptr) handler_.sent(van->sent_frame());
        break;
      case Van::Progress::kBlocked: {
        MutexLock lock(mutex_);
        if (van->edges == edges) van->writable = false;
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
  if (failing_) return false;
  return sending_ = true;
}

void Transport::leave_role() {
  {
    MutexLock lock(mutex_);
    sending_ = sender_sleeps_ = false;
  }
  stopped_.notify_all();
  raise_event(send_wake_);
}

void Transport::drop_van(int number) {
  Van& van = *vans_[static_cast<size_t>(number)];
  if (van.is_lost() || !take_role()) return;
  const bool was_read = van.state() < Van::State::kEnded;
  std::vector<Frame> unsent;
  {
    MutexLock lock(mutex_);
    van.drop(unsent);
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
    van.replace(std::move(stream), Clock::now());
  }
  serve(van);
  leave_role();
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
      van->give_up_frame();
      {
        MutexLock lock(mutex_);  // for traffic()
        van->push({header, text.data()}, Clock::now());
        van->begin_frame(Clock::now());
      }
      van->write_some();
    }
    van->give_up_frame();
    van->stream().end_writing();
  }
}

// --- the receiver --------------------------------------------------------------------------------------------------

void Transport::receive_loop() {
  receiver_id_ = std::this_thread::get_id();
  epoll_event events[64];
  auto last_turn = Clock::now(), last_look = last_turn;
  bool more_work = false;
  while (!failing_ && !stopping_) {
    const double tick_s = std::min(options_.heartbeat_s, options_.timeout_s / 4);
    const int count = epoll_wait(receive_epoll_, events, 64, more_work ? 0 : milliseconds(tick_s));
    const auto now = Clock::now();
    // A process that was itself stopped for a while must not blame its peers for the silence.
    if (now - last_turn > seconds(options_.timeout_s / 2))
      for (auto& van : vans_) van->last_read = now;
    last_turn = now;
    try {
      for (int i = 0; i < count && !failing_ && !stopping_; ++i) {
        if (events[i].data.ptr == nullptr)
          clear_event(receive_wake_);
        else
          read_from(*static_cast<Van*>(events[i].data.ptr));
      }
      if (lingering_)
        tell_if_all_have_ended();
      else
        accuse_silent_peers(now);
      if (now - last_look >= seconds(tick_s)) {
        last_look = now;
        handler_.look(now);
      }
      run_tasks();
      work_asked_ = false;
      more_work = !failing_ && handler_.work();
      more_work |= work_asked_;  // while it worked: a frame left, and let another round begin
      resume_vans();
    } catch (const Error& error) {
      fail(error);
    } catch (const std::exception& error) {  // out of memory
      fail(Error(ErrorKind::kStopped, options_.label + ": " + error.what() + " while receiving."));
    }
  }
  std::deque<std::packaged_task<void()>> never_run;
  {
    MutexLock lock(mutex_);
    takes_tasks_ = false;
    tasks_.swap(never_run);
  }
  never_run.clear();  // who waits for one hears of it
  release();
}

void Transport::run_in_receiver(std::function<void()> task) {
  std::packaged_task<void()> packaged(std::move(task));
  std::future<void> done = packaged.get_future();
  {
    MutexLock lock(mutex_);
    if (takes_tasks_) tasks_.push_back(std::move(packaged));
  }
  packaged = {};
  raise_event(receive_wake_);
  try {
    done.get();
  } catch (const std::future_error&) {
    throw error().value_or(Error(ErrorKind::kStopped, options_.label + " has stopped."));
  }
}

void Transport::run_tasks() {
  while (true) {
    std::packaged_task<void()> task;
    {
      MutexLock lock(mutex_);
      if (tasks_.empty()) return;
      task = std::move(tasks_.front());
      tasks_.pop_front();
    }
    task();
  }
}

void Transport::read_from(Van& van) {
  if (lingering_) return read_to_the_end(van);
  for (size_t reads = 0; reads < kReadsPerTurn && !failing_; ++reads) {
    if (van.is_bounded && !van.broken && van.held_bytes() > options_.max_held_bytes) return pause(van);
    switch (van.read_some()) {
      case Van::Progress::kBlocked:
        return;
      case Van::Progress::kEnd:
      case Van::Progress::kBroken:
        if (!ended(van) && !finishing_) lose(van);
        return;
      default:
        break;
    }
    van.last_read = Clock::now();
    for (Van::Event event = van.next(); event != Van::Event::kNothing; event = van.next()) {
      const Header& header = van.received_header();
      if (event == Van::Event::kHeader) {
        const std::string reason = malformed(header, options_.checksums);
        if (!reason.empty()) throw frame_malformed(options_.label, van.label(), reason);
        if (carries_slice(header.kind)) {
          van.payload_goes_to(handler_.receive_into(van.number, header));
        } else {
          van.fail_text.resize(header.payload_bytes);
          van.payload_goes_to(van.fail_text.data());
        }
      } else if (carries_slice(header.kind)) {
        // A payload may lie where it belongs by now, but until received() nobody takes it for a value.
        if (!van.is_intact())
          handler_.refuse(van.number, header, "not what its checksum says: the network or a host's memory altered it");
        handler_.received(van.number, header, van.received_payload());
      } else if (header.kind == FrameKind::kFail) {
        const Error failure(ErrorKind::kRemote, van.fail_text);
        if (!goes_on_without(van, failure)) throw failure;
        return;
      } else if (header.kind == FrameKind::kBye) {
        van.advance(Van::State::kPeerLeft);
        if (!finishing_) handler_.left(van.number);
      }
    }
  }
}

// Nothing more comes. Returns whether the peer has said goodbye before; it then waits for our end: see finish().
bool Transport::ended(Van& van) {
  const bool said_goodbye = van.state() == Van::State::kPeerLeft;
  van.advance(Van::State::kEnded);
  epoll_ctl(receive_epoll_, EPOLL_CTL_DEL, van.stream().read_fd(), nullptr);
  if (said_goodbye) van.stream().end_writing();
  return said_goodbye;
}

void Transport::read_to_the_end(Van& van) {
  std::vector<char> nothing(kDiscardedBytes);
  const iovec part{nothing.data(), nothing.size()};
  IoResult result;
  do result = van.stream().read(&part, 1);
  while (result.bytes > 0 && !stopping_);
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
  if (van.paused && may_resume(van)) raise_event(receive_wake_);
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
  }
}

// While we do not read a peer, what it takes of our bytes is its sign of life.
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
  for (const auto& van : vans_) {
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
  if (!handler_.lost(van.number, loss)) return false;
  drop_van(van.number);
  return true;
}

// --- ending --------------------------------------------------------------------------------------------------------

void Transport::fail(const Error& error) {
  {
    MutexLock lock(mutex_);
    if (error_ || stopping_) return;
    error_ = error;
    failing_ = true;
  }
  raise_event(send_wake_);
  raise_event(receive_wake_);
  stopped_.notify_all();
  if (!started_) {
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
  MutexLock lock(mutex_);
  return error_;
}

void Transport::signal() { raise_event(event_fd_); }

bool Transport::finish(double timeout_s, bool until_read) {
  if (!started_) return true;
  const auto deadline = Clock::now() + seconds(timeout_s);
  Header bye;
  bye.kind = FrameKind::kBye;
  {
    MutexLock lock(mutex_);
    if (!error_)
      for (auto& van : vans_)
        if (!van->is_lost()) van->push({bye}, Clock::now());
    finishing_ = true;
  }
  raise_event(send_wake_);
  bool sent;
  {
    MutexLock lock(mutex_);
    while (!sender_done_ && stopped_.wait_until(lock, deadline)) continue;
    sent = sender_done_ && !error_;
  }
  if (sent && until_read) linger(std::min(deadline, Clock::now() + seconds(options_.timeout_s / 2)));
  stop();
  return sent;
}

void Transport::linger(Clock::time_point deadline) {
  MutexLock lock(mutex_);
  for (auto& van : vans_)
    if (!van->is_lost() && !van->is_watch()) van->stream().end_writing();
  lingering_ = true;
  raise_event(receive_wake_);
  while (!all_have_ended_ && !error_ && stopped_.wait_until(lock, deadline)) continue;
}

void Transport::tell_if_all_have_ended() {
  const bool all = std::all_of(vans_.begin(), vans_.end(),
                               [](const auto& van) { return van->state() >= Van::State::kEnded || van->is_watch(); });
  if (!all) return;
  {
    MutexLock lock(mutex_);
    all_have_ended_ = true;
  }
  stopped_.notify_all();
}

void Transport::stop() {
  stopping_ = true;
  if (started_) {
    raise_event(send_wake_);
    raise_event(receive_wake_);
    if (sender_.joinable()) sender_.join();
    if (receiver_.joinable()) receiver_.join();
    MutexLock lock(mutex_);
    while (sending_) stopped_.wait(lock);  // a thread of the handler may be writing still
  }
  for (auto& van : vans_) van->stream().close();
}

void Transport::abandon_after_fork() {
  for (auto& van : vans_) van->stream().close();
}

Traffic Transport::traffic_with(int van) const {
  MutexLock lock(mutex_);
  return vans_[static_cast<size_t>(van)]->traffic();
}

Traffic Transport::traffic() const {
  std::vector<int> all(vans_.size());
  std::iota(all.begin(), all.end(), 0);
  return traffic_with(all);
}

Traffic Transport::traffic_with(const std::vector<int>& vans) const {
  Traffic total;
  for (int van : vans) {
    const Traffic one = traffic_with(van);
    total.bytes_sent += one.bytes_sent;
    total.bytes_received += one.bytes_received;
    total.slices_sent += one.slices_sent;
    total.slices_received += one.slices_received;
    total.queued_slices += one.queued_slices;
    total.peak_queued_slices = std::max(total.peak_queued_slices, one.peak_queued_slices);
    total.queued_s += one.queued_s;
    total.held_bytes += one.held_bytes;
    total.peak_held_bytes = std::max(total.peak_held_bytes, one.peak_held_bytes);
  }
  return total;
}

}  // namespace p3
