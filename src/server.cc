#include "p3/server.h"

#include <pthread.h>

#include <algorithm>
#include <condition_variable>
#include <map>
#include <mutex>
#include <numeric>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "p3/transport.h"
#include "server_slice.h"

namespace p3 {
namespace {

constexpr double kGoodbyeTimeoutS = 1.0;  // for peers that still read; the job is over either way

struct Task {
  enum class Kind { kInit, kPush, kFinish } kind;
  ServerSlice* slice;
  int worker = -1;
  Header header;
  void* gradient = nullptr;
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

  void push(int32_t priority, const Task& task) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      queue_.push(priority, task);
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

  // After stop(): what was never run.
  std::vector<Task> leftover() {
    std::vector<Task> tasks;
    while (!queue_.empty()) tasks.push_back(queue_.pop());
    return tasks;
  }

 private:
  std::mutex mutex_;
  std::condition_variable wake_;
  PriorityQueue<Task> queue_;
  bool stopping_ = false;
  std::thread thread_;
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
        if (task.kind == Task::Kind::kPush) gradients_.give_back(task.gradient, task.slice->bytes);
    for (const auto& [buffer, bytes] : arriving_)
      if (buffer != nullptr) gradients_.give_back(buffer, bytes);
    keys_.clear();
  }

  void add_worker(int worker, std::unique_ptr<Stream> stream, std::string peer) {
    if (worker < 0 || worker >= num_workers_)
      throw Error(ErrorKind::kUsage, label() + ": there is no worker " + std::to_string(worker) + ".");
    van_of_worker_[static_cast<size_t>(worker)] = transport_.add_van(std::move(stream), std::move(peer));
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
        plan.slice_elements * size_of(plan.dtype) > std::numeric_limits<uint32_t>::max())
      throw Error(ErrorKind::kUsage, label() + ": the plan of key '" + name + "' makes no sense.");
    auto entry = std::make_unique<KeyOnServer>();
    entry->key = {plan, std::move(name), store};
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
    if (!optimizers_.emplace(store, std::move(optimizer)).second)
      throw Error(ErrorKind::kUsage, label() + ": store " + std::to_string(store) + " has an optimizer already.");
  }

  void stop() {
    transport_.finish(kGoodbyeTimeoutS);
    for (Summer& summer : summers_) summer.stop();
  }

  // --- Transport::Handler, on the receiver thread ------------------------------------------------------------------

  void* receive_into(int van, const Header& header) override {
    const int worker = worker_of_van_[static_cast<size_t>(van)];
    ServerSlice& slice = checked_slice(van, worker, header);
    if (header.kind == FrameKind::kInit) return slice.value();  // only rank 0's has a payload
    for (size_t other = 0; other < departed_.size(); ++other)
      if (departed_[other]) throw left_too_early(static_cast<int>(other), slice, header.round);
    auto& arriving = arriving_[static_cast<size_t>(van)];
    arriving = {gradients_.take(slice.bytes), slice.bytes};
    return arriving.first;
  }

  void received(int van, const Header& header, void* payload) override {
    const int worker = worker_of_van_[static_cast<size_t>(van)];
    ServerSlice& slice = *find(header);
    ++slice.next_round[static_cast<size_t>(worker)];
    arriving_[static_cast<size_t>(van)] = {nullptr, 0};
    const auto kind = header.kind == FrameKind::kInit ? Task::Kind::kInit : Task::Kind::kPush;
    queue(header.priority, {kind, &slice, worker, header, payload});
  }

  bool work() override {
    return sums_in_receiver_ && summers_.front().run_one([this](const Task& task) { run(task); });
  }

  void left(int van) override {
    const int worker = worker_of_van_[static_cast<size_t>(van)];
    if (worker < 0) return;
    departed_[static_cast<size_t>(worker)] = true;
    const ServerSlice* waiting = slice_that_waits_for(worker);
    if (waiting != nullptr) throw left_too_early(worker, *waiting, waiting->published + 1);
    if (std::find(departed_.begin(), departed_.end(), false) == departed_.end()) {
      finished_ = true;
      transport_.signal();
    }
  }

  std::string waiting_for(int van) const override {
    const int worker = worker_of_van_[static_cast<size_t>(van)];
    const ServerSlice* slice = worker < 0 ? nullptr : slice_that_waits_for(worker);
    if (slice == nullptr) return {};
    return " while round " + std::to_string(slice->published + 1) + " of key '" + slice->key.name +
           "' waited for its gradient";
  }

  void failed(const Error&) override {}

  // --- while sending -----------------------------------------------------------------------------------------------

  void sent(int, void* context) override {
    ServerSlice& slice = *static_cast<ServerSlice*>(context);
    if (slice.outstanding.fetch_sub(1) == 1) queue(slice.priority(), {Task::Kind::kFinish, &slice, -1, {}, nullptr});
  }

  Transport& transport() { return transport_; }
  const std::string& label() const { return transport_.options().label; }
  bool finished() const { return finished_; }

  Counters counters() const {
    Counters counters;
    transport_.add_to(counters);
    counters.rounds = rounds_;
    counters.buffer_bytes = gradients_.bytes_in_use();
    counters.peak_buffer_bytes = gradients_.peak_bytes();
    return counters;
  }

 private:
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
          answer_init(slice, task.worker);
          break;
        case Task::Kind::kPush: {
          const int contradicts = slice.add(task.worker, task.header, task.gradient);
          if (contradicts >= 0) throw scalars_differ(slice, task, contradicts);
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

  void answer_init(ServerSlice& slice, int worker) {
    slice.waiting_for_init.push_back(worker);
    if (worker == 0) slice.initialised = true;
    if (!slice.initialised) return;
    broadcast(slice, std::exchange(slice.waiting_for_init, {}));
  }

  void finish(ServerSlice& slice) {
    slice.finish(optimizer_of(slice));
    slice.outstanding = 2 * num_workers_;
    ++slice.published;
    ++rounds_;
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
    frame.header.round = slice.published;
    frame.header.priority = slice.priority();
    frame.header.payload_bytes = static_cast<uint32_t>(slice.bytes);
    frame.payload = slice.value();
    frame.context = &slice;
    return frame;
  }

  const Optimizer* optimizer_of(const ServerSlice& slice) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = optimizers_.find(slice.key.store);
    if (found == optimizers_.end()) return nullptr;
    if (!is_float(slice.key.plan.dtype))
      throw Error(ErrorKind::kUsage, label() + ": key '" + slice.key.name + "' is of type " +
                                         name_of(slice.key.plan.dtype) +
                                         "; an optimizer updates floating point keys only.");
    return found->second.get();
  }

  // --- checks ------------------------------------------------------------------------------------------------------

  ServerSlice* find(const Header& header) const {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = keys_.find(header.key);
    if (found == keys_.end() || header.slice >= found->second->slices.size()) return nullptr;
    return found->second->slices[header.slice].get();
  }

  ServerSlice& checked_slice(int van, int worker, const Header& header) const {
    const bool init = header.kind == FrameKind::kInit;
    ServerSlice* slice = find(header);
    const char* problem = nullptr;
    if (worker < 0 || header.kind == FrameKind::kValue) {
      problem = "unexpected";
    } else if (slice == nullptr) {
      problem = "of no key, or of another server's";
    } else if (static_cast<DType>(header.dtype) != slice->key.plan.dtype) {
      problem = "of another element type than agreed";
    } else if (header.payload_bytes != (init && worker != 0 ? 0 : slice->bytes)) {
      problem = "of another size than agreed";
    } else if (header.round != slice->next_round[static_cast<size_t>(worker)] || init != (header.round == 0) ||
               (!init && header.round != slice->published + 1)) {
      problem = "out of turn";
    }
    if (problem == nullptr) return *slice;
    throw Error(ErrorKind::kProtocol,
                label() + ": " + transport_.label(van) + " sent a slice that is " + problem + " (key " +
                    (slice == nullptr ? std::to_string(header.key) : "'" + slice->key.name + "'") + ", slice " +
                    std::to_string(header.slice) + ", round " + std::to_string(header.round) + ").");
  }

  // A slice that another worker pushed and this one did not: null if none.
  const ServerSlice* slice_that_waits_for(int worker) const {
    std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& [wire_key, key] : keys_)
      for (const auto& slice : key->slices)
        if (slice != nullptr && *std::max_element(slice->next_round.begin(), slice->next_round.end()) >
                                    std::max<uint64_t>(slice->next_round[static_cast<size_t>(worker)], 1))
          return slice.get();
    return nullptr;
  }

  Error left_too_early(int worker, const ServerSlice& slice, uint64_t round) const {
    return Error(ErrorKind::kDisagreement,
                 label() + ": " + transport_.label(van_of_worker_[static_cast<size_t>(worker)]) +
                     " ended, but others still push round " + std::to_string(round) + " of key '" + slice.key.name +
                     "'. All workers must take the same number of steps.");
  }

  Error scalars_differ(const ServerSlice& slice, const Task& task, int other) const {
    const auto described = [this](int worker, const RoundScalars& scalars) {
      return transport_.label(van_of_worker_[static_cast<size_t>(worker)]) + " (lr " + std::to_string(scalars.lr) +
             ", wd " + std::to_string(scalars.wd) + ", rescale_grad " + std::to_string(scalars.rescale) + ")";
    };
    return Error(ErrorKind::kDisagreement,
                 label() + ": " + described(other, slice.scalars()) + " and " +
                     described(task.worker, {task.header.lr, task.header.wd, task.header.rescale}) +
                     " disagree in round " + std::to_string(task.header.round) + " of key '" + slice.key.name +
                     "'. All workers must use the same learning rate, weight decay and batch size.");
  }

  void queue(int32_t priority, const Task& task) {
    summers_[static_cast<size_t>(task.slice->thread)].push(priority, task);
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
  mutable std::mutex mutex_;  // the two maps; their elements stay where they are
  std::unordered_map<uint32_t, std::unique_ptr<KeyOnServer>> keys_;
  std::map<int, std::unique_ptr<const Optimizer>> optimizers_;

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
