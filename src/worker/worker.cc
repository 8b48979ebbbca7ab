#include "p3/worker.h"

#include <algorithm>
#include <utility>

#include "base/epoll.h"
#include "p3/trace.h"
#include "worker/worker_impl.h"

namespace p3 {

Worker::Impl::Impl(int its_rank, int num_servers, NodeOptions options)
    : WayHost(its_rank, options.outlives_servers),
      num_servers_(num_servers),
      leader_(rank, num_servers, transport_, van_of_server_),
      transport_(std::move(options), *this) {
  if (num_servers < 1) refuse_call("a job needs at least one server, not " + std::to_string(num_servers));
  van_of_server_.assign(static_cast<size_t>(num_servers), -1);
  own_van_ = van_of_server_;
  is_lost_.assign(van_of_server_.size(), false);
}

int Worker::Impl::add_van(std::unique_ptr<Stream> stream, std::string peer, int rank_there, bool is_bounded) {
  arriving_.emplace_back();
  return transport_.add_van(std::move(stream), std::move(peer), rank_there, is_bounded);
}

void Worker::Impl::check_server(int server) const {
  if (server < 0 || server >= num_servers_) refuse_call("there is no server " + std::to_string(server));
}

int Worker::Impl::van_of_server(int server) const {
  check_server(server);
  MutexLock lock(mutex_);
  return van_of_server_[static_cast<size_t>(server)];
}

Worker::Guarded::Guarded(std::unique_ptr<Impl> impl) : impl_(std::move(impl)), label_(impl_->label()) {}
Worker::Guarded::~Guarded() = default;

Worker::Impl* Worker::Guarded::operator->() const {
  if (impl_ == nullptr) throw why();
  return impl_.get();
}

void Worker::Guarded::abandon() {
  impl_->transport_.abandon_after_fork();
  static_cast<void>(impl_.release());  // its threads and locks belong to the parent
}

Error Worker::Guarded::why() const {
  return Error(ErrorKind::kStopped, label_ +
                                        ": this process was forked from a worker and is no part of the job; use P3 in "
                                        "the parent only");
}

Worker::Worker(int rank, int num_servers, NodeOptions options)
    : impl_(std::make_unique<Impl>(rank, num_servers, std::move(options))) {}

Worker::~Worker() { close(0); }

void Worker::add_server(int server, std::unique_ptr<Stream> stream, std::string label) {
  impl_->van_of_server(server);
  const int van = impl_->add_van(std::move(stream), std::move(label), server);
  const auto place = static_cast<size_t>(server);
  impl_->van_of_server_[place] = impl_->own_van_[place] = van;
}

void Worker::add_heir(int lost, int heir, std::string label) {
  impl_->check_that_it_outlives_servers();
  const int van = impl_->van_of_server(heir);
  if (impl_->van_of_server(lost) >= 0 || van < 0)
    impl_->refuse_call((van < 0 ? "no connection to server " : "a connection to server ") +
                       std::to_string(van < 0 ? heir : lost));
  const auto place = static_cast<size_t>(lost);
  impl_->own_van_[place] = impl_->add_van(nullptr, std::move(label), lost);
  impl_->van_of_server_[place] = van;
}

void Worker::add_watch(std::unique_ptr<Stream> stream, std::string label) {
  impl_->add_van(std::move(stream), std::move(label));
}

void Worker::become_first() noexcept { impl_->is_first = true; }

void Worker::come_later() noexcept { impl_->is_first = false; }

void Worker::replace_watch(std::unique_ptr<Stream> stream) { impl_->transport_.replace_watch(std::move(stream)); }

void Worker::add_local(int worker, std::unique_ptr<Stream> stream, std::string label) {
  const bool leads = worker > impl_->rank;
  if (worker < 0 || worker == impl_->rank || impl_->leader_.follows() || (!leads && impl_->leader_.leads()))
    impl_->refuse_call("worker " + std::to_string(worker) + " cannot be a neighbour");
  const int van = impl_->add_van(std::move(stream), std::move(label), local_peer(worker), /*is_bounded=*/leads);
  if (leads)
    impl_->leader_.add_member(worker, van);
  else
    impl_->leader_.follow(van);
}

void Worker::add_member(int worker, std::unique_ptr<Stream> stream, std::string label) {
  if (worker < 0 || worker == impl_->rank || impl_->outlives_servers || impl_->leader_.follows())
    impl_->refuse_call("worker " + std::to_string(worker) + " cannot be in a group with it");
  // Not bounded: both ends ask, so both must always read. What one makes the other keep is a push of each slice at most.
  impl_->leader_.add_member(worker, impl_->add_van(std::move(stream), std::move(label), local_peer(worker)));
}

void Worker::join_groups(const Groups& groups) { impl_->leader_.join(groups); }

void Worker::start() {
  for (int server = 0; server < impl_->num_servers_; ++server)
    if (impl_->van_of_server(server) < 0) impl_->refuse_call("no connection to server " + std::to_string(server));
  impl_->transport_.start();
}

// --- keys ----------------------------------------------------------------------------------------------------------

Key& Worker::Impl::find(int handle) {
  const auto found = keys_.find(handle);
  if (found == keys_.end()) refuse_call("there is no key with handle " + std::to_string(handle));
  return found->second;
}

Key& Worker::Impl::key(int handle) {
  MutexLock lock(mutex_);
  return find(handle);
}

size_t Worker::bytes(int key, uint8_t part) const { return impl_->way(key).bytes(part); }
size_t Worker::landing_bytes(int key) const { return impl_->way(key).landing_bytes(); }

void Worker::agree(int handle, const KeyPlan& plan, bool catches_up) {
  std::vector<Transport::Outgoing> frames;
  {
    MutexLock lock(impl_->mutex_);
    Key& key = impl_->find(handle);
    if (key.plan) impl_->refuse_call("key '" + key.name + "' was agreed already");
    if (!key.fits(plan)) impl_->refuse_call("the plan of key '" + key.name + "' does not fit its declaration");
    if (const std::string problem = problem_with_servers(plan, impl_->num_servers_); !problem.empty())
      impl_->refuse_call("the plan of key '" + key.name + "' does not fit the job: " + problem);
    check(plan.value_codec);
    key.plan = plan;
    key.catches_up = catches_up;
    if (plan.tells_norms()) impl_->transport_.put_pushes_first();
    const bool aggregated = impl_->leader_.is_in_groups() ? plan.adds_up_in_groups() : plan.adds_up_on_machine();
    key.by_leader = aggregated && impl_->leader_.follows();
    if (key.by_leader) key.way->follow_leader();
    if (aggregated && impl_->leader_.leads()) key.machine_sum = impl_->leader_.sum_of(key, plan, 1);
    impl_->add_wire_key(key, handle, plan.wire_key);
    impl_->begin_next(key, frames);
  }
  impl_->transport_.send(frames);
}

void Worker::recut(int handle, const KeyPlan& plan) {
  MutexLock lock(impl_->mutex_);
  Key& key = impl_->find(handle);
  const bool can = key.plan && plan.is_another_cut_of(*key.plan) && problem_with(plan).empty() &&
                   problem_with_servers(plan, impl_->num_servers_).empty() && !impl_->outlives_servers;
  if (!can || !key.is_idle())
    impl_->refuse_call("key '" + key.name + "' cannot be cut anew" +
                       (can ? ": it has operations under way" : ", or not so"));
  impl_->add_wire_key(key, handle, plan.wire_key);
  impl_->adopt(key, plan);
  if (key.machine_sum != nullptr) key.machine_sum = impl_->leader_.sum_of(key, plan, key.round + 1);
}

uint64_t Worker::round(int key) const {
  MutexLock lock(impl_->mutex_);
  return impl_->find(key).round;
}

bool Worker::is_idle(int key) const {
  MutexLock lock(impl_->mutex_);
  return impl_->find(key).is_idle();
}

void Worker::release(int handle) {
  MutexLock lock(impl_->mutex_);
  const Key& key = impl_->find(handle);
  if (!key.is_idle()) impl_->refuse_call("key '" + key.name + "' has operations under way; wait for them first");
  for (uint32_t wire_key : key.wire_keys) impl_->handle_of_wire_key_.erase(wire_key);
  impl_->keys_.erase(handle);
}

// --- operations ----------------------------------------------------------------------------------------------------

void Worker::init(int key, const void* value, void* landing, int32_t priority, Done done) {
  Way& way = impl_->way(key);
  impl_->submit(way.key, way.init(value, landing, priority, std::move(done)));
}

void Worker::hand_over(int handle) {
  MutexLock lock(impl_->mutex_);
  impl_->find(handle).next_init = InitPart::kHandedOver;
}

void Worker::push(int key, const void* gradient, void* landing, int32_t priority, const RoundSettings& settings,
                  Done done, bool gated, bool more) {
  Way& way = impl_->way(key);
  Operation operation{way.push(gradient, landing, gated), std::move(done), priority, settings.scalars};
  operation.fields = settings.fields;
  if (gated) operation.ready_elements = 0;
  impl_->submit(way.key, {std::move(operation)}, more ? Transport::Write::kLater : Transport::Write::kBySender);
}

void Worker::flush() { impl_->flush(); }

void Worker::skip(int key, void* landing, int32_t priority, Done done, bool gated, bool goes_on) {
  Way& way = impl_->way(key);
  Operation operation{way.skip(landing, gated, goes_on), std::move(done), priority};
  if (gated) operation.ready_elements = 0;
  impl_->submit(way.key, {std::move(operation)});
}

void Worker::ready(int handle, uint64_t elements) {
  std::vector<Transport::Outgoing> frames;
  {
    MutexLock lock(impl_->mutex_);
    Key& key = impl_->find(handle);
    const auto gated = std::find_if(key.operations.begin(), key.operations.end(),
                                    [&](const Operation& one) { return one.ready_elements < key.declared.elements; });
    if (gated == key.operations.end()) return;
    gated->ready_elements = std::max(gated->ready_elements, std::min(elements, key.declared.elements));
    impl_->begin_ready(key, frames);
  }
  impl_->transport_.send(frames);
}

void Worker::set_optimizer(int key, const OptimizerSpec& spec) {
  Way& way = impl_->way(key);
  MutexLock lock(impl_->mutex_);
  if (way.key.round > 0)
    impl_->refuse_call("key '" + way.key.name + "' was pushed without an optimizer; set it before");
  way.set_optimizer(spec);
}

void Worker::fetch(int key, uint8_t part, void* landing, Done done) {
  Way& way = impl_->way(key);
  impl_->submit(way.key, {{way.fetch(part, landing), std::move(done)}});
}

void Worker::store(int key, uint8_t part, const void* content, Done done, uint64_t updates) {
  Way& way = impl_->way(key);
  Operation operation{way.store(part, content), std::move(done)};
  operation.scalars.updates = static_cast<double>(updates);
  impl_->submit(way.key, {std::move(operation)});
}

void Worker::capture(int key, uint64_t snapshot, float* kept, Done done) {
  Way& way = impl_->way(key);
  RoundScalars scalars{};
  scalars.updates = static_cast<double>(snapshot);
  impl_->submit(way.key, {{way.capture(/*asks=*/impl_->is_first, kept), std::move(done), 0, scalars}});
}

std::optional<KeyPlan> Worker::captured_plan(int key) const {
  MutexLock lock(impl_->mutex_);
  return impl_->find(key).captured_plan;
}

// --- reports -------------------------------------------------------------------------------------------------------

uint64_t Worker::updates(int key) const {
  MutexLock lock(impl_->mutex_);
  return static_cast<uint64_t>(impl_->find(key).way->progress.updates());
}

LandedRound Worker::landed_round(int key) const {
  MutexLock lock(impl_->mutex_);
  return impl_->find(key).way->progress.landed();
}

void Worker::mark_stall(int handle, int64_t begin_ns, int64_t end_ns) {
  MutexLock lock(impl_->mutex_);
  const Key& key = impl_->find(handle);
  if (!key.plan) return;
  Header header;
  header.kind = FrameKind::kValue;
  header.key = key.plan->wire_key;
  header.round = key.round;
  const auto at = [](int64_t ns) { return Impl::Clock::time_point(std::chrono::nanoseconds(ns)); };
  trace_at(impl_->recorder(), at(begin_ns), TraceKind::kStallBegin, header);
  trace_at(impl_->recorder(), at(end_ns), TraceKind::kStallEnd, header);
}

Counters Worker::counters() const {
  Counters counters;
  std::vector<int> away, near;
  for (int van = 0; van < static_cast<int>(impl_->arriving_.size()); ++van)
    (impl_->leader_.is_of_machine(van) ? near : away).push_back(van);
  counters.traffic = impl_->transport_.traffic_with(away);
  counters.local = impl_->transport_.traffic_with(near);
  counters.buffer_bytes = impl_->leader_.pool().bytes_in_use();
  counters.peak_buffer_bytes = impl_->leader_.pool().peak_bytes();
  counters.system_calls = impl_->transport_.system_calls();
  counters.rounds = impl_->rounds_;
  counters.last_round = impl_->last_round_;
  return counters;
}

Traffic Worker::traffic_with(int server) const {
  return impl_->transport_.traffic_with({impl_->van_of_server(server)});
}

uint64_t Worker::take_full_rate() { return impl_->transport_.take_full_rate(); }

KeyCounters Worker::key_counters(int key) const {
  MutexLock lock(impl_->mutex_);
  const Key& known = impl_->find(key);
  KeyCounters counters{known.counters, {}};
  known.way->report(counters);
  return counters;
}

std::vector<Late> Worker::late() const {
  MutexLock lock(impl_->mutex_);
  return impl_->late_;
}

// --- the end -------------------------------------------------------------------------------------------------------

const std::string& Worker::label() const { return impl_.label(); }

void Worker::fail(const Error& error) {
  if (impl_) impl_->transport_.fail(error);
}

std::optional<Error> Worker::error() const { return impl_ ? impl_->transport_.error() : impl_.why(); }
int Worker::event_fd() const { return impl_->transport_.event_fd(); }

bool Worker::close(double timeout_s) {
  if (!impl_) return false;
  using Clock = Impl::Clock;
  bool idle;
  {
    const auto deadline = Clock::now() + seconds(timeout_s);
    MutexLock lock(impl_->mutex_);
    while (impl_->pending_ > 0 && !impl_->failure_ && impl_->idle_.wait_until(lock, deadline)) {
    }
    idle = impl_->pending_ == 0;
  }
  if (!idle)
    fail(Error(ErrorKind::kStopped,
               impl_->label() + ": closed with operations pending" + clause(impl_->waiting_for_any()) + "."));
  impl_->give_what_is_owed();
  const bool orderly = impl_->transport_.finish(timeout_s, /*until_read=*/true) && idle;
  // For later calls, which no thread would answer.
  impl_->failed(Error(ErrorKind::kStopped, impl_->label() + " is closed."));
  if (impl_->recorder() != nullptr) impl_->recorder()->close();
  return orderly;
}

void Worker::abandon_after_fork() {
  if (impl_) impl_.abandon();
}

}  // namespace p3
