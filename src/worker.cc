#include "p3/worker.h"

#include <condition_variable>
#include <deque>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include "p3/transport.h"

namespace p3 {
namespace {

// One round of one key, asked for and not yet complete.
struct Operation {
  bool first_value = false;  // an init; else a push
  const void* data = nullptr;
  void* landing = nullptr;
  int32_t priority = 0;
  RoundScalars scalars;
  Worker::Done done;
};

struct Key {
  std::string name;
  uint64_t elements;
  DType dtype;
  std::optional<KeyPlan> plan;
  uint64_t next_round = 0;
  std::deque<Operation> operations;  // the front one is under way if `active`
  bool active = false;
  uint64_t round = 0;  // of the front one
  uint32_t slices_to_land = 0;
  std::vector<bool> landed;
};

}  // namespace

class Worker::Impl : public Transport::Handler {
 public:
  Impl(int rank, int num_servers, NodeOptions options)
      : rank_(rank), num_servers_(num_servers), transport_(std::move(options), *this) {
    if (num_servers < 1)
      throw Error(ErrorKind::kUsage,
                  label() + ": a job needs at least one server, not " + std::to_string(num_servers) + ".");
    van_of_server_.assign(static_cast<size_t>(num_servers), -1);
  }

  void add_server(int server, std::unique_ptr<Stream> stream, std::string peer) {
    if (server < 0 || server >= num_servers_)
      throw Error(ErrorKind::kUsage, label() + ": there is no server " + std::to_string(server) + ".");
    van_of_server_[static_cast<size_t>(server)] = transport_.add_van(std::move(stream), std::move(peer));
    server_of_van_.push_back(server);
  }

  void add_watch(std::unique_ptr<Stream> stream, std::string peer) {
    transport_.add_van(std::move(stream), std::move(peer));
    server_of_van_.push_back(-1);
  }

  void start() {
    for (size_t server = 0; server < van_of_server_.size(); ++server)
      if (van_of_server_[server] < 0)
        throw Error(ErrorKind::kUsage, label() + ": no connection to server " + std::to_string(server) + ".");
    transport_.start();
  }

  int declare(std::string name, uint64_t elements, DType dtype) {
    std::lock_guard<std::mutex> lock(mutex_);
    keys_.push_back({});
    keys_.back().name = std::move(name);
    keys_.back().elements = elements;
    keys_.back().dtype = dtype;
    return static_cast<int>(keys_.size()) - 1;
  }

  void agree(int handle, const KeyPlan& plan) {
    std::vector<Transport::Outgoing> frames;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      Key& key = find(handle);
      if (key.plan) throw Error(ErrorKind::kUsage, label() + ": key '" + key.name + "' was agreed already.");
      if (plan.elements != key.elements || plan.dtype != key.dtype || plan.slice_elements == 0)
        throw Error(ErrorKind::kUsage, label() + ": the plan of key '" + key.name + "' does not fit its declaration.");
      key.plan = plan;
      handle_of_wire_key_[plan.wire_key] = handle;
      begin_next(key, frames);
    }
    transport_.send(frames);
  }

  void submit(int handle, Operation operation) {
    if (operation.first_value && rank_ != 0) operation.data = nullptr;  // rank 0's value is the job's
    std::vector<Transport::Outgoing> frames;
    std::optional<Error> failure;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      Key& key = find(handle);
      failure = failure_;
      if (!failure) {
        key.operations.push_back(std::move(operation));
        ++pending_;
        begin_next(key, frames);
      }
    }
    if (failure)
      operation.done(&*failure);
    else
      transport_.send(frames);
  }

  bool close(double timeout_s) {
    bool idle;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      idle = idle_.wait_for(lock, std::chrono::duration<double>(timeout_s), [this] {
        return pending_ == 0 || failure_;
      }) && pending_ == 0;
    }
    if (!idle)
      transport_.fail(
          Error(ErrorKind::kStopped, label() + ": closed with operations pending" + waiting_for_any() + "."));
    const bool orderly = transport_.finish(timeout_s) && idle;
    failed(Error(ErrorKind::kStopped, label() + " is closed."));  // for later calls, which no thread would answer
    return orderly;
  }

  // --- Transport::Handler ------------------------------------------------------------------------------------------

  void* receive_into(int van, const Header& header) override {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto known = handle_of_wire_key_.find(header.key);
    if (header.kind != FrameKind::kValue || known == handle_of_wire_key_.end()) refuse(van, header, "unexpected");
    Key& key = keys_[static_cast<size_t>(known->second)];
    if (!key.active || header.round != key.round) refuse(van, header, "out of turn");
    if (header.slice >= slice_count(*key.plan) || key.landed[header.slice] ||
        van_of_server_[static_cast<size_t>(server_of(*key.plan, header.slice, num_servers_))] != van)
      refuse(van, header, "misplaced");
    const Slice slice = slice_at(*key.plan, header.slice);
    if (static_cast<DType>(header.dtype) != key.dtype || header.payload_bytes != slice.elements * size_of(key.dtype))
      refuse(van, header, "wrongly sized");
    return static_cast<char*>(key.operations.front().landing) + slice.offset * size_of(key.dtype);
  }

  void received(int, const Header& header, void*) override {
    std::vector<Transport::Outgoing> frames;
    Done done;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      Key& key = keys_[static_cast<size_t>(handle_of_wire_key_.at(header.key))];
      key.landed[header.slice] = true;
      if (--key.slices_to_land > 0) return;
      done = std::move(key.operations.front().done);
      key.operations.pop_front();
      key.active = false;
      ++rounds_;
      begin_next(key, frames);
    }
    transport_.send(frames);
    done(nullptr);
    {
      // Only now: close() must not return before the last `done` has.
      std::lock_guard<std::mutex> lock(mutex_);
      --pending_;
    }
    idle_.notify_all();
  }

  void sent(int, void*) override {}

  void left(int van) override {
    if (server_of_van_[static_cast<size_t>(van)] < 0) return;
    throw Error(ErrorKind::kPeerLost, label() + ": " + transport_.label(van) + " left the job" + waiting_for(van) +
                                          " while this worker still runs.");
  }

  std::string waiting_for(int van) const override {
    const int server = server_of_van_[static_cast<size_t>(van)];
    std::lock_guard<std::mutex> lock(mutex_);
    for (const Key& key : keys_) {
      if (!key.active) continue;
      for (uint32_t i = 0; i < slice_count(*key.plan); ++i)
        if (!key.landed[i] && server_of(*key.plan, i, num_servers_) == server)
          return " while waiting for round " + std::to_string(key.round) + " of key '" + key.name + "'";
    }
    return {};
  }

  void failed(const Error& error) override {
    std::vector<Done> pending;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (!failure_) failure_ = error;
      for (Key& key : keys_) {
        for (Operation& operation : key.operations) pending.push_back(std::move(operation.done));
        key.operations.clear();
        key.active = false;
      }
    }
    for (const Done& done : pending) done(&*failure_);
    {
      std::lock_guard<std::mutex> lock(mutex_);
      pending_ -= pending.size();
    }
    idle_.notify_all();
  }

  Transport& transport() { return transport_; }
  const std::string& label() const { return transport_.options().label; }
  uint64_t rounds() const { return rounds_; }

 private:
  Key& find(int handle) {
    if (handle < 0 || static_cast<size_t>(handle) >= keys_.size())
      throw Error(ErrorKind::kUsage, label() + ": there is no key with handle " + std::to_string(handle) + ".");
    return keys_[static_cast<size_t>(handle)];
  }

  // Cuts the key's next operation into frames, unless one is under way or the plan is not known yet.
  void begin_next(Key& key, std::vector<Transport::Outgoing>& frames) {
    if (key.active || !key.plan || key.operations.empty() || failure_) return;
    const Operation& operation = key.operations.front();
    const uint32_t count = slice_count(*key.plan);
    key.active = true;
    key.round = operation.first_value ? 0 : ++key.next_round;
    key.slices_to_land = count;
    key.landed.assign(count, false);
    frames.reserve(count);

    Frame frame;
    frame.header.kind = operation.first_value ? FrameKind::kInit : FrameKind::kPush;
    frame.header.dtype = static_cast<uint8_t>(key.dtype);
    frame.header.key = key.plan->wire_key;
    frame.header.round = key.round;
    frame.header.priority = operation.priority;
    frame.header.lr = operation.scalars.lr;
    frame.header.wd = operation.scalars.wd;
    frame.header.rescale = operation.scalars.rescale;
    for (uint32_t i = 0; i < count; ++i) {
      const Slice slice = slice_at(*key.plan, i);
      frame.header.slice = i;
      if (operation.data != nullptr) {
        frame.header.payload_bytes = static_cast<uint32_t>(slice.elements * size_of(key.dtype));
        frame.payload = static_cast<const char*>(operation.data) + slice.offset * size_of(key.dtype);
      }
      frames.push_back({van_of_server_[static_cast<size_t>(server_of(*key.plan, i, num_servers_))], frame});
    }
  }

  [[noreturn]] void refuse(int van, const Header& header, const char* what) const {
    throw Error(ErrorKind::kProtocol, label() + ": " + transport_.label(van) + " sent a slice that is " + what +
                                          " (key " + std::to_string(header.key) + ", slice " +
                                          std::to_string(header.slice) + ", round " + std::to_string(header.round) +
                                          ").");
  }

  std::string waiting_for_any() const {
    for (int van : van_of_server_) {
      const std::string text = waiting_for(van);
      if (!text.empty()) return text;
    }
    return {};
  }

  const int rank_;
  const int num_servers_;
  std::vector<int> van_of_server_;
  std::vector<int> server_of_van_;  // -1: only watched

  mutable std::mutex mutex_;
  std::condition_variable idle_;
  std::deque<Key> keys_;  // a deque: keys stay where they are
  std::unordered_map<uint32_t, int> handle_of_wire_key_;
  size_t pending_ = 0;  // operations whose `done` has not returned
  std::optional<Error> failure_;
  std::atomic<uint64_t> rounds_{0};

  Transport transport_;  // last: its threads use all of the above
};

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
void Worker::start() { impl_->start(); }

int Worker::declare(std::string name, uint64_t elements, DType dtype) {
  return impl_->declare(std::move(name), elements, dtype);
}

void Worker::agree(int key, const KeyPlan& plan) { impl_->agree(key, plan); }

void Worker::init(int key, const void* value, void* landing, int32_t priority, Done done) {
  impl_->submit(key, {true, value, landing, priority, {}, std::move(done)});
}

void Worker::push(int key, const void* gradient, void* landing, int32_t priority, const RoundScalars& scalars,
                  Done done) {
  impl_->submit(key, {false, gradient, landing, priority, scalars, std::move(done)});
}

void Worker::fail(const Error& error) { impl_->transport().fail(error); }
std::optional<Error> Worker::error() const { return impl_->transport().error(); }
int Worker::event_fd() const { return impl_->transport().event_fd(); }

Counters Worker::counters() const {
  Counters counters;
  impl_->transport().add_to(counters);
  counters.rounds = impl_->rounds();
  return counters;
}

bool Worker::close(double timeout_s) { return impl_->close(timeout_s); }

void Worker::abandon_after_fork() {
  impl_->transport().abandon_after_fork();
  impl_.release();  // its threads and locks belong to the parent
}

}  // namespace p3
