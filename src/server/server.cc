#include "p3/server.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <mutex>
#include <numeric>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "wire/disagreement.h"
#include "p3/lateness.h"
#include "transport/transport.h"
#include "server/partition.h"
#include "server/slice.h"
#include "server/receive_queue.h"

namespace p3 {
namespace {

constexpr double kGoodbyeTimeoutS = 1.0;  // for peers that still read; the job is over either way

// What the keys of one store have in common.
struct Store {
  std::unique_ptr<const Optimizer> optimizer;
  Compression compression;
  bool average = false;
  bool has_keys = false;
};

struct KeyOnServer {
  ServerKey key;
  std::vector<std::unique_ptr<ServerShard>> shards;  // slices or partitions; null where another server owns it
};

}  // namespace

class Server::Impl : public Transport::Handler {
 public:
  Impl(int rank, int num_servers, int num_workers, ServerOptions options)
      : rank_(rank),
        num_servers_(num_servers),
        num_workers_(num_workers),
        sum_order_(options.sum_order),
        machines_(options.machines.value_or(Machines(std::max(num_workers, 0)))),
        aggregates_(options.local_aggregation && machines_.count() < machines_.num_workers()),
        outlives_workers_(options.outlives_workers),
        sums_in_receiver_(options.threads == 0),
        van_of_worker_(static_cast<size_t>(std::max(num_workers, 0)), -1),
        all_workers_(van_of_worker_.size()),
        departed_(van_of_worker_.size(), false),
        incarnation_(van_of_worker_.size(), 1),
        lost_(van_of_worker_.size(), false),
        skips_(van_of_worker_.size(), false),
        lateness_(van_of_worker_.size()),
        summers_(static_cast<size_t>(std::max(options.threads, 1))),
        transport_(std::move(options.node), *this) {
    if (num_workers < 1 || rank < 0 || rank >= num_servers)
      throw Error(ErrorKind::kUsage, label() + ": server " + std::to_string(rank) + " of " +
                                         std::to_string(num_servers) + " with " + std::to_string(num_workers) +
                                         " workers makes no job.");
    if (machines_.num_workers() != num_workers)
      throw Error(ErrorKind::kUsage, label() + ": the machines of " + std::to_string(machines_.num_workers()) +
                                         " workers are known, but there are " + std::to_string(num_workers) + ".");
    if (outlives_workers_ && options.local_aggregation)
      throw Error(ErrorKind::kUsage, label() +
                                         ": the leader of a machine cannot be replaced, so local aggregation must be "
                                         "off where lost workers are.");
    std::iota(all_workers_.begin(), all_workers_.end(), 0);
  }

  ~Impl() override {
    stop();
    for (Summer& summer : summers_)
      for (const Task& task : summer.leftover())
        if (task.payload != nullptr) gradients_.give_back(task.payload, buffer_bytes(*task.shard, task.header));
    for (const auto& [buffer, bytes] : arriving_)
      if (buffer != nullptr) gradients_.give_back(buffer, bytes);
    keys_.clear();
    still_lent_.clear();
  }

  void add_worker(int worker, std::unique_ptr<Stream> stream, std::string peer) {
    if (worker < 0 || worker >= num_workers_)
      throw Error(ErrorKind::kUsage, label() + ": there is no worker " + std::to_string(worker) + ".");
    van_of_worker_[static_cast<size_t>(worker)] =
        transport_.add_van(std::move(stream), std::move(peer), worker, /*is_bounded=*/true);
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
    if (!makes_sense(plan))
      throw Error(ErrorKind::kUsage, label() + ": the plan of key '" + name + "' makes no sense.");
    auto entry = std::make_unique<KeyOnServer>();
    entry->key.machines = &machines_;
    entry->key.plan = plan;
    entry->key.name = std::move(name);
    entry->key.store = store;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      Store& settings = stores_[store];
      settings.has_keys = true;
      entry->key.compression = {settings.compression.of(plan.dtype), settings.compression.threshold};
      entry->key.average = settings.average;
      entry->key.aggregated = aggregates_ && (plan.has_rows() || entry->key.compression.encoding == Encoding::kPlain);
    }
    if (entry->key.average && !is_float(plan.dtype))
      throw Error(ErrorKind::kUsage, label() + ": key '" + entry->key.name + "' is of type " + name_of(plan.dtype) +
                                         "; only floating point keys can be averaged.");
    add_key(std::move(entry), 1);
  }

  void define_successor(const KeyPlan& plan, uint32_t predecessor) {
    auto entry = std::make_unique<KeyOnServer>();
    int parts = 1;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      const auto found = keys_.find(predecessor);
      if (found == keys_.end() || !makes_sense(plan) || !plan.has_rows() ||
          plan.elements != found->second->key.plan.elements ||
          plan.row_elements != found->second->key.plan.row_elements || plan.dtype != found->second->key.plan.dtype)
        throw Error(ErrorKind::kUsage,
                    label() + ": key " + std::to_string(predecessor) + " can have no such successor.");
      entry->key = found->second->key;
      if (const Optimizer* optimizer = stores_.at(entry->key.store).optimizer.get())
        parts += optimizer->state_count() + optimizer->needs_master(plan.dtype);
    }
    entry->key.plan = plan;
    entry->key.is_successor = true;
    add_key(std::move(entry), parts);
  }

  // Buffers that its partitions have lent may still be in the hands of a sender, though all have come to their receivers.
  void drop(uint32_t wire_key) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = keys_.find(wire_key);
    if (found == keys_.end() || !found->second->key.plan.has_rows()) return;
    for (const auto& shard : found->second->shards)
      if (shard != nullptr) still_lent_.push_back(static_cast<ServerPartition&>(*shard).hand_over_lent());
    keys_.erase(found);
    still_lent_.erase(
        std::remove_if(still_lent_.begin(), still_lent_.end(), [](LentBuffers& lent) { return lent.is_idle(); }),
        still_lent_.end());
  }

  void set_optimizer(int store, const OptimizerSpec& spec) {
    auto optimizer = Optimizer::make(spec);
    std::lock_guard<std::mutex> lock(mutex_);
    Store& settings = stores_[store];
    if (settings.optimizer != nullptr)
      throw Error(ErrorKind::kUsage, label() + ": store " + std::to_string(store) + " has an optimizer already.");
    settings.optimizer = std::move(optimizer);
  }

  // --- replacing a worker ------------------------------------------------------------------------------------------

  LostWorker lose_worker(int worker) {
    const auto rank = static_cast<size_t>(worker);
    check_rank(worker);
    if (!outlives_workers_) throw Error(ErrorKind::kUsage, label() + " was not told to outlive workers.");
    transport_.run_in_receiver([&] {
      transport_.drop_van(van_of_worker_[rank]);
      give_back_arriving(van_of_worker_[rank]);
      lost_[rank] = true;
      forget_what_to_fill(rank);
      if (sums_in_receiver_) lose_shards(worker, 0);
    });
    if (!sums_in_receiver_)
      for (size_t thread = 0; thread < summers_.size(); ++thread)
        summers_[thread].call([=] { lose_shards(worker, static_cast<int>(thread)); });
    LostWorker lost;
    transport_.run_in_receiver([&] {
      lost.problem = problem_of_losing(worker);
      std::lock_guard<std::mutex> lock(mutex_);
      for (const auto& [wire_key, key] : keys_) {
        uint64_t next = 1;
        for (const auto& shard : key->shards)
          if (shard != nullptr) next = std::max(next, shard->next_round[rank]);
        lost.pushed.push_back({wire_key, next - 1});
      }
    });
    return lost;
  }

  void fill(int worker, const std::vector<LostWorker::Pushed>& rounds, bool skips) {
    const auto rank = static_cast<size_t>(worker);
    check_rank(worker);
    transport_.run_in_receiver([&] {
      if (!lost_[rank])
        throw Error(ErrorKind::kUsage, label() + ": worker " + std::to_string(worker) + " is not lost.");
      skips_[rank] = skips;
      for (const LostWorker::Pushed& one : rounds)
        for (ServerShard* shard : shards_of(one.wire_key)) {
          if (one.round == 0) continue;
          shard->fill_to.resize(all_workers_.size());
          shard->fill_to[rank] = std::max(shard->fill_to[rank], one.round);
          shard->next_round[rank] = std::max<uint64_t>(shard->next_round[rank], 1);  // without its init
          fill_next(*shard, worker);
        }
    });
  }

  void replace_worker(int worker, std::unique_ptr<Stream> stream) {
    const auto rank = static_cast<size_t>(worker);
    check_rank(worker);
    transport_.run_in_receiver([&] {
      if (!lost_[rank])
        throw Error(ErrorKind::kUsage, label() + ": worker " + std::to_string(worker) + " is not lost.");
      lost_[rank] = false;
      ++incarnation_[rank];
      std::lock_guard<std::mutex> lock(mutex_);
      for (const auto& [wire_key, key] : keys_)
        for (const auto& shard : key->shards) {
          if (shard == nullptr || shard->next_round[rank] == 0) continue;
          shard->catches_up[rank] = true;
          shard->inits[rank] = shard->inits[0];
        }
      transport_.replace_van(van_of_worker_[rank], std::move(stream));
    });
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
    ServerShard& shard = checked_shard(van, worker, header);
    if (shard.key.is_successor && shard.published == 0) shard.published = header.round;
    if (is_push(header.kind))
      for (size_t other = 0; other < departed_.size(); ++other)
        if (departed_[other]) throw too_early(static_cast<int>(other), push_of(shard.key.name, header.round));
    if (header.kind == FrameKind::kInit)
      for (int needed : {0, shard.key.leader_of(worker)})
        if (departed_[static_cast<size_t>(needed)] && !shard.catches_up[static_cast<size_t>(worker)] &&
            shard.inits[static_cast<size_t>(worker)] >= shard.inits[static_cast<size_t>(needed)])
          throw too_early(needed, init_of(shard));
    if (static_cast<Encoding>(header.encoding) == Encoding::kAbsent) return nullptr;
    if (header.kind == FrameKind::kInit) {
      auto& slice = static_cast<ServerSlice&>(shard);  // a partition's is absent
      if (!std::exchange(slice.has_value, true)) return slice.value();
    }
    auto& arriving = arriving_[static_cast<size_t>(van)];
    const size_t bytes = buffer_bytes(shard, header);
    arriving = {gradients_.take(bytes), bytes};
    return arriving.first;
  }

  [[noreturn]] void refuse(int van, const Header& header, const char* what) const override {
    throw refused(van, what, header, find(header));
  }

  void received(int van, const Header& header, void*) override {
    const int worker = worker_of_van_[static_cast<size_t>(van)];
    ServerShard& shard = *find(header);
    void* payload = std::exchange(arriving_[static_cast<size_t>(van)], {}).first;  // null: none, or the first value
    uint32_t& inits = shard.inits[static_cast<size_t>(worker)];
    const uint32_t incarnation = incarnation_[static_cast<size_t>(worker)];
    if (shard.catches_up[static_cast<size_t>(worker)]) {
      shard.catches_up[static_cast<size_t>(worker)] = false;
      Header wish = header;
      wish.round = shard.next_round[static_cast<size_t>(worker)] - 1;
      if (!shard.fill_to.empty()) wish.round = std::max(wish.round, shard.fill_to[static_cast<size_t>(worker)]);
      return queue(urgency_of(wish), {Task::Kind::kWish, &shard, worker, wish, nullptr, 0, incarnation});
    }
    if (is_push(header.kind) && ends_round(header, payload)) {
      note_lateness(worker, header, shard.note_push(worker, header.of_machine != 0, std::chrono::steady_clock::now()));
    } else if (header.kind == FrameKind::kInit) {
      uint64_t& next_round = shard.next_round[static_cast<size_t>(worker)];
      if (next_round == 0) next_round = shard.published + 1;
      ++inits;
    }
    Task task{task_kind(header.kind), &shard, worker, header, payload, inits, incarnation};
    task.held_bytes = sizeof task + shard.answer_bytes(header) + (payload == nullptr ? 0 : buffer_bytes(shard, header));
    transport_.hold(van, task.held_bytes);
    queue(urgency_of(header), task);
    if (is_push(header.kind) && !shard.fill_to.empty())
      for (int other : all_workers_) fill_next(shard, other);
  }

  bool lost(int van, const Error&) override {
    const int worker = worker_of_van_[static_cast<size_t>(van)];
    if (!outlives_workers_ || worker < 0) return false;
    give_back_arriving(van);
    return true;
  }

  bool work() override {
    return sums_in_receiver_ && summers_.front().run_one([this](const Task& task) { run(task); });
  }

  void left(int van) override {
    const int worker = worker_of_van_[static_cast<size_t>(van)];
    if (worker < 0) return;
    departed_[static_cast<size_t>(worker)] = true;
    const std::string waiting = what_waits_for(worker);
    if (!waiting.empty()) throw too_early(worker, waiting);
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

  uint64_t last_round() const override { return last_round_; }

  void look(std::chrono::steady_clock::time_point now) override {
    LateWorkers late;
    std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& [wire_key, key] : keys_)
      for (const auto& shard : key->shards)
        if (shard != nullptr && shard->waited_s(now) > 0) note_late(*shard, shard->waited_s(now), late);
    late_ = late.take();
  }

  std::vector<Late> late() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return late_;
  }

  std::vector<double> mean_lateness_s() const {
    std::lock_guard<std::mutex> lock(lateness_mutex_);
    std::vector<double> means;
    for (const Lateness& lateness : lateness_) means.push_back(lateness.mean_s());
    return means;
  }

  void failed(const Error&) override {}

  // --- while sending -----------------------------------------------------------------------------------------------

  void sent(const Frame& frame) override {
    auto* lender = static_cast<Lender*>(frame.context);
    if (!lender->taken_back()) return;
    auto* slice = static_cast<ServerSlice*>(lender);  // buffers of rows have nothing to go on with
    queue({frame.header.round + 1, slice->priority()}, {Task::Kind::kFinish, slice});
  }

  Transport& transport() { return transport_; }
  const std::string& label() const { return transport_.options().label; }
  bool finished() const { return finished_; }
  std::vector<CapturedArray> take_captured(uint64_t snapshot) { return captured_.take(snapshot); }

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

  // `parts`: see ServerPartition.
  void add_key(std::unique_ptr<KeyOnServer> entry, int parts) {
    const KeyPlan plan = entry->key.plan;
    try {
      make_shards(*entry, parts);
    } catch (const std::bad_alloc&) {
      throw Error(ErrorKind::kUsage, label() + ": no memory for this server's part of key '" + entry->key.name +
                                         "', which has " + std::to_string(plan.elements) + " elements of type " +
                                         name_of(plan.dtype) + ". Use more servers.");
    }
    std::lock_guard<std::mutex> lock(mutex_);
    if (!keys_.emplace(plan.wire_key, std::move(entry)).second)
      throw Error(ErrorKind::kUsage, label() + ": key " + std::to_string(plan.wire_key) + " is defined already.");
  }

  void make_shards(KeyOnServer& entry, int parts) {
    const ServerKey& key = entry.key;
    entry.shards.resize(slice_count(key.plan));
    for (uint32_t i = 0; i < entry.shards.size(); ++i) {
      if (server_of(key.plan, i, num_servers_) != rank_) continue;
      const int thread = static_cast<int>(next_thread_++ % summers_.size());
      if (key.plan.has_rows())
        entry.shards[i] = std::make_unique<ServerPartition>(key, i, sum_order_, thread, values_, gradients_, parts,
                                                            outlives_workers_);
      else
        entry.shards[i] = std::make_unique<ServerSlice>(key, i, sum_order_, thread, values_, gradients_);
    }
  }

  // --- where shards are worked on ----------------------------------------------------------------------------------

  void run(const Task& task) {
    if (task.kind == Task::Kind::kCall) return (*task.call)();
    try {
      if (is_void(task))
        give_back(task);
      else
        work_on(task);
    } catch (const Error& error) {
      transport_.fail(error);
    } catch (const std::exception& error) {
      transport_.fail(Error(ErrorKind::kStopped,
                            label() + ": " + error.what() + " while working on key '" + task.shard->key.name + "'."));
    }
    if (task.held_bytes > 0) transport_.let_go(van_of_worker_[static_cast<size_t>(task.worker)], task.held_bytes);
  }

  void work_on(const Task& task) {
    switch (task.kind) {
      case Task::Kind::kInit:
        if (task.shard->waits_for_init(task.worker))
          throw refused(van_of_worker_[static_cast<size_t>(task.worker)], "out of turn", task.header, task.shard);
        if (task.shard->key.plan.has_rows())
          answer_wishes(task.partition(), task.partition().init(task.worker, task.inits, wants_answer(task)));
        else
          answer_init(task.slice(), task);
        break;
      case Task::Kind::kFetch:
      case Task::Kind::kStore:
        answer_about_state(task.slice(), task);
        break;
      case Task::Kind::kPush:
        add(task.slice(), task);
        break;
      case Task::Kind::kFinish:
        finish(task.slice());
        break;
      case Task::Kind::kPushRows:
        add_rows(task.partition(), task);
        break;
      case Task::Kind::kFetchRows:
        answer_fetch(task.partition(), task);
        break;
      case Task::Kind::kStoreRows:
        answer_store(task.partition(), task);
        break;
      case Task::Kind::kCapture:
        answer_capture(*task.shard, task);
        break;
      case Task::Kind::kWish:
        task.shard->presence.wish(task.worker, task.header.round);
        answer_who_catches_up(*task.shard);
        break;
      case Task::Kind::kCall:
        break;
    }
  }

  void add(ServerSlice& slice, const Task& task) {
    const int contradicts = slice.add(task.worker, task.header, task.payload, task.is_filled);
    if (contradicts >= 0) throw differ(slice, task, contradicts);
    trace(recorder(), TraceKind::kSummed, task.header, task.worker);
    if (slice.outstanding.fetch_sub(1) == 1) finish(slice);
  }

  void answer_init(ServerSlice& slice, const Task& task) {
    if (task.payload != nullptr) {
      slice.replace_value(task.payload);
      gradients_.give_back(task.payload, slice.bytes);
    }
    const std::vector<int> workers = slice.init(task.worker, task.inits, wants_answer(task));
    slice.outstanding += static_cast<int>(workers.size());  // before it can be zero: who waits here has not pushed yet
    broadcast(slice, workers, slice.value_encoding(), false, /*as_asked=*/true);
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
      frame.copied_bytes = frame.header.payload_bytes;
      frame.context = static_cast<Lender*>(&slice);
      ++slice.outstanding;  // before it can be zero, as above
    } else {
      frame.header.encoding = static_cast<uint8_t>(Encoding::kAbsent);
      frame.header.payload_bytes = 0;
      slice.replace_state(optimizer, task.header.part, task.payload);
      gradients_.give_back(task.payload, slice.state_bytes());
      if (!wants_answer(task)) return;
    }
    transport_.send({{van_of_worker_[static_cast<size_t>(task.worker)], frame}}, Transport::Write::kHere);
  }

  void finish(ServerSlice& slice) {
    slice.finish(optimizer_of(slice));
    const std::vector<int> workers = receivers(slice);
    slice.outstanding = slice.key.pushes() + static_cast<int>(workers.size());  // sends
    note_round(++slice.published);
    if (recorder() != nullptr)
      trace(recorder(), TraceKind::kUpdated, value_frame(slice, slice.round_encoding()).header);
    broadcast(slice, workers, slice.round_encoding(), slice.key.aggregated);
    answer_who_catches_up(slice);
  }

  // Of those who wait for this round, or an earlier one, to go on from there.
  void answer_who_catches_up(ServerShard& shard) {
    const std::vector<int> workers = shard.presence.take_answerable(shard.published);
    if (workers.empty()) return;
    if (shard.key.plan.has_rows()) return answer_wishes(static_cast<ServerPartition&>(shard), workers);
    auto& slice = static_cast<ServerSlice&>(shard);
    slice.outstanding += static_cast<int>(workers.size());  // before it can be zero: they have not pushed yet
    send_to(workers, value_frame(slice, slice.value_encoding()));
  }

  std::vector<int> receivers(const ServerShard& shard) const {
    std::vector<int> workers;
    workers.reserve(all_workers_.size());
    for (int worker : all_workers_)
      if (shard.gets_rounds(worker)) workers.push_back(worker);
    return workers;
  }

  // --- what a lost worker has sent ---------------------------------------------------------------------------------

  // Part of a push that never became whole, or a wish that nobody waits for any more.
  static bool is_void(const Task& task) {
    if (task.worker < 0) return false;
    const Presence& presence = task.shard->presence;
    if (is_push(task.header.kind)) return presence.is_torn(task.worker, task.incarnation, task.header.round);
    const bool asks_only = task.kind == Task::Kind::kFetch || task.kind == Task::Kind::kFetchRows ||
                           task.kind == Task::Kind::kCapture || task.kind == Task::Kind::kWish;
    return asks_only && presence.is_of_the_lost(task.worker, task.incarnation);
  }

  static bool wants_answer(const Task& task) {
    return !task.shard->presence.is_of_the_lost(task.worker, task.incarnation);
  }

  void give_back(const Task& task) {
    if (task.payload != nullptr) gradients_.give_back(task.payload, buffer_bytes(*task.shard, task.header));
  }

  void give_back_arriving(int van) {
    const auto [buffer, bytes] = std::exchange(arriving_[static_cast<size_t>(van)], {});
    if (buffer != nullptr) gradients_.give_back(buffer, bytes);
  }

  // Receiver thread. Completes the round that this worker pushes next, if it is to be completed for it, and begins.
  void fill_next(ServerShard& shard, int worker) {
    const auto rank = static_cast<size_t>(worker);
    const uint64_t round = shard.next_round[rank];
    if (round > shard.fill_to[rank] || round != shard.published + 1) return;
    Header header;
    header.kind = shard.key.plan.has_rows() ? FrameKind::kPushRows : FrameKind::kPush;
    header.encoding = static_cast<uint8_t>(Encoding::kAbsent);
    header.dtype = static_cast<uint8_t>(shard.key.plan.dtype);
    header.key = shard.key.plan.wire_key;
    header.slice = shard.index;
    header.round = round;
    shard.note_push(worker, false, std::chrono::steady_clock::now());
    Task task{task_kind(header.kind), &shard, worker, header};
    task.incarnation = incarnation_[rank] + lost_[rank];  // the successor's
    task.is_filled = !skips_[rank];
    queue(urgency_of(header), task);
  }

  void forget_what_to_fill(size_t rank) {
    std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& [wire_key, key] : keys_)
      for (const auto& shard : key->shards)
        if (shard != nullptr && !shard->fill_to.empty()) shard->fill_to[rank] = 0;
  }

  // Those of one summing thread, in that thread.
  void lose_shards(int worker, int thread) {
    const auto rank = static_cast<size_t>(worker);
    std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& [wire_key, key] : keys_)
      for (const auto& shard : key->shards) {
        if (shard == nullptr || shard->thread != thread) continue;
        const uint64_t next = std::max<uint64_t>(shard->next_round[rank], 1);
        shard->lose(worker, incarnation_[rank], next - 1);
      }
  }

  std::vector<ServerShard*> shards_of(uint32_t wire_key) const {
    std::vector<ServerShard*> shards;
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = keys_.find(wire_key);
    if (found == keys_.end())
      throw Error(ErrorKind::kUsage, label() + ": there is no key " + std::to_string(wire_key) + ".");
    for (const auto& shard : found->second->shards)
      if (shard != nullptr) shards.push_back(shard.get());
    return shards;
  }

  // Receiver thread. What only the lost process could have told must be known already.
  std::string problem_of_losing(int worker) const {
    const auto rank = static_cast<size_t>(worker);
    if (departed_[rank]) return "it had said goodbye";
    std::lock_guard<std::mutex> lock(mutex_);
    if (keys_.empty()) return "no key has been agreed yet";
    for (const auto& [wire_key, key] : keys_)
      for (const auto& shard : key->shards) {
        if (shard == nullptr) continue;
        if (shard->next_round[0] == 0) return "worker 0 has not given key '" + key->key.name + "' its first value yet";
        if (rank == 0 && *std::max_element(shard->inits.begin(), shard->inits.end()) > shard->inits[0])
          return "others wait for its new value of key '" + key->key.name + "'";
      }
    return {};
  }

  void check_rank(int worker) const {
    if (worker < 0 || worker >= num_workers_)
      throw Error(ErrorKind::kUsage, label() + ": there is no worker " + std::to_string(worker) + ".");
  }

  // --- the same of keys of rows ------------------------------------------------------------------------------------

  void add_rows(ServerPartition& partition, const Task& task) {
    PooledBuffer payload(gradients_, task.payload, buffer_bytes(partition, task.header));
    const ServerPartition::Outcome outcome =
        partition.push(task.worker, task.header, std::move(payload), task.is_filled);
    if (outcome.problem != nullptr)
      throw refused(van_of_worker_[static_cast<size_t>(task.worker)], outcome.problem, task.header, &partition);
    if (outcome.contradicts >= 0) throw differ(partition, task, outcome.contradicts);
    if (partition.next_plan() != 0 && !can_move(partition, partition.next_plan()))
      throw refused(van_of_worker_[static_cast<size_t>(task.worker)], "telling of a plan that the key does not have",
                    task.header, &partition);
    trace(recorder(), TraceKind::kSummed, task.header, task.worker);
    if (!outcome.complete) return;
    note_round(++partition.published);
    const ServerPartition::Published published = partition.finish(optimizer_of(partition));
    const bool to_machines = partition.key.aggregated;
    std::vector<Transport::Outgoing> frames;
    for (int worker : receivers(partition))
      for (Frame frame : partition.wants_rows(worker) ? published.rows : published.nothing) {
        frame.header.of_machine = to_machines && !machines_.is_alone(worker);
        frames.push_back({van_of_worker_[static_cast<size_t>(worker)], frame});
      }
    if (!frames.empty()) trace(recorder(), TraceKind::kUpdated, frames.front().frame.header);
    transport_.send(frames, Transport::Write::kHere);
    answer_who_catches_up(partition);
  }

  void answer_fetch(ServerPartition& partition, const Task& task) {
    Frame answer;
    const char* problem = partition.fetch(task.header, task.payload, optimizer_of(partition), answer);
    gradients_.give_back(task.payload, buffer_bytes(partition, task.header));
    if (problem != nullptr)
      throw refused(van_of_worker_[static_cast<size_t>(task.worker)], problem, task.header, &partition);
    transport_.send({{van_of_worker_[static_cast<size_t>(task.worker)], answer}}, Transport::Write::kHere);
  }

  void answer_store(ServerPartition& partition, const Task& task) {
    bool last = false;
    const char* problem = partition.store(task.header, task.payload, optimizer_of(partition), last);
    gradients_.give_back(task.payload, buffer_bytes(partition, task.header));
    if (problem != nullptr)
      throw refused(van_of_worker_[static_cast<size_t>(task.worker)], problem, task.header, &partition);
    if (!last) return;
    if (wants_answer(task)) send_without_payload(task.header, FrameKind::kPart, {task.worker});
    answer_wishes(partition, partition.newly_answerable());
  }

  void answer_capture(const ServerShard& shard, const Task& task) {
    const char* problem = nullptr;
    try {
      std::vector<CapturedArray> copies;
      problem = shard.capture(copies);
      if (problem == nullptr) captured_.add(std::move(copies), snapshot_of(task.header));
    } catch (const std::bad_alloc&) {
      throw Error(ErrorKind::kStopped, label() + ": no memory for a snapshot's copy of key '" + shard.key.name +
                                           "'. Use more servers, or go without snapshots.");
    }
    if (problem != nullptr)
      throw refused(van_of_worker_[static_cast<size_t>(task.worker)], problem, task.header, &shard);
    send_without_payload(task.header, FrameKind::kPart, {task.worker});
  }

  void answer_wishes(ServerPartition& partition, const std::vector<int>& workers) {
    Header header;
    header.dtype = static_cast<uint8_t>(partition.key.plan.dtype);
    header.key = partition.key.plan.wire_key;
    header.slice = partition.index;
    header.round = partition.published;
    header.priority = partition.priority();
    send_without_payload(header, FrameKind::kValue, workers);
  }

  void send_without_payload(Header header, FrameKind kind, const std::vector<int>& workers) {
    header.kind = kind;
    header.encoding = static_cast<uint8_t>(Encoding::kAbsent);
    header.payload_bytes = 0;
    send_to(workers, {header});
  }

  void send_to(const std::vector<int>& workers, const Frame& frame) {
    std::vector<Transport::Outgoing> frames;
    frames.reserve(workers.size());
    for (int worker : workers) frames.push_back({van_of_worker_[static_cast<size_t>(worker)], frame});
    transport_.send(frames, Transport::Write::kHere);
  }

  // `to_machines`: those who share a machine with others get the value for all of them.
  // `as_asked`: what is asked for can be asked for again, so it counts as kept for who asks; a round cannot.
  void broadcast(ServerSlice& slice, const std::vector<int>& workers, Encoding encoding, bool to_machines,
                 bool as_asked = false) {
    Frame frame = value_frame(slice, encoding);
    if (as_asked) frame.copied_bytes = frame.header.payload_bytes;
    std::vector<Transport::Outgoing> frames;
    frames.reserve(workers.size());
    for (int worker : workers) {
      frame.header.of_machine = to_machines && !machines_.is_alone(worker);
      frames.push_back({van_of_worker_[static_cast<size_t>(worker)], frame});
    }
    transport_.send(frames, Transport::Write::kHere);
  }

  static Frame value_frame(ServerSlice& slice, Encoding encoding) {
    Frame frame;
    frame.header.kind = FrameKind::kValue;
    frame.header.dtype = static_cast<uint8_t>(slice.key.plan.dtype);
    frame.header.key = slice.key.plan.wire_key;
    frame.header.slice = slice.index;
    frame.header.encoding = static_cast<uint8_t>(encoding);
    frame.header.round = slice.published;
    frame.header.priority = slice.priority();
    frame.header.payload_bytes = static_cast<uint32_t>(encoded_bytes(encoding, slice.key.plan.dtype, slice.elements));
    frame.payload = slice.value_payload();  // of kAbsent none is sent
    frame.context = static_cast<Lender*>(&slice);
    return frame;
  }

  const Optimizer* optimizer_of(const ServerShard& shard) const {
    std::lock_guard<std::mutex> lock(mutex_);
    const Optimizer* optimizer = stores_.at(shard.key.store).optimizer.get();
    if (optimizer == nullptr) return nullptr;
    if (!is_float(shard.key.plan.dtype))
      throw Error(ErrorKind::kUsage, label() + ": key '" + shard.key.name + "' is of type " +
                                         name_of(shard.key.plan.dtype) +
                                         "; an optimizer updates floating point keys only.");
    return optimizer;
  }

  // --- checks ------------------------------------------------------------------------------------------------------

  ServerShard* find(const Header& header) const {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = keys_.find(header.key);
    if (found == keys_.end() || header.slice >= found->second->shards.size()) return nullptr;
    return found->second->shards[header.slice].get();
  }

  ServerShard& checked_shard(int van, int worker, const Header& header) const {
    ServerShard* shard = find(header);
    if (worker < 0) throw refused(van, "unexpected", header, shard);
    if (shard == nullptr) throw refused(van, "of no key, or of another server's", header, shard);
    const Optimizer* optimizer = about_state(header) ? optimizer_of(*shard) : nullptr;
    if (const char* problem = shard->problem_with(header, worker, optimizer))
      throw refused(van, problem, header, shard);
    return *shard;
  }

  bool can_move(const ServerPartition& partition, uint32_t plan) const {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = keys_.find(plan);
    if (found == keys_.end() || plan == partition.key.plan.wire_key) return false;
    const ServerKey& to = found->second->key;
    return to.is_successor && to.store == partition.key.store && to.name == partition.key.name;
  }

  // That of the frame's sender.
  Error refused(int van, const char* problem, const Header& header, const ServerShard* shard) const {
    return slice_refused(label(), transport_.label(van), header, problem,
                         shard == nullptr ? std::to_string(header.key) : "'" + shard->key.name + "'");
  }

  static Task::Kind task_kind(FrameKind kind) {
    switch (kind) {
      case FrameKind::kInit:
        return Task::Kind::kInit;
      case FrameKind::kFetch:
        return Task::Kind::kFetch;
      case FrameKind::kStore:
        return Task::Kind::kStore;
      case FrameKind::kPushRows:
        return Task::Kind::kPushRows;
      case FrameKind::kFetchRows:
        return Task::Kind::kFetchRows;
      case FrameKind::kStoreRows:
        return Task::Kind::kStoreRows;
      case FrameKind::kCapture:
        return Task::Kind::kCapture;
      default:
        return Task::Kind::kPush;
    }
  }

  static bool about_state(const Header& header) {
    return header.kind == FrameKind::kFetch || header.kind == FrameKind::kStore ||
           header.kind == FrameKind::kFetchRows || header.kind == FrameKind::kStoreRows;
  }

  // Of the buffer in which a frame's payload is received.
  static size_t buffer_bytes(const ServerShard& shard, const Header& header) {
    return shard.key.plan.has_rows() ? BufferPool::roomy(header.payload_bytes) : header.payload_bytes;
  }

  static std::string init_of(const ServerShard& shard) { return "wait for its value of key '" + shard.key.name + "'"; }

  // What others do that needs this worker too, and it has not done: empty if nothing.
  std::string what_waits_for(int worker) const {
    const auto rank = static_cast<size_t>(worker);
    std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& [wire_key, key] : keys_) {
      for (const auto& shard : key->shards) {
        if (shard == nullptr) continue;
        const auto& [rounds, inits] = std::tie(shard->next_round, shard->inits);
        if (*std::max_element(rounds.begin(), rounds.end()) > std::max<uint64_t>(rounds[rank], 1))
          return push_of(shard->key.name, shard->published + 1);
        for (int other = 0; other < num_workers_; ++other)
          if ((worker == 0 || shard->key.leader_of(other) == worker) && inits[static_cast<size_t>(other)] > inits[rank])
            return init_of(*shard);
      }
    }
    return {};
  }

  Error too_early(int worker, const std::string& waiting) const {
    return left_too_early(label(), worker_label(worker), waiting);
  }

  Error differ(const ServerShard& shard, const Task& task, int other) const {
    return scalars_differ(label(), worker_label(other), shard.scalars(), worker_label(task.worker), task.header.scalars,
                          task.header.round, shard.key.name);
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

  // Of a shard; where it is summed.
  void note_round(uint64_t round) {
    ++rounds_;
    uint64_t last = last_round_;
    while (last < round && !last_round_.compare_exchange_weak(last, round)) {
    }
  }

  void note_lateness(int worker, const Header& push, double late_s) {
    std::lock_guard<std::mutex> lock(lateness_mutex_);
    if (push.of_machine == 0) return lateness_[static_cast<size_t>(worker)].note(push.round, late_s);
    for (int each : machines_.workers(machines_.of(worker)))
      lateness_[static_cast<size_t>(each)].note(push.round, late_s);
  }

  // For those of a machine who push as one, their leader stands.
  void note_late(const ServerShard& shard, double waited_s, LateWorkers& late) const {
    const auto& rounds = shard.next_round;
    const uint64_t next = *std::max_element(rounds.begin(), rounds.end());
    const auto waiting = std::count(rounds.begin(), rounds.end(), next);
    for (int worker : all_workers_)
      if (rounds[static_cast<size_t>(worker)] < next &&
          (!shard.key.aggregated || shard.key.leader_of(worker) == worker))
        late.note({worker, shard.key.aggregated && !machines_.is_alone(worker), shard.key.name, next - 1, waited_s,
                   static_cast<int>(waiting)});
  }

  void queue(const Urgency& urgency, const Task& task) {
    summers_[static_cast<size_t>(task.shard->thread)].push(urgency, task);
    if (sums_in_receiver_) transport_.ask_for_work();
  }

  const int rank_, num_servers_, num_workers_;
  const SumOrder sum_order_;
  const Machines machines_;
  const bool aggregates_;  // some leader pushes for others
  const bool outlives_workers_;
  const bool sums_in_receiver_;
  std::vector<int> van_of_worker_;
  std::vector<int> worker_of_van_;                  // -1: only watched
  std::vector<int> all_workers_;                    // 0, 1, 2, ...
  std::vector<bool> departed_;                      // receiver thread
  std::vector<uint32_t> incarnation_;               // receiver thread: processes that each rank has had
  std::vector<bool> lost_;                          // receiver thread: the last one is gone
  std::vector<bool> skips_;                         // receiver thread: as fill() was told last
  std::vector<std::pair<void*, size_t>> arriving_;  // receiver thread: by van, the gradient being received
  size_t next_thread_ = 0;

  BufferPool values_{/*reuses=*/false};  // and states
  BufferPool gradients_;
  mutable std::mutex mutex_;  // the two maps and the stores; their elements stay where they are
  std::unordered_map<uint32_t, std::unique_ptr<KeyOnServer>> keys_;
  std::vector<LentBuffers> still_lent_;  // by keys that were dropped
  std::map<int, Store> stores_;

  std::vector<Late> late_;  // with the lock of the keys
  mutable std::mutex lateness_mutex_;
  std::vector<Lateness> lateness_;  // by worker

  Captured captured_;
  std::atomic<uint64_t> rounds_{0};
  std::atomic<uint64_t> last_round_{0};
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
void Server::define_successor(const KeyPlan& plan, uint32_t predecessor) { impl_->define_successor(plan, predecessor); }
void Server::drop(uint32_t wire_key) { impl_->drop(wire_key); }
void Server::set_optimizer(int store, const OptimizerSpec& spec) { impl_->set_optimizer(store, spec); }
void Server::set_compression(int store, const Compression& compression) { impl_->set_compression(store, compression); }
void Server::set_average(int store, bool average) { impl_->set_average(store, average); }
LostWorker Server::lose_worker(int worker) { return impl_->lose_worker(worker); }
void Server::fill(int worker, const std::vector<LostWorker::Pushed>& rounds, bool skips) {
  impl_->fill(worker, rounds, skips);
}
void Server::replace_worker(int worker, std::unique_ptr<Stream> stream) {
  impl_->replace_worker(worker, std::move(stream));
}
void Server::fail(const Error& error) { impl_->transport().fail(error); }
std::optional<Error> Server::error() const { return impl_->transport().error(); }
int Server::event_fd() const { return impl_->transport().event_fd(); }
bool Server::finished() const { return impl_->finished(); }
std::vector<CapturedArray> Server::take_captured(uint64_t snapshot) { return impl_->take_captured(snapshot); }
Counters Server::counters() const { return impl_->counters(); }
std::vector<Late> Server::late() const { return impl_->late(); }
std::vector<double> Server::mean_lateness_s() const { return impl_->mean_lateness_s(); }
void Server::stop() { impl_->stop(); }

void Server::abandon_after_fork() {
  impl_->transport().abandon_after_fork();
  impl_.release();  // its threads and locks belong to the parent
}

}  // namespace p3
