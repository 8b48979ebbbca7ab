#include "p3/worker.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "p3/trace.h"
#include "wire/rows.h"
#include "worker/operation.h"
#include "worker/worker_impl.h"

namespace p3 {

Worker::Impl::Impl(int rank, int num_servers, NodeOptions options)
    : rank_(rank),
      num_servers_(num_servers),
      leader_(rank, transport_, van_of_server_),
      transport_(std::move(options), *this) {
  if (num_servers < 1)
    throw Error(ErrorKind::kUsage,
                label() + ": a job needs at least one server, not " + std::to_string(num_servers) + ".");
  van_of_server_.assign(static_cast<size_t>(num_servers), -1);
}

void Worker::Impl::add_server(int server, std::unique_ptr<Stream> stream, std::string peer) {
  if (server < 0 || server >= num_servers_)
    throw Error(ErrorKind::kUsage, label() + ": there is no server " + std::to_string(server) + ".");
  van_of_server_[static_cast<size_t>(server)] = transport_.add_van(std::move(stream), std::move(peer), server);
  server_of_van_.push_back(server);
  arriving_.emplace_back();
}

void Worker::Impl::add_local(int worker, std::unique_ptr<Stream> stream, std::string peer) {
  if (worker < 0 || worker == rank_ || leader_van_ >= 0 || (worker < rank_ && leader_.leads()))
    throw Error(ErrorKind::kUsage, label() + ": worker " + std::to_string(worker) + " cannot be a neighbour.");
  const int van = transport_.add_van(std::move(stream), std::move(peer), local_peer(worker),
                                     /*is_bounded=*/worker > rank_);
  server_of_van_.push_back(-1);
  arriving_.emplace_back();
  if (worker < rank_)
    leader_van_ = van;
  else
    leader_.add_member(worker, van);
}

void Worker::Impl::add_watch(std::unique_ptr<Stream> stream, std::string peer) {
  transport_.add_van(std::move(stream), std::move(peer));
  server_of_van_.push_back(-1);
  arriving_.emplace_back();
}

void Worker::Impl::start() {
  for (size_t server = 0; server < van_of_server_.size(); ++server)
    if (van_of_server_[server] < 0)
      throw Error(ErrorKind::kUsage, label() + ": no connection to server " + std::to_string(server) + ".");
  transport_.start();
}

int Worker::Impl::declare(std::string name, uint64_t elements, DType dtype, const Compression& compression) {
  check(compression);
  return add_key(std::move(name), elements, dtype, 0, {compression.of(dtype), compression.threshold});
}

int Worker::Impl::declare_rows(std::string name, uint64_t rows, uint64_t row_elements, DType dtype) {
  if (row_elements == 0 || row_elements > std::numeric_limits<uint32_t>::max())
    throw Error(ErrorKind::kUsage, label() + ": key '" + name + "' has rows of " + std::to_string(row_elements) +
                                       " elements; a row has at least one, and less than 2^32.");
  return add_key(std::move(name), rows * row_elements, dtype, static_cast<uint32_t>(row_elements), {});
}

int Worker::Impl::add_key(std::string name, uint64_t elements, DType dtype, uint32_t row_elements,
                          const Compression& compression) {
  MutexLock lock(mutex_);
  keys_.emplace_back(*this, std::move(name), elements, dtype, row_elements, compression);
  return static_cast<int>(keys_.size()) - 1;
}

Key& Worker::Impl::find(int handle) {
  if (handle < 0 || static_cast<size_t>(handle) >= keys_.size())
    throw Error(ErrorKind::kUsage, label() + ": there is no key with handle " + std::to_string(handle) + ".");
  return keys_[static_cast<size_t>(handle)];
}

Key& Worker::Impl::key(int handle) {
  MutexLock lock(mutex_);
  return find(handle);
}

Key& Worker::Impl::dense_key(int handle) {
  Key& found = key(handle);
  if (found.row_elements > 0)
    throw Error(ErrorKind::kUsage,
                label() + ": key '" + found.name + "' is a key of rows; use init_rows and its like.");
  return found;
}

Key& Worker::Impl::key_of_rows(int handle) {
  Key& found = key(handle);
  if (found.row_elements == 0)
    throw Error(ErrorKind::kUsage, label() + ": key '" + found.name + "' is no key of rows; declare it as such.");
  return found;
}

// --- snapshots -----------------------------------------------------------------------------------------------------

void Worker::Impl::capture(int handle, uint64_t snapshot, float* residual, Done done) {
  Key& captured = key(handle);
  if (residual != nullptr) require_residual(captured);
  submit(captured, {p3::capture(captured, /*asks=*/rank_ == 0, snapshot, residual, std::move(done))});
}

void Worker::Impl::require_residual(const Key& key) const {
  if (key.residual.empty())
    throw Error(ErrorKind::kUsage, label() + ": the compression of key '" + key.name +
                                       "' leaves nothing out, so the key has no residual.");
}

void Worker::Impl::restore_residual(int handle, const float* residual) {
  Key& restored = key(handle);
  require_residual(restored);
  MutexLock lock(mutex_);
  if (restored.round > 0)
    throw Error(ErrorKind::kUsage, label() + ": the residual of key '" + restored.name +
                                       "' can only be restored before the key's first push.");
  std::copy_n(residual, restored.elements, restored.residual.data());
}

std::optional<KeyPlan> Worker::Impl::captured_plan(int handle) {
  MutexLock lock(mutex_);
  return find(handle).captured_plan;
}

// --- keys of rows --------------------------------------------------------------------------------------------------

void Worker::Impl::check_ids(const Key& key, const int64_t* ids, uint64_t count) {
  const int64_t* const wrong =
      std::find_if(ids, ids + count, [&](int64_t id) { return id < 0 || static_cast<uint64_t>(id) >= key.rows(); });
  if (wrong == ids + count) return;
  transport_.fail(
      Error(ErrorKind::kDisagreement, label() + ": key '" + key.name + "' has no row " + std::to_string(*wrong) +
                                          ": it has " + std::to_string(key.rows()) +
                                          " rows, which count from 0. Check the indices that the script uses."));
}

void Worker::Impl::route_rows(int handle, bool as_slices) {
  Key& routed = key_of_rows(handle);
  MutexLock lock(mutex_);
  routed.as_blocks = routed.counters.as_slices = as_slices;
  routed.pushes = 0;
}

void Worker::Impl::choose_route(int handle, int pushes) {
  Key& routed = key_of_rows(handle);
  MutexLock lock(mutex_);
  routed.pushes = pushes;
}

// --- reports -------------------------------------------------------------------------------------------------------

void Worker::Impl::mark_stall(int handle, int64_t begin_ns, int64_t end_ns) {
  MutexLock lock(mutex_);
  const Key& key = find(handle);
  if (recorder() == nullptr || !key.plan) return;
  Header header;
  header.kind = FrameKind::kValue;
  header.key = key.plan->wire_key;
  header.round = key.round;
  trace_at(recorder(), Clock::time_point(std::chrono::nanoseconds(begin_ns)), TraceKind::kStallBegin, header);
  trace_at(recorder(), Clock::time_point(std::chrono::nanoseconds(end_ns)), TraceKind::kStallEnd, header);
}

Counters Worker::Impl::counters() const {
  Counters counters;
  std::vector<int> away, near;
  for (int van = 0; van < static_cast<int>(server_of_van_.size()); ++van)
    (van == leader_van_ || leader_.place_of(van) > 0 ? near : away).push_back(van);
  counters.traffic = transport_.traffic_with(away);
  counters.local = transport_.traffic_with(near);
  counters.buffer_bytes = leader_.pool().bytes_in_use();
  counters.peak_buffer_bytes = leader_.pool().peak_bytes();
  counters.rounds = rounds_;
  return counters;
}

Traffic Worker::Impl::traffic_with(int server) const {
  if (server < 0 || server >= num_servers_)
    throw Error(ErrorKind::kUsage, label() + ": there is no server " + std::to_string(server) + ".");
  return transport_.traffic_with(van_of_server_[static_cast<size_t>(server)]);
}

KeyCounters Worker::Impl::key_counters(int handle) {
  MutexLock lock(mutex_);
  return find(handle).counters;
}

void Worker::Impl::look(Clock::time_point now) {
  if (!leader_.leads()) return;
  MutexLock lock(mutex_);
  LateWorkers late;
  for (const Key& key : keys_)
    if (key.machine_sum != nullptr) leader_.note_late(key, now, late);
  late_ = late.take();
}

std::vector<Late> Worker::Impl::late() const {
  MutexLock lock(mutex_);
  return late_;
}

// --- the interface: each call is an operation on a key -------------------------------------------------------------

Worker::Worker(int rank, int num_servers, NodeOptions options)
    : impl_(std::make_unique<Impl>(rank, num_servers, std::move(options))) {}

Worker::~Worker() {
  if (impl_) impl_->close(0);
}

void Worker::add_server(int server, std::unique_ptr<Stream> stream, std::string label) {
  impl_->add_server(server, std::move(stream), std::move(label));
}
void Worker::add_watch(std::unique_ptr<Stream> stream, std::string label) {
  impl_->add_watch(std::move(stream), std::move(label));
}
void Worker::add_local(int worker, std::unique_ptr<Stream> stream, std::string label) {
  impl_->add_local(worker, std::move(stream), std::move(label));
}
void Worker::start() { impl_->start(); }

int Worker::declare(std::string name, uint64_t elements, DType dtype, const Compression& compression) {
  return impl_->declare(std::move(name), elements, dtype, compression);
}

void Worker::agree(int key, const KeyPlan& plan, bool catches_up) { impl_->agree(key, plan, catches_up); }

void Worker::init(int key, const void* value, void* landing, int32_t priority, Done done) {
  Key& dense = impl_->dense_key(key);
  const void* const data = impl_->rank() == 0 ? value : nullptr;  // rank 0's value is the job's
  impl_->submit(dense, {p3::init(dense, data, landing, priority, std::move(done))});
}

void Worker::push(int key, const void* gradient, void* landing, int32_t priority, const RoundScalars& scalars,
                  Done done) {
  Key& dense = impl_->dense_key(key);
  impl_->submit(dense, {p3::push(dense, gradient, landing, priority, scalars, std::move(done))});
}

void Worker::skip(int key, void* landing, int32_t priority, Done done) {
  Key& dense = impl_->dense_key(key);
  impl_->submit(dense, {p3::skip(dense, landing, priority, std::move(done))});
}

void Worker::fetch(int key, uint8_t part, void* landing, Done done) {
  Key& dense = impl_->dense_key(key);
  impl_->submit(dense, {p3::fetch(dense, part, landing, std::move(done))});
}

void Worker::store(int key, uint8_t part, const void* content, Done done) {
  Key& dense = impl_->dense_key(key);
  impl_->submit(dense, {p3::store(dense, part, content, std::move(done))});
}

int Worker::declare_rows(std::string name, uint64_t rows, uint64_t row_elements, DType dtype) {
  return impl_->declare_rows(std::move(name), rows, row_elements, dtype);
}

void Worker::init_rows(int key, const void* value, void* landing, int32_t priority, Done done) {
  Key& sparse = impl_->key_of_rows(key);
  impl_->submit(sparse, p3::init_rows(sparse, impl_->rank() == 0, value, landing, priority, std::move(done)));
}

void Worker::push_rows(int key, const RowsView& gradient, void* landing, int32_t priority, const RoundScalars& scalars,
                       RowsDone done) {
  Key& sparse = impl_->key_of_rows(key);
  impl_->check_ids(sparse, gradient.ids, gradient.count);
  impl_->submit(sparse, {p3::push_rows(sparse, gradient, landing, priority, scalars, std::move(done))});
}

void Worker::skip_rows(int key, void* landing, int32_t priority, Done done) {
  Key& sparse = impl_->key_of_rows(key);
  impl_->submit(sparse, {p3::skip_rows(sparse, landing, priority, std::move(done))});
}

void Worker::fetch_rows(int key, uint8_t part, const int64_t* ids, uint64_t count, void* landing, int32_t priority,
                        Done done) {
  Key& sparse = impl_->key_of_rows(key);
  impl_->check_ids(sparse, ids, count);
  impl_->submit(sparse, {p3::fetch_rows(sparse, part, {ids, count, nullptr}, landing, priority, std::move(done))});
}

void Worker::store_rows(int key, uint8_t part, const RowsView& content, Done done) {
  Key& sparse = impl_->key_of_rows(key);
  impl_->check_ids(sparse, content.ids, content.count);
  if (!is_ascending(content.ids, content.count))
    throw Error(ErrorKind::kUsage,
                impl_->label() + ": key '" + sparse.name + "': the ids of rows to store must ascend, each once.");
  impl_->submit(sparse, {p3::store_rows(sparse, part, content, std::move(done))});
}

void Worker::move_rows(int key, const KeyPlan& plan, std::vector<uint8_t> parts, const RowRange& share, MoveDone done) {
  impl_->move_rows(key, plan, std::move(parts), share, std::move(done));
}

void Worker::route_rows(int key, bool as_slices) { impl_->route_rows(key, as_slices); }
void Worker::choose_route(int key, int pushes) { impl_->choose_route(key, pushes); }

void Worker::capture(int key, uint64_t snapshot, float* residual, Done done) {
  impl_->capture(key, snapshot, residual, std::move(done));
}
bool Worker::keeps_residual(int key) const { return !impl_->key(key).residual.empty(); }
void Worker::restore_residual(int key, const float* residual) { impl_->restore_residual(key, residual); }
std::optional<KeyPlan> Worker::captured_plan(int key) const { return impl_->captured_plan(key); }

void Worker::mark_stall(int key, int64_t begin_ns, int64_t end_ns) { impl_->mark_stall(key, begin_ns, end_ns); }

void Worker::fail(const Error& error) { impl_->transport().fail(error); }
std::optional<Error> Worker::error() const { return impl_->transport().error(); }
int Worker::event_fd() const { return impl_->transport().event_fd(); }

Counters Worker::counters() const { return impl_->counters(); }
std::vector<Late> Worker::late() const { return impl_->late(); }
Traffic Worker::traffic_with(int server) const { return impl_->traffic_with(server); }
KeyCounters Worker::key_counters(int key) const { return impl_->key_counters(key); }

bool Worker::close(double timeout_s) { return impl_->close(timeout_s); }

void Worker::abandon_after_fork() {
  impl_->transport().abandon_after_fork();
  static_cast<void>(impl_.release());  // its threads and locks belong to the parent
}

}  // namespace p3
