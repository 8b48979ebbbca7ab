#include "p3/worker.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include "p3/transport.h"

namespace p3 {
namespace {

using Clock = std::chrono::steady_clock;

// Something asked for about one key, and not yet complete.
struct Operation {
  enum class Kind { kInit, kPush, kSkip, kFetch, kStore } kind;
  Worker::Done done;
  const void* data = nullptr;  // what goes out
  void* landing = nullptr;     // where the answer comes in
  int32_t priority = 0;
  RoundScalars scalars{};
  uint8_t part = 0;
  Clock::time_point asked_at = Clock::now();

  bool is_round() const { return kind == Kind::kPush || kind == Kind::kSkip; }
  bool is_about_a_part() const { return kind == Kind::kFetch || kind == Kind::kStore; }
  DType type(DType of_key) const { return is_about_a_part() ? sum_type(of_key) : of_key; }
};

struct Key final : Encoder {
  std::string name;
  uint64_t elements = 0;
  DType dtype = DType::kFloat32;
  Compression compression;
  std::vector<float> residual;  // what compression has left out so far
  std::optional<KeyPlan> plan;
  uint64_t round = 0;                // the last one begun
  std::deque<Operation> operations;  // the front one is under way if `active`
  bool active = false;
  bool updated = false;  // a slice of the front one has come with a value
  uint32_t slices_to_land = 0;
  std::vector<bool> landed;
  KeyCounters counters;

  // On the thread that sends; the slices of one round are apart, and rounds follow each other.
  void encode(const Header& header, const void* source, void* payload) override {
    const Slice slice = slice_at(*plan, header.slice);
    float* left_out = residual.empty() ? nullptr : residual.data() + slice.offset;
    p3::encode(compression, static_cast<const float*>(source), left_out, payload, slice.elements);
  }
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
    van_of_server_[static_cast<size_t>(server)] = transport_.add_van(std::move(stream), std::move(peer), server);
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

  int declare(std::string name, uint64_t elements, DType dtype, const Compression& compression) {
    check(compression);
    const Encoding encoding = compression.of(dtype);
    std::vector<float> residual(encoding == Encoding::kTwoBit ? elements : 0);
    std::lock_guard<std::mutex> lock(mutex_);
    Key& key = keys_.emplace_back();
    key.name = std::move(name);
    key.elements = elements;
    key.dtype = dtype;
    key.compression = {encoding, compression.threshold};
    key.residual = std::move(residual);
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
    if (operation.kind == Operation::Kind::kInit && rank_ != 0)
      operation.data = nullptr;  // rank 0's value is the job's
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
      operation.done(&*failure, false);
    else
      transport_.send(frames);
  }

  void mark_stall(int handle, int64_t begin_ns, int64_t end_ns) {
    std::lock_guard<std::mutex> lock(mutex_);
    const Key& key = find(handle);
    if (recorder() == nullptr || !key.plan) return;
    Header header;
    header.kind = FrameKind::kValue;
    header.key = key.plan->wire_key;
    header.round = key.round;
    trace_at(recorder(), Clock::time_point(std::chrono::nanoseconds(begin_ns)), TraceKind::kStallBegin, header);
    trace_at(recorder(), Clock::time_point(std::chrono::nanoseconds(end_ns)), TraceKind::kStallEnd, header);
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
    if (recorder() != nullptr) recorder()->close();
    return orderly;
  }

  // --- Transport::Handler ------------------------------------------------------------------------------------------

  void* receive_into(int van, const Header& header) override {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto known = handle_of_wire_key_.find(header.key);
    if (known == handle_of_wire_key_.end()) refuse(van, header, "unexpected");
    Key& key = keys_[static_cast<size_t>(known->second)];
    if (!key.active || header.round != key.round) refuse(van, header, "out of turn");
    const Operation& operation = key.operations.front();
    if (header.kind != (operation.is_about_a_part() ? FrameKind::kPart : FrameKind::kValue) ||
        header.part != operation.part)
      refuse(van, header, "unexpected");
    if (header.slice >= slice_count(*key.plan) || key.landed[header.slice] ||
        van_of_server_[static_cast<size_t>(server_of(*key.plan, header.slice, num_servers_))] != van)
      refuse(van, header, "misplaced");
    const Slice slice = slice_at(*key.plan, header.slice);
    const DType type = operation.type(key.dtype);
    const auto encoding = static_cast<Encoding>(header.encoding);
    if (!may_come(encoding, operation, key)) refuse(van, header, "in another encoding than agreed");
    if (static_cast<DType>(header.dtype) != type ||
        header.payload_bytes != encoded_bytes(encoding, type, slice.elements))
      refuse(van, header, "wrongly sized");
    if (encoding == Encoding::kAbsent) return nullptr;
    char* landing = static_cast<char*>(operation.landing) + slice.offset * size_of(type);
    return encoding == Encoding::kFloat16 ? landing + header.payload_bytes
                                          : landing;  // the second half: widen_in_place
  }

  void received(int, const Header& header, void* payload) override {
    const auto encoding = static_cast<Encoding>(header.encoding);
    if (encoding == Encoding::kFloat16)
      widen_in_place(reinterpret_cast<float*>(static_cast<char*>(payload) - header.payload_bytes),
                     header.payload_bytes / sizeof(uint16_t));
    std::vector<Transport::Outgoing> frames;
    Done done;
    bool updated;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      Key& key = keys_[static_cast<size_t>(handle_of_wire_key_.at(header.key))];
      key.landed[header.slice] = true;
      key.updated |= encoding != Encoding::kAbsent;
      if (--key.slices_to_land > 0) return;
      complete_front(key);
      updated = key.updated;
      done = std::move(key.operations.front().done);
      key.operations.pop_front();
      key.active = false;
      begin_next(key, frames);
    }
    transport_.send(frames);
    done(nullptr, updated);
    {
      // Only now: close() must not return before the last `done` has.
      std::lock_guard<std::mutex> lock(mutex_);
      --pending_;
    }
    idle_.notify_all();
  }

  void sent(const Frame&) override {}

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
    for (const Done& done : pending) done(&*failure_, false);
    {
      std::lock_guard<std::mutex> lock(mutex_);
      pending_ -= pending.size();
    }
    idle_.notify_all();
  }

  Transport& transport() { return transport_; }
  const std::string& label() const { return transport_.options().label; }

  Counters counters() const {
    Counters counters;
    counters.traffic = transport_.traffic();
    counters.rounds = rounds_;
    return counters;
  }

  Traffic traffic_with(int server) const {
    if (server < 0 || server >= num_servers_)
      throw Error(ErrorKind::kUsage, label() + ": there is no server " + std::to_string(server) + ".");
    return transport_.traffic_with(van_of_server_[static_cast<size_t>(server)]);
  }

  KeyCounters key_counters(int handle) {
    std::lock_guard<std::mutex> lock(mutex_);
    return find(handle).counters;
  }

 private:
  Recorder* recorder() const { return transport_.options().trace.get(); }

  Key& find(int handle) {
    if (handle < 0 || static_cast<size_t>(handle) >= keys_.size())
      throw Error(ErrorKind::kUsage, label() + ": there is no key with handle " + std::to_string(handle) + ".");
    return keys_[static_cast<size_t>(handle)];
  }

  static bool may_come(Encoding encoding, const Operation& operation, const Key& key) {
    switch (encoding) {
      case Encoding::kPlain:
        return operation.kind != Operation::Kind::kStore;
      case Encoding::kFloat16:
        return operation.is_round() && key.compression.encoding == Encoding::kFloat16;
      case Encoding::kAbsent:
        return operation.kind == Operation::Kind::kStore || operation.kind == Operation::Kind::kSkip;
      default:
        return false;
    }
  }

  void complete_front(Key& key) {
    const Operation& operation = key.operations.front();
    ++rounds_;
    if (operation.kind != Operation::Kind::kPush) return;
    const double waited_s = std::chrono::duration<double>(Clock::now() - operation.asked_at).count();
    ++key.counters.rounds;
    key.counters.waited_s += waited_s;
    key.counters.longest_wait_s = std::max(key.counters.longest_wait_s, waited_s);
  }

  // Cuts the key's next operation into frames, unless one is under way or the plan is not known yet.
  void begin_next(Key& key, std::vector<Transport::Outgoing>& frames) {
    if (key.active || !key.plan || key.operations.empty() || failure_) return;
    const Operation& operation = key.operations.front();
    const uint32_t count = slice_count(*key.plan);
    key.active = true;
    key.updated = false;
    if (operation.is_round()) ++key.round;
    key.slices_to_land = count;
    key.landed.assign(count, false);
    frames.reserve(count);

    const DType type = operation.type(key.dtype);
    Encoding encoding = operation.data == nullptr ? Encoding::kAbsent : Encoding::kPlain;
    if (operation.kind == Operation::Kind::kPush) encoding = key.compression.encoding;

    Frame frame;
    frame.header.kind = frame_kind(operation.kind);
    frame.header.dtype = static_cast<uint8_t>(type);
    frame.header.encoding = static_cast<uint8_t>(encoding);
    frame.header.part = operation.part;
    frame.header.key = key.plan->wire_key;
    frame.header.round = key.round;
    frame.header.priority = operation.priority;
    frame.header.scalars = operation.scalars;
    if (operation.is_round()) trace_at(recorder(), operation.asked_at, TraceKind::kReady, frame.header);
    for (uint32_t i = 0; i < count; ++i) {
      const Slice slice = slice_at(*key.plan, i);
      frame.header.slice = i;
      frame.header.payload_bytes = static_cast<uint32_t>(encoded_bytes(encoding, type, slice.elements));
      if (operation.data != nullptr)
        frame.payload = static_cast<const char*>(operation.data) + slice.offset * size_of(type);
      if (encoding != Encoding::kPlain && encoding != Encoding::kAbsent) frame.encoder = &key;
      frames.push_back({van_of_server_[static_cast<size_t>(server_of(*key.plan, i, num_servers_))], frame});
    }
  }

  static FrameKind frame_kind(Operation::Kind kind) {
    switch (kind) {
      case Operation::Kind::kInit:
        return FrameKind::kInit;
      case Operation::Kind::kFetch:
        return FrameKind::kFetch;
      case Operation::Kind::kStore:
        return FrameKind::kStore;
      default:
        return FrameKind::kPush;
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

int Worker::declare(std::string name, uint64_t elements, DType dtype, const Compression& compression) {
  return impl_->declare(std::move(name), elements, dtype, compression);
}

void Worker::agree(int key, const KeyPlan& plan) { impl_->agree(key, plan); }

void Worker::init(int key, const void* value, void* landing, int32_t priority, Done done) {
  impl_->submit(key, {Operation::Kind::kInit, std::move(done), value, landing, priority});
}

void Worker::push(int key, const void* gradient, void* landing, int32_t priority, const RoundScalars& scalars,
                  Done done) {
  impl_->submit(key, {Operation::Kind::kPush, std::move(done), gradient, landing, priority, scalars});
}

void Worker::skip(int key, void* landing, int32_t priority, Done done) {
  impl_->submit(key, {Operation::Kind::kSkip, std::move(done), nullptr, landing, priority});
}

void Worker::fetch(int key, uint8_t part, void* landing, Done done) {
  impl_->submit(key, {Operation::Kind::kFetch, std::move(done), nullptr, landing, 0, {}, part});
}

void Worker::store(int key, uint8_t part, const void* content, Done done) {
  impl_->submit(key, {Operation::Kind::kStore, std::move(done), content, nullptr, 0, {}, part});
}

void Worker::mark_stall(int key, int64_t begin_ns, int64_t end_ns) { impl_->mark_stall(key, begin_ns, end_ns); }

void Worker::fail(const Error& error) { impl_->transport().fail(error); }
std::optional<Error> Worker::error() const { return impl_->transport().error(); }
int Worker::event_fd() const { return impl_->transport().event_fd(); }

Counters Worker::counters() const { return impl_->counters(); }
Traffic Worker::traffic_with(int server) const { return impl_->traffic_with(server); }
KeyCounters Worker::key_counters(int key) const { return impl_->key_counters(key); }

bool Worker::close(double timeout_s) { return impl_->close(timeout_s); }

void Worker::abandon_after_fork() {
  impl_->transport().abandon_after_fork();
  impl_.release();  // its threads and locks belong to the parent
}

}  // namespace p3
