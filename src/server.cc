#include "p3/server.h"

#include <pthread.h>

#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <map>
#include <mutex>
#include <numeric>
#include <sstream>
#include <thread>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "p3/transport.h"
#include "server_slice.h"

namespace p3 {
namespace {

constexpr double kGoodbyeTimeoutS = 1.0;  // for peers that still read; the job is over either way

struct Task {
  enum class Kind { kInit, kPush, kFinish, kFetch, kStore } kind;
  ServerSlice* slice;
  int worker = -1;
  Header header{};
  void* payload = nullptr;  // from the pool of gradients; null: none
  uint32_t inits = 0;       // kInit: of this worker, this one included
};

// The server's own prioritised receive queue: what was received and not yet summed, most urgent slice first. Worked off
// by a thread of its own, or, one task at a time, by the receiver.
class Summer {
 public:
  template <typename Run>
  void start_thread(Run run) {
    thread_ = std::thread([this, run] {
      while (true) {
        std::unique_lock<std::mutex> lock(mutex_);
        wake_.wait(lock, [this] { return stopping_ || !queue_.empty(); });
        if (stopping_) return;
        const Task task = queue_.pop();
        lock.unlock();
        run(task);
      }
    });
    pthread_setname_np(thread_.native_handle(), "p3-summer");
  }

  // True if there is more.
  template <typename Run>
  bool run_one(Run run) {
    std::unique_lock<std::mutex> lock(mutex_);
    if (queue_.empty()) return false;
    const Task task = queue_.pop();
    const bool more = !queue_.empty();
    lock.unlock();
    run(task);
    return more;
  }

  void push(const Urgency& urgency, const Task& task) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      queue_.push(urgency, task);
      peak_ = std::max<uint64_t>(peak_, queue_.size());
    }
    if (thread_.joinable()) wake_.notify_one();
  }

  void stop() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      stopping_ = true;
    }
    wake_.notify_one();
    if (thread_.joinable()) thread_.join();
  }

  // How many tasks wait, and the most that ever did.
  std::pair<uint64_t, uint64_t> depth() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return {queue_.size(), peak_};
  }

  // After stop(): what was never run.
  std::vector<Task> leftover() {
    std::vector<Task> tasks;
    while (!queue_.empty()) tasks.push_back(queue_.pop());
    return tasks;
  }

 private:
  mutable std::mutex mutex_;
  std::condition_variable wake_;
  PriorityQueue<Task> queue_;
  uint64_t peak_ = 0;
  bool stopping_ = false;
  std::thread thread_;
};

// What the keys of one store have in common.
struct Store {
  std::unique_ptr<const Optimizer> optimizer;
  Compression compression;
  bool average = false;
  bool has_keys = false;
};

struct KeyOnServer {
  ServerKey key;
  std::vector<std::unique_ptr<ServerSlice>> slices;  // null where another server owns the slice
};

}  // namespace

class Server::Impl : public Transport::Handler {
 public:
  Impl(int rank, int num_servers, int num_workers, ServerOptions options)
      : rank_(rank),
        num_servers_(num_servers),
        num_workers_(num_workers),
        sum_order_(options.sum_order),
        sums_in_receiver_(options.threads == 0),
        van_of_worker_(static_cast<size_t>(std::max(num_workers, 0)), -1),
        all_workers_(van_of_worker_.size()),
        departed_(van_of_worker_.size(), false),
        summers_(static_cast<size_t>(std::max(options.threads, 1))),
        transport_(std::move(options.node), *this) {
    if (num_workers < 1 || rank < 0 || rank >= num_servers)
      throw Error(ErrorKind::kUsage, label() + ": server " + std::to_string(rank) + " of " +
                                         std::to_string(num_servers) + " with " + std::to_string(num_workers) +
                                         " workers makes no job.");
    std::iota(all_workers_.begin(), all_workers_.end(), 0);
  }

  ~Impl() override {
    stop();
    for (Summer& summer : summers_)
      for (const Task& task : summer.leftover())
        if (task.payload != nullptr) gradients_.give_back(task.payload, payload_bytes(*task.slice, task.header));
    for (const auto& [buffer, bytes] : arriving_)
      if (buffer != nullptr) gradients_.give_back(buffer, bytes);
    keys_.clear();
  }

  void add_worker(int worker, std::unique_ptr<Stream> stream, std::string peer) {
    if (worker < 0 || worker >= num_workers_)
      throw Error(ErrorKind::kUsage, label() + ": there is no worker " + std::to_string(worker) + ".");
    van_of_worker_[static_cast<size_t>(worker)] = transport_.add_van(std::move(stream), std::move(peer), worker);
    worker_of_van_.push_back(worker);
    arriving_.push_back({nullptr, 0});
  }

  void add_watch(std::unique_ptr<Stream> stream, std::string peer) {
    transport_.add_van(std::move(stream), std::move(peer));
    worker_of_van_.push_back(-1);
    arriving_.push_back({nullptr, 0});
  }

  void start() {
    for (size_t worker = 0; worker < van_of_worker_.size(); ++worker)
      if (van_of_worker_[worker] < 0)
        throw Error(ErrorKind::kUsage, label() + ": no connection to worker " + std::to_string(worker) + ".");
    if (!sums_in_receiver_)
      for (Summer& summer : summers_) summer.start_thread([this](const Task& task) { run(task); });
    transport_.start();
  }

  void define(const KeyPlan& plan, std::string name, int store) {
    if (plan.slice_elements == 0 || !is_known(plan.dtype) ||
        plan.slice_elements * size_of(sum_type(plan.dtype)) > std::numeric_limits<uint32_t>::max())
      throw Error(ErrorKind::kUsage, label() + ": the plan of key '" + name + "' makes no sense.");
    auto entry = std::make_unique<KeyOnServer>();
    entry->key = {plan, std::move(name), store, {}, false};
    {
      std::lock_guard<std::mutex> lock(mutex_);
      Store& settings = stores_[store];
      settings.has_keys = true;
      entry->key.compression = {settings.compression.of(plan.dtype), settings.compression.threshold};
      entry->key.average = settings.average;
    }
    if (entry->key.average && !is_float(plan.dtype))
      throw Error(ErrorKind::kUsage, label() + ": key '" + entry->key.name + "' is of type " + name_of(plan.dtype) +
                                         "; only floating point keys can be averaged.");
    try {
      make_slices(*entry);
    } catch (const std::bad_alloc&) {
      throw Error(ErrorKind::kUsage, label() + ": no memory for this server's part of key '" + entry->key.name +
                                         "', which has " + std::to_string(plan.elements) + " elements of type " +
                                         name_of(plan.dtype) + ". Use more servers.");
    }
    std::lock_guard<std::mutex> lock(mutex_);
    if (!keys_.emplace(plan.wire_key, std::move(entry)).second)
      throw Error(ErrorKind::kUsage, label() + ": key " + std::to_string(plan.wire_key) + " is defined already.");
  }

  void set_optimizer(int store, const OptimizerSpec& spec) {
    auto optimizer = Optimizer::make(spec);
    std::lock_guard<std::mutex> lock(mutex_);
    Store& settings = stores_[store];
    if (settings.optimizer != nullptr)
      throw Error(ErrorKind::kUsage, label() + ": store " + std::to_string(store) + " has an optimizer already.");
    settings.optimizer = std::move(optimizer);
  }

  void set_compression(int store, const Compression& compression) {
    check(compression);
    std::lock_guard<std::mutex> lock(mutex_);
    without_keys(store).compression = compression;
  }

  void set_average(int store, bool average) {
    std::lock_guard<std::mutex> lock(mutex_);
    without_keys(store).average = average;
  }

  void stop() {
    transport_.finish(kGoodbyeTimeoutS);
    for (Summer& summer : summers_) summer.stop();
    if (recorder() != nullptr) recorder()->close();
  }

  // --- Transport::Handler, on the receiver thread ------------------------------------------------------------------

  void* receive_into(int van, const Header& header) override {
    const int worker = worker_of_van_[static_cast<size_t>(van)];
    ServerSlice& slice = checked_slice(van, worker, header);
    if (header.kind == FrameKind::kPush)
      for (size_t other = 0; other < departed_.size(); ++other)
        if (departed_[other]) throw left_too_early(static_cast<int>(other), push_of(slice, header.round));
    if (header.kind == FrameKind::kInit && departed_[0] && slice.inits[static_cast<size_t>(worker)] >= slice.inits[0])
      throw left_too_early(0, init_of(slice));
    if (static_cast<Encoding>(header.encoding) == Encoding::kAbsent) return nullptr;
    if (header.kind == FrameKind::kInit && !slice.has_value) {
      slice.has_value = true;
      return slice.value();
    }
    auto& arriving = arriving_[static_cast<size_t>(van)];
    const size_t bytes = payload_bytes(slice, header);
    arriving = {gradients_.take(bytes), bytes};
    return arriving.first;
  }

  void received(int van, const Header& header, void*) override {
    const int worker = worker_of_van_[static_cast<size_t>(van)];
    ServerSlice& slice = *find(header);
    uint64_t& next_round = slice.next_round[static_cast<size_t>(worker)];
    if (header.kind == FrameKind::kPush || next_round == 0) ++next_round;
    uint32_t& inits = slice.inits[static_cast<size_t>(worker)];
    if (header.kind == FrameKind::kInit) ++inits;
    void* payload = std::exchange(arriving_[static_cast<size_t>(van)], {}).first;  // null: none, or the first value
    queue(urgency_of(header), {task_kind(header.kind), &slice, worker, header, payload, inits});
  }

  bool work() override {
    return sums_in_receiver_ && summers_.front().run_one([this](const Task& task) { run(task); });
  }

  void left(int van) override {
    const int worker = worker_of_van_[static_cast<size_t>(van)];
    if (worker < 0) return;
    departed_[static_cast<size_t>(worker)] = true;
    const std::string waiting = what_waits_for(worker);
    if (!waiting.empty()) throw left_too_early(worker, waiting);
    if (std::find(departed_.begin(), departed_.end(), false) == departed_.end()) {
      finished_ = true;
      transport_.signal();
    }
  }

  std::string waiting_for(int van) const override {
    const int worker = worker_of_van_[static_cast<size_t>(van)];
    const std::string waiting = worker < 0 ? "" : what_waits_for(worker);
    return waiting.empty() ? "" : " while others " + waiting;
  }

  void failed(const Error&) override {}

  // --- while sending -----------------------------------------------------------------------------------------------

  void sent(const Frame& frame) override {
    ServerSlice& slice = *static_cast<ServerSlice*>(frame.context);
    if (slice.outstanding.fetch_sub(1) == 1)
      queue({frame.header.round + 1, slice.priority()}, {Task::Kind::kFinish, &slice});
  }

  Transport& transport() { return transport_; }
  const std::string& label() const { return transport_.options().label; }
  bool finished() const { return finished_; }

  Counters counters() const {
    Counters counters;
    counters.traffic = transport_.traffic();
    counters.rounds = rounds_;
    for (const Summer& summer : summers_) {
      const auto [now, peak] = summer.depth();
      counters.received_slices += now;
      counters.peak_received_slices += peak;
    }
    counters.buffer_bytes = gradients_.bytes_in_use();
    counters.peak_buffer_bytes = gradients_.peak_bytes();
    return counters;
  }

 private:
  Recorder* recorder() const { return transport_.options().trace.get(); }

  void make_slices(KeyOnServer& entry) {
    entry.slices.resize(slice_count(entry.key.plan));
    for (uint32_t i = 0; i < entry.slices.size(); ++i) {
      if (server_of(entry.key.plan, i, num_servers_) != rank_) continue;
      const int thread = static_cast<int>(next_thread_++ % summers_.size());
      entry.slices[i] =
          std::make_unique<ServerSlice>(entry.key, i, num_workers_, sum_order_, thread, values_, gradients_);
    }
  }

  // --- where slices are summed -------------------------------------------------------------------------------------

  void run(const Task& task) {
    try {
      ServerSlice& slice = *task.slice;
      switch (task.kind) {
        case Task::Kind::kInit:
          answer_init(slice, task);
          break;
        case Task::Kind::kFetch:
        case Task::Kind::kStore:
          answer_about_state(slice, task);
          break;
        case Task::Kind::kPush: {
          const int contradicts = slice.add(task.worker, task.header, task.payload);
          if (contradicts >= 0) throw scalars_differ(slice, task, contradicts);
          trace(recorder(), TraceKind::kSummed, task.header, task.worker);
          if (slice.outstanding.fetch_sub(1) == 1) finish(slice);
          break;
        }
        case Task::Kind::kFinish:
          finish(slice);
          break;
      }
    } catch (const Error& error) {
      transport_.fail(error);
    } catch (const std::exception& error) {
      transport_.fail(Error(ErrorKind::kStopped,
                            label() + ": " + error.what() + " while working on key '" + task.slice->key.name + "'."));
    }
  }

  void answer_init(ServerSlice& slice, const Task& task) {
    if (task.payload != nullptr) {
      slice.replace_value(task.payload);
      gradients_.give_back(task.payload, slice.bytes);
    }
    const std::vector<int> workers = slice.init(task.worker, task.inits);
    slice.outstanding += static_cast<int>(workers.size());  // before it can be zero: who waits here has not pushed yet
    broadcast(slice, workers);
  }

  void answer_about_state(ServerSlice& slice, const Task& task) {
    const Optimizer& optimizer = *optimizer_of(slice);  // checked with the header
    Frame frame;
    frame.header = task.header;
    frame.header.kind = FrameKind::kPart;
    if (task.kind == Task::Kind::kFetch) {
      frame.header.encoding = static_cast<uint8_t>(Encoding::kPlain);
      frame.header.payload_bytes = static_cast<uint32_t>(slice.state_bytes());
      frame.payload = slice.state(optimizer, task.header.part);
      frame.context = &slice;
      ++slice.outstanding;  // before it can be zero, as above
    } else {
      frame.header.encoding = static_cast<uint8_t>(Encoding::kAbsent);
      frame.header.payload_bytes = 0;
      slice.replace_state(optimizer, task.header.part, task.payload);
      gradients_.give_back(task.payload, slice.state_bytes());
    }
    transport_.send({{van_of_worker_[static_cast<size_t>(task.worker)], frame}}, Transport::Write::kHere);
  }

  void finish(ServerSlice& slice) {
    slice.finish(optimizer_of(slice));
    slice.outstanding = 2 * num_workers_;  // pushes and sends
    ++slice.published;
    ++rounds_;
    if (recorder() != nullptr) trace(recorder(), TraceKind::kUpdated, value_frame(slice).header);
    broadcast(slice, all_workers_);
  }

  void broadcast(ServerSlice& slice, const std::vector<int>& workers) {
    const Frame frame = value_frame(slice);
    std::vector<Transport::Outgoing> frames;
    frames.reserve(workers.size());
    for (int worker : workers) frames.push_back({van_of_worker_[static_cast<size_t>(worker)], frame});
    transport_.send(frames, Transport::Write::kHere);
  }

  static Frame value_frame(ServerSlice& slice) {
    Frame frame;
    frame.header.kind = FrameKind::kValue;
    frame.header.dtype = static_cast<uint8_t>(slice.key.plan.dtype);
    frame.header.key = slice.key.plan.wire_key;
    frame.header.slice = slice.index;
    frame.header.encoding = static_cast<uint8_t>(slice.published_encoding());
    frame.header.round = slice.published;
    frame.header.priority = slice.priority();
    frame.header.payload_bytes =
        static_cast<uint32_t>(encoded_bytes(slice.published_encoding(), slice.key.plan.dtype, slice.elements));
    frame.payload = slice.published_payload();
    frame.context = &slice;
    return frame;
  }

  const Optimizer* optimizer_of(const ServerSlice& slice) const {
    std::lock_guard<std::mutex> lock(mutex_);
    const Optimizer* optimizer = stores_.at(slice.key.store).optimizer.get();
    if (optimizer == nullptr) return nullptr;
    if (!is_float(slice.key.plan.dtype))
      throw Error(ErrorKind::kUsage, label() + ": key '" + slice.key.name + "' is of type " +
                                         name_of(slice.key.plan.dtype) +
                                         "; an optimizer updates floating point keys only.");
    return optimizer;
  }

  // --- checks ------------------------------------------------------------------------------------------------------

  ServerSlice* find(const Header& header) const {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = keys_.find(header.key);
    if (found == keys_.end() || header.slice >= found->second->slices.size()) return nullptr;
    return found->second->slices[header.slice].get();
  }

  ServerSlice& checked_slice(int van, int worker, const Header& header) const {
    ServerSlice* slice = find(header);
    const char* problem = nullptr;
    if (worker < 0 || header.kind == FrameKind::kValue || header.kind == FrameKind::kPart ||
        (header.kind == FrameKind::kStore && worker != 0)) {
      problem = "unexpected";
    } else if (slice == nullptr) {
      problem = "of no key, or of another server's";
    } else if (static_cast<DType>(header.dtype) != element_type(*slice, header.kind)) {
      problem = "of another element type than agreed";
    } else if (is_about_state(header.kind) && !has_state(*slice, header.part)) {
      problem = "of a state that its key's optimizer does not have";
    } else if (!may_come(static_cast<Encoding>(header.encoding), *slice, header.kind, worker)) {
      problem = "in another encoding than agreed";
    } else if (header.payload_bytes != payload_bytes(*slice, header)) {
      problem = "of another size than agreed";
    } else if (!in_turn(*slice, header, worker)) {
      problem = "out of turn";
    }
    if (problem == nullptr) return *slice;
    throw Error(ErrorKind::kProtocol,
                label() + ": " + transport_.label(van) + " sent a slice that is " + problem + " (key " +
                    (slice == nullptr ? std::to_string(header.key) : "'" + slice->key.name + "'") + ", slice " +
                    std::to_string(header.slice) + ", round " + std::to_string(header.round) + ").");
  }

  static Task::Kind task_kind(FrameKind kind) {
    switch (kind) {
      case FrameKind::kInit:
        return Task::Kind::kInit;
      case FrameKind::kFetch:
        return Task::Kind::kFetch;
      case FrameKind::kStore:
        return Task::Kind::kStore;
      default:
        return Task::Kind::kPush;
    }
  }

  static DType element_type(const ServerSlice& slice, FrameKind kind) {
    return is_about_state(kind) ? sum_type(slice.key.plan.dtype) : slice.key.plan.dtype;
  }

  static bool is_about_state(FrameKind kind) { return kind == FrameKind::kFetch || kind == FrameKind::kStore; }

  bool has_state(const ServerSlice& slice, uint8_t part) const {
    const Optimizer* optimizer = optimizer_of(slice);
    if (optimizer == nullptr) return false;
    if (part == kMaster) return optimizer->needs_master(slice.key.plan.dtype);
    return part >= 1 && part <= optimizer->state_count();
  }

  // For a header that was checked so far, or is about to be.
  static size_t payload_bytes(const ServerSlice& slice, const Header& header) {
    return encoded_bytes(static_cast<Encoding>(header.encoding), element_type(slice, header.kind), slice.elements);
  }

  static bool may_come(Encoding encoding, const ServerSlice& slice, FrameKind kind, int worker) {
    switch (kind) {
      case FrameKind::kInit:
        return encoding == (worker == 0 ? Encoding::kPlain : Encoding::kAbsent);
      case FrameKind::kPush:
        return encoding == Encoding::kAbsent || encoding == slice.key.compression.encoding;
      case FrameKind::kFetch:
        return encoding == Encoding::kAbsent;
      default:
        return encoding == Encoding::kPlain;
    }
  }

  // A push is for the round after the last one. All else is about the value or state that the last one left.
  static bool in_turn(const ServerSlice& slice, const Header& header, int worker) {
    const uint64_t next = slice.next_round[static_cast<size_t>(worker)];
    if (next == 0) return header.kind == FrameKind::kInit && header.round == 0;
    if (next != slice.published + 1) return false;
    return header.round == (header.kind == FrameKind::kPush ? next : next - 1);
  }

  static std::string push_of(const ServerSlice& slice, uint64_t round) {
    return "push round " + std::to_string(round) + " of key '" + slice.key.name + "'";
  }
  static std::string init_of(const ServerSlice& slice) { return "wait for its value of key '" + slice.key.name + "'"; }

  // What others do that needs this worker too, and it has not done: empty if nothing.
  std::string what_waits_for(int worker) const {
    const auto rank = static_cast<size_t>(worker);
    std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& [wire_key, key] : keys_) {
      for (const auto& slice : key->slices) {
        if (slice == nullptr) continue;
        const auto& [rounds, inits] = std::tie(slice->next_round, slice->inits);
        if (*std::max_element(rounds.begin(), rounds.end()) > std::max<uint64_t>(rounds[rank], 1))
          return push_of(*slice, slice->published + 1);
        if (worker == 0 && *std::max_element(inits.begin(), inits.end()) > inits[0]) return init_of(*slice);
      }
    }
    return {};
  }

  Error left_too_early(int worker, const std::string& waiting) const {
    return Error(ErrorKind::kDisagreement,
                 label() + ": " + worker_label(worker) + " ended, but others still " + waiting +
                     ". All workers must take the same number of steps, or call join() after their last one.");
  }

  Error scalars_differ(const ServerSlice& slice, const Task& task, int other) const {
    const auto described = [this](int worker, const RoundScalars& scalars) {
      std::ostringstream text;
      text << worker_label(worker) << " (lr " << scalars.lr << ", wd " << scalars.wd << ", rescale_grad "
           << scalars.rescale;
      if (scalars.updates != 0) text << ", update " << scalars.updates;
      if (scalars.schedule != 1) text << ", schedule " << scalars.schedule;
      text << ")";
      return text.str();
    };
    return Error(ErrorKind::kDisagreement,
                 label() + ": " + described(other, slice.scalars()) + " and " +
                     described(task.worker, task.header.scalars) + " disagree in round " +
                     std::to_string(task.header.round) + " of key '" + slice.key.name +
                     "'. All workers must use the same learning rate, weight decay and batch size.");
  }

  const std::string& worker_label(int worker) const {
    return transport_.label(van_of_worker_[static_cast<size_t>(worker)]);
  }

  // With the lock held.
  Store& without_keys(int store) {
    Store& settings = stores_[store];
    if (settings.has_keys)
      throw Error(ErrorKind::kUsage, label() + ": store " + std::to_string(store) +
                                         " has keys already; set its compression and reduction before its first init.");
    return settings;
  }

  void queue(const Urgency& urgency, const Task& task) {
    summers_[static_cast<size_t>(task.slice->thread)].push(urgency, task);
    if (sums_in_receiver_) transport_.ask_for_work();
  }

  const int rank_, num_servers_, num_workers_;
  const SumOrder sum_order_;
  const bool sums_in_receiver_;
  std::vector<int> van_of_worker_;
  std::vector<int> worker_of_van_;                  // -1: only watched
  std::vector<int> all_workers_;                    // 0, 1, 2, ...
  std::vector<bool> departed_;                      // receiver thread
  std::vector<std::pair<void*, size_t>> arriving_;  // receiver thread: by van, the gradient being received
  size_t next_thread_ = 0;

  BufferPool values_, gradients_;
  mutable std::mutex mutex_;  // the two maps and the stores; their elements stay where they are
  std::unordered_map<uint32_t, std::unique_ptr<KeyOnServer>> keys_;
  std::map<int, Store> stores_;

  std::atomic<uint64_t> rounds_{0};
  std::atomic<bool> finished_{false};
  std::vector<Summer> summers_;
  Transport transport_;  // last: its threads use all of the above
};

Server::Server(int rank, int num_servers, int num_workers, ServerOptions options)
    : impl_(std::make_unique<Impl>(rank, num_servers, num_workers, std::move(options))) {}
Server::~Server() = default;

void Server::add_worker(int worker, std::unique_ptr<Stream> stream, std::string label) {
  impl_->add_worker(worker, std::move(stream), std::move(label));
}
void Server::add_watch(std::unique_ptr<Stream> stream, std::string label) {
  impl_->add_watch(std::move(stream), std::move(label));
}
void Server::start() { impl_->start(); }
void Server::define(const KeyPlan& plan, std::string name, int store) { impl_->define(plan, std::move(name), store); }
void Server::set_optimizer(int store, const OptimizerSpec& spec) { impl_->set_optimizer(store, spec); }
void Server::set_compression(int store, const Compression& compression) { impl_->set_compression(store, compression); }
void Server::set_average(int store, bool average) { impl_->set_average(store, average); }
void Server::fail(const Error& error) { impl_->transport().fail(error); }
std::optional<Error> Server::error() const { return impl_->transport().error(); }
int Server::event_fd() const { return impl_->transport().event_fd(); }
bool Server::finished() const { return impl_->finished(); }
Counters Server::counters() const { return impl_->counters(); }
void Server::stop() { impl_->stop(); }

void Server::abandon_after_fork() {
  impl_->transport().abandon_after_fork();
  impl_.release();  // its threads and locks belong to the parent
}

}  // namespace p3
