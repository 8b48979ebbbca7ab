#include "p3/worker.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "numeric/sorted_rows.h"
#include "p3/trace.h"
#include "plan/rows.h"
#include "worker/capture_transfer.h"
#include "worker/ways/dense/slice_transfer.h"
#include "worker/ways/gathered/factors_transfer.h"
#include "worker/ways/rows/rows_transfer.h"
#include "worker/worker_impl.h"

namespace p3 {

using Kind = Transfer::Kind;

Worker::Impl::Impl(int rank, int num_servers, NodeOptions options)
    : rank_(rank),
      num_servers_(num_servers),
      leader_(rank, transport_, van_of_server_),
      transport_(std::move(options), *this) {
  if (num_servers < 1) refuse_call("a job needs at least one server, not " + std::to_string(num_servers));
  van_of_server_.assign(static_cast<size_t>(num_servers), -1);
}

void Worker::Impl::refuse_call(const std::string& why) const {
  throw Error(ErrorKind::kUsage, label() + ": " + why + ".");
}

int Worker::Impl::add_van(std::unique_ptr<Stream> stream, std::string peer, int rank_there, bool is_bounded) {
  arriving_.emplace_back();
  return transport_.add_van(std::move(stream), std::move(peer), rank_there, is_bounded);
}

int Worker::Impl::van_of_server(int server) const {
  if (server < 0 || server >= num_servers_) refuse_call("there is no server " + std::to_string(server));
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
  impl_->van_of_server_[static_cast<size_t>(server)] = van;
}

void Worker::add_watch(std::unique_ptr<Stream> stream, std::string label) {
  impl_->add_van(std::move(stream), std::move(label));
}

void Worker::add_local(int worker, std::unique_ptr<Stream> stream, std::string label) {
  const bool leads = worker > impl_->rank_;
  if (worker < 0 || worker == impl_->rank_ || impl_->leader_van_ >= 0 || (!leads && impl_->leader_.leads()))
    impl_->refuse_call("worker " + std::to_string(worker) + " cannot be a neighbour");
  const int van = impl_->add_van(std::move(stream), std::move(label), local_peer(worker), /*is_bounded=*/leads);
  if (leads)
    impl_->leader_.add_member(worker, van);
  else
    impl_->leader_van_ = van;
}

void Worker::start() {
  for (int server = 0; server < impl_->num_servers_; ++server)
    if (impl_->van_of_server(server) < 0) impl_->refuse_call("no connection to server " + std::to_string(server));
  impl_->transport_.start();
}

// --- keys ----------------------------------------------------------------------------------------------------------

int Worker::declare(std::string name, uint64_t elements, DType dtype, const Compression& codec) {
  check(codec);
  return impl_->add_key(std::move(name), elements, dtype, 0, codec);
}

void Worker::set_momentum(int handle, double momentum, double clip_norm) {
  Key& key = impl_->dense_key(handle);
  MutexLock lock(impl_->mutex_);
  if (!key.takes_steps() || key.round > 0 || !(momentum >= 0 && clip_norm >= 0))
    impl_->refuse_call("key '" + key.name +
                       "' cannot have such a momentum: it is set before the first push, with deep gradient "
                       "compression, and neither it nor clip_norm is negative");
  key.momentum = static_cast<float>(momentum);
  key.clip_norm = clip_norm;
}

int Worker::declare_factors(std::string name, const FactorShape& shape, int workers, bool average) {
  if (shape.part_elements() == 0 || workers < 1) impl_->refuse_call("key '" + name + "' has no factors");
  const int handle = impl_->add_key(std::move(name), shape.part_elements(), DType::kFloat32, 0, {});
  impl_->key(handle).factored = std::make_unique<FactoredUpdate>(shape, workers, average);
  return handle;
}

void Worker::set_optimizer(int handle, const OptimizerSpec& spec) {
  auto optimizer = Optimizer::make(spec);
  Key& key = impl_->key_of_factors(handle);
  MutexLock lock(impl_->mutex_);
  if (key.factored->has_optimizer() || key.round > 0)
    impl_->refuse_call("key '" + key.name + "' has an optimizer already, or was pushed without; set it before");
  key.factored->set_optimizer(std::move(optimizer));
}

int Worker::declare_rows(std::string name, uint64_t rows, uint64_t row_elements, DType dtype) {
  if (row_elements == 0 || row_elements > std::numeric_limits<uint32_t>::max())
    impl_->refuse_call("key '" + name + "' has rows of " + std::to_string(row_elements) +
                       " elements; a row has at least one, and less than 2^32");
  return impl_->add_key(std::move(name), rows * row_elements, dtype, static_cast<uint32_t>(row_elements), {});
}

int Worker::Impl::add_key(std::string&& name, uint64_t elements, DType dtype, uint32_t row_elements,
                          const Compression& codec) {
  MutexLock lock(mutex_);
  keys_.try_emplace(
      declared_, [this](Key& key) { count_down(key); }, std::move(name), elements, dtype, row_elements, codec);
  return declared_++;
}

Key& Worker::Impl::find(int handle) {
  const auto found = keys_.find(handle);
  if (found == keys_.end()) refuse_call("there is no key with handle " + std::to_string(handle));
  return found->second;
}

Key& Worker::Impl::key(int handle) {
  MutexLock lock(mutex_);
  return find(handle);
}

Key& Worker::Impl::dense_key(int handle) {
  Key& found = key(handle);
  if (found.row_elements > 0) refuse_call("key '" + found.name + "' is a key of rows; use push_rows and its like");
  return found;
}

Key& Worker::Impl::key_of_factors(int handle) {
  Key& found = key(handle);
  if (found.factored == nullptr) refuse_call("key '" + found.name + "' is no key of factors; declare it as such");
  return found;
}

Key& Worker::Impl::key_of_rows(int handle) {
  Key& found = key(handle);
  if (found.row_elements == 0) refuse_call("key '" + found.name + "' is no key of rows; declare it as such");
  return found;
}

Key& Worker::Impl::key_for(int handle, const void* landing) {
  Key& found = key(handle);
  if (landing == nullptr && found.row_elements == 0 && found.elements > 0)
    refuse_call("key '" + found.name + "' is dense, so it needs a landing array");
  return found;
}

Key& Worker::Impl::key_with_residual(int handle) {
  Key& found = key(handle);
  if (found.codec.residuals() == 0)
    refuse_call("the compression of key '" + found.name + "' leaves nothing out, so the key has no residual");
  return found;
}

size_t Worker::bytes(int key, uint8_t part) const {
  const Key& known = impl_->key(key);
  if (known.factored != nullptr && part != 0) return landing_bytes(key);
  return known.elements * size_of(part == 0 ? known.dtype : sum_type(known.dtype));
}

size_t Worker::landing_bytes(int key) const {
  const Key& known = impl_->key(key);
  return known.factored == nullptr ? bytes(key, 0) : known.factored->shape().elements() * sizeof(float);
}

size_t Worker::row_bytes(int key, uint8_t part) const {
  const Key& known = impl_->key_of_rows(key);
  return known.row_elements * size_of(part == 0 ? known.dtype : sum_type(known.dtype));
}

void Worker::agree(int handle, const KeyPlan& plan, bool catches_up) {
  std::vector<Transport::Outgoing> frames;
  {
    MutexLock lock(impl_->mutex_);
    Key& key = impl_->find(handle);
    if (key.plan) impl_->refuse_call("key '" + key.name + "' was agreed already");
    if (!key.fits(plan)) impl_->refuse_call("the plan of key '" + key.name + "' does not fit its declaration");
    key.plan = plan;
    key.catches_up = catches_up;
    const bool aggregated = plan.adds_up_on_machine();
    key.by_leader = aggregated && impl_->leader_van_ >= 0;
    if (aggregated && impl_->leader_.leads()) key.machine_sum = impl_->leader_.sum_of(key, plan, 1);
    impl_->handle_of_wire_key_[plan.wire_key] = handle;
    impl_->begin_next(key, frames);
  }
  impl_->transport_.send(frames);
}

void Worker::move_rows(int handle, const KeyPlan& plan, std::vector<uint8_t> parts, const RowRange& share, Done done) {
  std::vector<Transport::Outgoing> frames;
  {
    MutexLock lock(impl_->mutex_);
    Key& key = impl_->find(handle);
    if (!plan.has_rows() || !key.fits(plan) || !plan.is_synchronous() || plan.wire_key == 0 ||
        share.first + share.count > row_count(plan))
      impl_->refuse_call("the rows of key '" + key.name + "' cannot move to such a plan");
    key.successors[plan.wire_key] = {plan, std::move(parts), share, std::move(done)};
    impl_->handle_of_wire_key_[plan.wire_key] = handle;
    if (impl_->rank_ == 0) key.announced = plan.wire_key;
    impl_->begin_next(key, frames);
  }
  impl_->transport_.send(frames);
}

bool Worker::is_idle(int key) const {
  MutexLock lock(impl_->mutex_);
  return impl_->find(key).is_idle();
}

void Worker::release(int handle) {
  MutexLock lock(impl_->mutex_);
  const Key& key = impl_->find(handle);
  if (!key.is_idle()) impl_->refuse_call("key '" + key.name + "' has operations under way; wait for them first");
  if (key.plan) impl_->handle_of_wire_key_.erase(key.plan->wire_key);
  for (const auto& [wire_key, successor] : key.successors) impl_->handle_of_wire_key_.erase(wire_key);
  impl_->keys_.erase(handle);
}

void Worker::choose_route(int key, int pushes, bool as_slices) {
  Key& routed = impl_->key_of_rows(key);
  MutexLock lock(impl_->mutex_);
  routed.pushes = pushes;
  routed.counters.as_slices = as_slices;
}

// --- operations ----------------------------------------------------------------------------------------------------

void Worker::init(int key, const void* value, void* landing, int32_t priority, Done done) {
  Key& begun = impl_->key_for(key, landing);
  const bool is_rank_0 = impl_->rank_ == 0;  // whose value is the job's
  if (begun.factored != nullptr) {
    auto transfer = std::make_shared<FactorsTransfer>(Kind::kInit, begun, impl_->rank_, nullptr, nullptr);
    return impl_->submit(begun, {{std::move(transfer), std::move(done), priority}});
  }
  if (begun.row_elements == 0)
    return impl_->submit(begun,
                         {{std::make_shared<SliceTransfer>(Kind::kInit, begun, is_rank_0 ? value : nullptr, landing),
                           std::move(done), priority}});
  impl_->submit(begun, init_rows(begun, is_rank_0, value, landing, priority, std::move(done)));
}

void Worker::push(int key, const void* gradient, void* landing, int32_t priority, const RoundScalars& scalars,
                  Done done, bool gated, bool more) {
  Key& pushed = impl_->dense_key(key);
  if (gated && pushed.clip_norm > 0)
    impl_->refuse_call("key '" + pushed.name +
                       "' is clipped, so its whole gradient must be there before any of it leaves");
  std::shared_ptr<Transfer> transfer;
  if (pushed.factored != nullptr)
    transfer = std::make_shared<FactorsTransfer>(Kind::kPush, pushed, impl_->rank_, gradient, landing);
  else
    transfer = std::make_shared<SliceTransfer>(Kind::kPush, pushed, gradient, landing);
  Operation operation{std::move(transfer), std::move(done), priority, scalars};
  if (gated) operation.ready_elements = 0;
  impl_->submit(pushed, {std::move(operation)}, more ? Transport::Write::kLater : Transport::Write::kBySender);
}

void Worker::flush() { impl_->flush(); }

void Worker::push_rows(int key, const RowsView& gradient, void* landing, int32_t priority, const RoundScalars& scalars,
                       RowsDone done) {
  Key& pushed = impl_->key_of_rows(key);
  impl_->check_ids(pushed, gradient.ids, gradient.count);
  RowsView rows = gradient;
  std::shared_ptr<const SortedRows> sorted;
  if (!is_ascending(gradient.ids, gradient.count)) {
    sorted = std::make_shared<const SortedRows>(gradient, pushed.dtype, pushed.row_elements);
    rows = sorted->view();
  }
  const auto transfer = std::make_shared<RowsTransfer>(Kind::kPush, pushed, rows, landing, 0, std::move(sorted));
  auto told = [transfer, done = std::move(done)](const Error* error, bool) {
    done(error, {transfer->changed().data(), transfer->changed().size(), nullptr});
  };
  impl_->submit(pushed, {{transfer, std::move(told), priority, scalars}});
}

void Worker::skip(int key, void* landing, int32_t priority, Done done, bool gated, bool goes_on) {
  Key& skipped = gated ? impl_->dense_key(key) : impl_->key_for(key, landing);
  std::shared_ptr<Transfer> transfer;
  if (skipped.row_elements > 0)
    transfer = std::make_shared<RowsTransfer>(Kind::kSkip, skipped, RowsView{}, landing, 0, nullptr, goes_on);
  else if (skipped.factored != nullptr)
    transfer = std::make_shared<FactorsTransfer>(Kind::kSkip, skipped, impl_->rank_, nullptr, landing);
  else
    transfer = std::make_shared<SliceTransfer>(Kind::kSkip, skipped, nullptr, landing, 0, goes_on);
  Operation operation{std::move(transfer), std::move(done), priority};
  if (gated) operation.ready_elements = 0;
  impl_->submit(skipped, {std::move(operation)});
}

void Worker::ready(int handle, uint64_t elements) {
  std::vector<Transport::Outgoing> frames;
  {
    MutexLock lock(impl_->mutex_);
    Key& key = impl_->find(handle);
    const auto gated = std::find_if(key.operations.begin(), key.operations.end(),
                                    [&](const Operation& one) { return one.ready_elements < key.elements; });
    if (gated == key.operations.end()) return;
    gated->ready_elements = std::max(gated->ready_elements, std::min(elements, key.elements));
    impl_->begin_ready(key, frames);
  }
  impl_->transport_.send(frames);
}

void Worker::fetch(int key, uint8_t part, void* landing, Done done) {
  Key& fetched = impl_->dense_key(key);
  impl_->submit(fetched, {{impl_->about_part(Kind::kFetch, fetched, nullptr, landing, part), std::move(done)}});
}

void Worker::store(int key, uint8_t part, const void* content, Done done, uint64_t updates) {
  Key& stored = impl_->dense_key(key);
  Operation operation{impl_->about_part(Kind::kStore, stored, content, nullptr, part), std::move(done)};
  operation.scalars.updates = static_cast<double>(updates);
  impl_->submit(stored, {std::move(operation)});
}

uint64_t Worker::updates(int key) const {
  MutexLock lock(impl_->mutex_);
  return static_cast<uint64_t>(impl_->find(key).updates);
}

LandedRound Worker::landed_round(int key) const {
  MutexLock lock(impl_->mutex_);
  return impl_->find(key).landed_round;
}

std::shared_ptr<Transfer> Worker::Impl::about_part(Kind kind, Key& key, const void* content, void* landing,
                                                   uint8_t part) const {
  if (key.factored == nullptr) return std::make_shared<SliceTransfer>(kind, key, content, landing, part);
  if (!key.factored->has_state(part))
    refuse_call("key '" + key.name + "' has no part " + std::to_string(part) + " of a state on this worker");
  return std::make_shared<FactorsTransfer>(kind, key, rank_, content, landing, part);
}

void Worker::fetch_rows(int key, uint8_t part, const int64_t* ids, uint64_t count, void* landing, int32_t priority,
                        Done done) {
  Key& fetched = impl_->key_of_rows(key);
  impl_->check_ids(fetched, ids, count);
  auto transfer = std::make_shared<RowsTransfer>(Kind::kFetch, fetched, RowsView{ids, count, nullptr}, landing, part);
  impl_->submit(fetched, {{std::move(transfer), std::move(done), priority}});
}

void Worker::store_rows(int key, uint8_t part, const RowsView& content, Done done, uint64_t updates) {
  Key& stored = impl_->key_of_rows(key);
  impl_->check_ids(stored, content.ids, content.count);
  if (!is_ascending(content.ids, content.count))
    impl_->refuse_call("key '" + stored.name + "': the ids of rows to store must ascend, each once");
  Operation operation{std::make_shared<RowsTransfer>(Kind::kStore, stored, content, nullptr, part), std::move(done)};
  if (part > 0) operation.scalars.updates = static_cast<double>(updates);
  impl_->submit(stored, {std::move(operation)});
}

void Worker::Impl::check_ids(const Key& key, const int64_t* ids, uint64_t count) {
  const int64_t* const wrong =
      std::find_if(ids, ids + count, [&](int64_t id) { return id < 0 || static_cast<uint64_t>(id) >= key.rows(); });
  if (wrong == ids + count) return;
  transport_.fail(
      Error(ErrorKind::kDisagreement, label() + ": key '" + key.name + "' has no row " + std::to_string(*wrong) +
                                          ": it has " + std::to_string(key.rows()) +
                                          " rows, which count from 0. Check the indices that the script uses."));
}

// --- snapshots -----------------------------------------------------------------------------------------------------

void Worker::capture(int key, uint64_t snapshot, float* residual, Done done) {
  Key& captured = residual == nullptr ? impl_->key(key) : impl_->key_with_residual(key);
  RoundScalars scalars{};
  scalars.updates = static_cast<double>(snapshot);
  auto transfer = std::make_shared<CaptureTransfer>(captured, /*asks=*/impl_->rank_ == 0, residual);
  impl_->submit(captured, {{std::move(transfer), std::move(done), 0, scalars}});
}

bool Worker::keeps_residual(int key) const { return impl_->key(key).codec.residuals() > 0; }

size_t Worker::residual_floats(int key) const { return impl_->key_with_residual(key).kept_floats(); }

void Worker::restore_residual(int key, const float* residual) {
  Key& restored = impl_->key_with_residual(key);
  MutexLock lock(impl_->mutex_);
  if (restored.round > 0)
    impl_->refuse_call("the residual of key '" + restored.name + "' can only be restored before the key's first push");
  if (restored.takes_steps()) restored.rounds_before = read_round(residual + restored.residual.size());
  std::copy_n(residual, restored.residual.size(), restored.residual.data());
}

void Worker::keep_former_residual(int key) {
  Key& kept = impl_->key_with_residual(key);
  MutexLock lock(impl_->mutex_);
  impl_->require_idle_residual(kept);
  kept.former_residual.resize(kept.residual.size());
}

void Worker::change_residual(int key, bool undo, double factor) {
  Key& changed = impl_->key_with_residual(key);
  MutexLock lock(impl_->mutex_);
  impl_->require_idle_residual(changed);
  if (undo && changed.former_residual.empty())
    impl_->refuse_call("what the residual of key '" + changed.name + "' was before the last push has not been kept");
  if (!(factor > 0) || !std::isfinite(factor))
    impl_->refuse_call("the residual of key '" + changed.name + "' cannot be multiplied by " + std::to_string(factor));
  changed.residual_change.undo |= undo;
  changed.residual_change.factor *= static_cast<float>(factor);
}

void Worker::Impl::require_idle_residual(const Key& key) const {
  if (key.takes_steps())
    refuse_call("key '" + key.name + "' has deep gradient compression, which no loss scaler can be used with");
  const auto pushes = [](const Operation& one) { return one.transfer->kind == Kind::kPush; };
  if (std::any_of(key.operations.begin(), key.operations.end(), pushes))
    refuse_call("the residual of key '" + key.name + "' cannot change while a push is under way");
}

std::optional<KeyPlan> Worker::captured_plan(int key) const {
  MutexLock lock(impl_->mutex_);
  return impl_->find(key).captured_plan;
}

// --- reports -------------------------------------------------------------------------------------------------------

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
    (van == impl_->leader_van_ || impl_->leader_.place_of(van) > 0 ? near : away).push_back(van);
  counters.traffic = impl_->transport_.traffic_with(away);
  counters.local = impl_->transport_.traffic_with(near);
  counters.buffer_bytes = impl_->leader_.pool().bytes_in_use();
  counters.peak_buffer_bytes = impl_->leader_.pool().peak_bytes();
  counters.rounds = impl_->rounds_;
  return counters;
}

Traffic Worker::traffic_with(int server) const {
  return impl_->transport_.traffic_with({impl_->van_of_server(server)});
}

KeyCounters Worker::key_counters(int key) const {
  MutexLock lock(impl_->mutex_);
  return impl_->find(key).counters;
}

std::vector<Late> Worker::late() const {
  MutexLock lock(impl_->mutex_);
  return impl_->late_;
}

// --- the end -------------------------------------------------------------------------------------------------------

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
    const auto deadline =
        Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(timeout_s));
    MutexLock lock(impl_->mutex_);
    while (impl_->pending_ > 0 && !impl_->failure_ && impl_->idle_.wait_until(lock, deadline)) {
    }
    idle = impl_->pending_ == 0;
  }
  if (!idle)
    fail(Error(ErrorKind::kStopped,
               impl_->label() + ": closed with operations pending" + clause(impl_->waiting_for_any()) + "."));
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
