#include "p3/server.h"

#include <algorithm>
#include <functional>
#include <iterator>
#include <map>
#include <memory>
#include <numeric>
#include <set>
#include <tuple>
#include <utility>

#include "p3/lateness.h"
#include "p3/thread_annotations.h"
#include "plan/frames.h"
#include "server/alarms.h"
#include "server/estates.h"
#include "server/receive_queue.h"
#include "server/registry.h"
#include "server/shard.h"
#include "transport/lent_buffers.h"
#include "transport/transport.h"
#include "wire/failures.h"

namespace p3 {
namespace {

constexpr double kGoodbyeTimeoutS = 1.0;  // for peers that still read; the job is over either way

class ServerNode final : public Server, public Transport::Handler, public ShardHost {
 public:
  ServerNode(int rank, int num_servers, int num_workers, ServerOptions options)
      : ShardHost(options.node.label, options.sum_order, options.outlives_workers),
        rank_(rank),
        num_servers_(num_servers),
        machines_(options.machines.value_or(Machines(std::max(num_workers, 0)))),
        groups_(options.groups),
        sums_in_receiver_(options.threads == 0),
        workers_(static_cast<size_t>(std::max(num_workers, 0))),
        seniority_(workers_.size()),
        queues_(static_cast<size_t>(std::max(options.threads, 1))),
        estates_(registry_of(rank, machines_have_leaders(options))),
        registry_(estates_.own()),
        transport_(std::move(options.node), *this) {
    if (num_workers < 1 || rank < 0 || rank >= num_servers)
      refuse_call("server " + std::to_string(rank) + " of " + std::to_string(num_servers) + " with " +
                  std::to_string(num_workers) + " workers makes no job.");
    if (machines_.num_workers() != num_workers)
      refuse_call("the machines of " + std::to_string(machines_.num_workers()) + " workers are known, but there are " +
                  std::to_string(num_workers) + ".");
    if (groups_ && groups_->num_workers() != num_workers)
      refuse_call("the groups of " + std::to_string(groups_->num_workers()) + " workers are known, but there are " +
                  std::to_string(num_workers) + ".");
    if (groups_ && machines_have_leaders(options))
      refuse_call("workers cannot have leaders of their machines and of groups: set local_aggregation to false.");
    if (outlives_workers && (options.local_aggregation || groups_))
      refuse_call(
          "nobody can go on without a leader: set local_aggregation to false, and have no groups, with "
          "outlives_workers.");
    std::iota(seniority_.begin(), seniority_.end(), 0);
  }

  ~ServerNode() override { ServerNode::stop(); }

  void add_worker(int worker, std::unique_ptr<Stream> stream, std::string peer) override {
    check_rank(worker);
    workers_[index_of(worker)].van =
        transport_.add_van(std::move(stream), std::move(peer), worker, /*is_bounded=*/true);
    vans_.push_back({worker});
  }

  void leave_empty(int worker, std::string peer) override {
    check_can_lose(worker);
    add_worker(worker, nullptr, std::move(peer));
    WorkerState& state = workers_[index_of(worker)];
    state.is_lost = state.has_departed = has_lost_ = true;
    drop_from_seniority(worker);
  }

  void expect_worker(int worker, std::string peer) override {
    check_can_lose(worker);
    add_worker(worker, nullptr, std::move(peer));
    workers_[index_of(worker)].is_expected = true;
    workers_[index_of(worker)].incarnation = 2;
  }

  void add_watch(std::unique_ptr<Stream> stream, std::string peer) override {
    transport_.add_van(std::move(stream), std::move(peer));
    vans_.push_back({-1});
  }

  void replace_watch(std::unique_ptr<Stream> stream) override { transport_.replace_watch(std::move(stream)); }

  void start() override {
    for (size_t worker = 0; worker < workers_.size(); ++worker)
      if (workers_[worker].van < 0) refuse_call("no connection to worker " + std::to_string(worker) + ".");
    if (!sums_in_receiver_)
      for (ReceiveQueue& queue : queues_) queue.start_thread([this](Task& task) { run(task); });
    transport_.start();
  }

  void define(const KeyPlan& plan, std::string name, int store) override {
    estates_.define(plan, name, store);
    if (!has_lost_) return;
    transport_.run_in_receiver([&] {  // which looks at all keys
      estates_.each_registry([&](const Registry& registry) {
        for (Shard* shard : registry.shards_of(plan.wire_key)) note_lost_workers(*shard);
      });
    });
  }
  void define_successor(const KeyPlan& plan, uint32_t predecessor) override {
    registry_.define_successor(plan, predecessor);
  }
  void recut(const KeyPlan& plan, uint32_t predecessor, uint64_t round) override {
    transport_.run_in_receiver([&] {
      if (estates_.has_inherited()) refuse_call("it serves for a lost server, and cannot cut keys anew.");
      registry_.recut(plan, predecessor, round);
      if (has_lost_)
        for (Shard* shard : registry_.shards_of(plan.wire_key)) note_lost_workers(*shard);
    });
  }
  void drop(uint32_t wire_key) override {
    transport_.run_in_receiver([&] { registry_.drop(wire_key); });
  }
  bool drop_store(int store) override {
    bool is_gone = false;
    transport_.run_in_receiver([&] {
      is_gone = estates_.drop_store(store);
      drop_captured();
    });
    return is_gone;
  }
  void load(uint32_t wire_key, uint32_t slice, uint8_t part, const void* content, size_t bytes) override {
    Header header;
    header.key = wire_key;
    header.slice = slice;
    Shard* const shard = registry_.find(header);
    if (shard == nullptr || !shard->load(part, content, bytes))
      refuse_call("slice " + std::to_string(slice) + " of key " + std::to_string(wire_key) + " cannot be loaded.");
  }
  void set_optimizer(int store, const OptimizerSpec& spec) override { registry_.set_optimizer(store, spec); }

  void fail(const Error& error) override { transport_.fail(error); }
  std::optional<Error> error() const override { return transport_.error(); }
  int event_fd() const override { return transport_.event_fd(); }
  bool finished() const override { return finished_; }
  void abandon_after_fork() override { transport_.abandon_after_fork(); }

  void stop() override {
    transport_.finish(kGoodbyeTimeoutS);
    for (ReceiveQueue& queue : queues_) queue.stop();
    if (recorder() != nullptr) recorder()->close();
  }

  // --- a frame comes in: the receiver thread -----------------------------------------------------------------------

  void* receive_into(int van, const Header& header) override {
    const int worker = vans_[index_of(van)].worker;
    if (worker < 0) refuse(van, header, "unexpected");
    if (header.kind == FrameKind::kClaim && header.key == kNoKey) return receive_last_claim(van, header);
    Shard* const shard = estates_.find(header);
    const bool is_claim = header.kind == FrameKind::kClaim;
    if (is_claim && (shard == nullptr ? estates_.have_been_claimed() : shard->is_too_late(header, worker)))
      return receive_vain_claim(van, header);
    if (shard == nullptr) refuse(van, header, "of no key, or of another server's");
    const char* const problem =
        is_claim ? shard->problem_with_claim(header, worker) : shard->problem_with(header, worker);
    if (problem != nullptr) refuse(van, header, problem);
    if (shard->key.is_successor && shard->published == 0) shard->published = header.round;
    if (shard->claims == nullptr) check_that_nobody_left(*shard, worker, header);  // else once it settles
    vans_[index_of(van)].receiving = shard;
    ++shard->uses;
    if (!is_claim) return shard->place_of(header, vans_[index_of(van)].arriving);
    vans_[index_of(van)].arriving = PooledBuffer(transient, header.payload_bytes);
    return vans_[index_of(van)].arriving.data();
  }

  [[noreturn]] void refuse(int van, const Header& header, const char* what) const override {
    const Shard* const shard = estates_.find(header);
    throw frame_refused(label, transport_.label(van), header, what,
                        shard == nullptr ? std::nullopt : std::optional(shard->key.name));
  }

  void received(int van, const Header& header, void*) override {
    const int worker = vans_[index_of(van)].worker;
    if (vans_[index_of(van)].receiving == nullptr) {
      vans_[index_of(van)].arriving.give_back();
      return header.key == kNoKey ? claim_nothing_more(worker, header) : void();
    }
    Shard& shard = *std::exchange(vans_[index_of(van)].receiving, nullptr);
    if (header.kind == FrameKind::kClaim) {
      --shard.uses;
      if (shard.claims == nullptr) return vans_[index_of(van)].arriving.give_back();  // another one's has come first
      shard.claims->note(worker, header, transport_.received_fields(van), std::move(vans_[index_of(van)].arriving));
      return settle_if_complete(shard);
    }
    Task task;
    task.shard = &shard;
    task.worker = worker;
    task.header = header;
    task.payload = std::move(vans_[index_of(van)].arriving);
    task.incarnation = workers_[index_of(worker)].incarnation;
    if (is_push(header.kind)) task.fields = transport_.received_fields(van);
    if (shard.claims == nullptr) {
      check_that_nobody_left(shard, worker, header);  // if it has settled since
      return take(std::move(task));
    }
    if (header.kind == FrameKind::kInit) shard.claims->note_nothing(worker);
    shard.claims->hold(std::move(task));
    settle_if_complete(shard);
  }

  // A frame that is whole, in its turn.
  void take(Task task) {
    Shard& shard = *task.shard;
    const int worker = task.worker, van = van_of(worker);
    const Header header = task.header;
    if (shard.turns.take_request(worker)) {
      task.kind = Task::Kind::kCatchUp;
      return queue(std::move(task));
    }
    if (shard.turns.take_behind(worker)) {
      task.kind = Task::Kind::kAgain;
      task.payload.give_back();
      return queue(std::move(task));
    }
    const bool pushes = is_push(header.kind);
    if (pushes && ends_round(header, task.payload.data()))
      note_lateness(task.shard->key, worker, header, shard.turns.note_push(worker, header, Clock::now()));
    else if (header.kind == FrameKind::kInit) {
      if (static_cast<InitPart>(header.part) == InitPart::kHandedOver) shard.turns.hand_over();
      task.nth_init =
          shard.turns.note_init(worker, shard.published, static_cast<Encoding>(header.encoding) != Encoding::kAbsent);
    }
    task.held_bytes = sizeof task + shard.answer_bytes(header) + task.payload.bytes();
    transport_.hold(van, task.held_bytes);
    queue(std::move(task));
    if (pushes && shard.turns.completes())
      for (int other = 0; other < num_workers(); ++other) complete_next(shard, other);
  }

  // --- what is inherited from a server that is lost ----------------------------------------------------------------

  void inherit(int lost) override {
    if (lost < 0 || lost >= num_servers_ || lost == rank_) refuse_call("it cannot be its own heir, or nobody's.");
    auto registry = registry_of(lost, /*aggregates=*/false);
    registry->inherit(registry_);
    transport_.run_in_receiver([&] {
      if (estates_.has_inherited(lost)) refuse_call("it is the heir of server " + std::to_string(lost) + " already.");
      registry->each_shard([&](Shard& shard) { note_lost_workers(shard); });
      estates_.inherit(std::move(registry), who_is_there());
      settle_what_is_complete();
    });
  }

  void open(const std::vector<int>& seniority) override {
    for (int worker : seniority) check_can_lose(worker);
    transport_.run_in_receiver([&] {
      for (int worker : who_is_there())
        if (!workers_[index_of(worker)].is_expected)
          refuse_call(worker_label(worker) + " is connected already, and may have claimed what it has.");
      estates_.open(who_is_there());
      seniority_.clear();
      for (int worker : seniority)
        if (!is_over(workers_[index_of(worker)])) seniority_.push_back(worker);
      if (!seniority_.empty()) first_worker = seniority_.front();
      has_new_first = true;  // or may have: of who was the first before, it knows nothing
      settle_what_is_complete();
    });
  }

  bool awaits_claims() override {
    bool awaits = false;
    transport_.run_in_receiver([&] { awaits = estates_.await_claims(); });
    return awaits;
  }

  void hand_over(int rank) override {
    transport_.run_in_receiver([&] {
      if (!estates_.has_inherited(rank)) refuse_call("it is no heir of server " + std::to_string(rank) + ".");
      if (estates_.await_claims_of(rank))
        refuse_call("not all workers have said yet what they have of server " + std::to_string(rank) + ".");
      estates_.hand_over(rank);
    });
  }

  // Of a key that all workers have released, of which this one had not heard when it sent that; of one that goes on; of a
  // server that has come back; or of one that was inherited before.
  void* receive_vain_claim(int van, const Header& header) {
    vans_[index_of(van)].receiving = nullptr;
    vans_[index_of(van)].arriving = PooledBuffer(transient, std::max<size_t>(header.payload_bytes, 1));
    return vans_[index_of(van)].arriving.data();
  }

  void* receive_last_claim(int van, const Header& header) {
    if (!estates_.are_claimed(rank_of(header)) || header.part != static_cast<uint8_t>(Claimed::kNothing))
      refuse(van, header, "unexpected");
    if (header.payload_bytes > 0) refuse(van, header, "of another size than agreed");
    vans_[index_of(van)].receiving = nullptr;
    return this;  // nothing comes
  }

  // As a worker's last claim names it.
  static int rank_of(const Header& last_claim) { return static_cast<int>(last_claim.slice); }

  void claim_nothing_more(int worker, const Header& last_claim) {
    for (Shard* shard : estates_.note_last_claim(rank_of(last_claim), worker)) {
      shard->claims->note_nothing(worker);
      settle_if_complete(*shard);
    }
  }

  void ask(int worker, const Shard& shard) {
    Frame frame;
    frame.header.kind = FrameKind::kAsk;
    frame.header.dtype = static_cast<uint8_t>(shard.key.plan.dtype);
    frame.header.encoding = static_cast<uint8_t>(Encoding::kAbsent);
    frame.header.key = shard.key.plan.wire_key;
    frame.header.slice = shard.index;
    frame.header.priority = kMostUrgent;
    transport_.send({{van_of(worker), frame}});
  }

  // Receiver thread.
  void settle_what_is_complete() {
    for (Shard* shard : estates_.open_shards()) settle_if_complete(*shard);
  }

  // Receiver thread. Once everybody has claimed who is still there, and one has given the value, the shard goes on.
  void settle_if_complete(Shard& shard) {
    if (shard.claims == nullptr) return;
    for (int worker = 0; worker < num_workers(); ++worker)
      if (!is_over(workers_[index_of(worker)]) && !shard.claims->has(worker)) return;
    const auto can_give = [&](int worker) { return !is_over(workers_[index_of(worker)]); };
    const size_t turn = shard.key.plan.wire_key + shard.index / static_cast<size_t>(num_servers_);
    if (!shard.claims->settle(can_give, turn, [&](int worker) { ask(worker, shard); })) return;
    const std::unique_ptr<Claims> claims = std::move(shard.claims);
    shard.has_settled = true;
    const Header& best = claims->best();
    check_that_somebody_has(shard, *claims);
    shard.published = best.round;
    std::vector<int> asks_first;  // who came later than others, and has not asked for a value of this key yet
    for (int worker = 0; worker < num_workers(); ++worker) {
      const WorkerState& state = workers_[index_of(worker)];
      const bool waits = !is_over(state);  // who does not has all, whatever it has claimed
      if (waits && state.incarnation > 1) {
        claims->count_first_values_as_best(worker);
        if (claims->inits_of_worker(worker) == 0 && best.round > 0) {
          asks_first.push_back(worker);
          continue;
        }
      }
      const uint64_t landed = waits ? claims->round_of(worker) : best.round;
      const uint32_t inits = waits ? claims->inits_of_worker(worker) : inits_of(best);
      if (landed < best.round && inits > 0 && inits < inits_of(best))
        throw Error(
            ErrorKind::kPeerLost,
            label + ": a server was lost while " + worker_label(worker) + " lacked what round " +
                std::to_string(best.round) + " made of key '" + shard.key.name +
                "', in whose place others have got a new first value already. Call barrier() before such a value "
                "is given.",
            {{}, shard.key.name, best.round});
      const bool is_served = landed == best.round || !claims->lacks_value();
      if (!is_served || !shard.turns.go_on_behind(worker, landed, inits, best.round, inits_of(best) > 0))
        refuse(van_of(worker), best, "of a later round than another worker can have missed");
    }
    for (int worker : asks_first) {  // as if it had come now
      shard.turns.go_on_behind(worker, best.round, inits_of(best), best.round, /*has_value=*/true);
      shard.turns.enter(worker);
    }
    where_summed(shard.thread, [&] {
      shard.take_over(*claims);
      for (int worker : asks_first) shard.lose(worker, workers_[index_of(worker)].incarnation - 1, best.round);
    });
    for (int worker = 0; worker < num_workers(); ++worker)
      if (auto held = claims->take_held(worker)) {
        check_that_nobody_left(shard, worker, held->header);
        take(std::move(*held));
      }
  }

  // The first worker asks for a value that nobody has who is left: who gave it is lost as well, or the lost server had
  // loaded it.
  void check_that_somebody_has(const Shard& shard, const Claims& claims) const {
    const int first = shard.key.first();
    const Header* const asks = claims.held(first);
    if (asks == nullptr || asks->kind != FrameKind::kInit) return;
    if (static_cast<Encoding>(asks->encoding) != Encoding::kAbsent) return;
    const bool came_later = workers_[index_of(first)].incarnation > 1;  // and has counted fewer of them
    const uint32_t most = inits_of(claims.best());
    if (most > 0 && (came_later || claims.inits_of_worker(first) < most)) return;
    throw Error(ErrorKind::kPeerLost,
                label + ": a server was lost, and with it a value of key '" + shard.key.name + "' that " +
                    worker_label(first) +
                    " asks for and nobody has: the worker that gave it is lost as well, or that server had loaded it "
                    "from a snapshot. Let the job start again (p3 run --restarts).",
                {{}, shard.key.name, claims.best().round});
  }

  // --- it is worked on: the receiver or a summing thread -----------------------------------------------------------

  bool work() override {
    return sums_in_receiver_ && queues_.front().run_one([this](Task& task) { run(task); });
  }

  void run(Task& task) {
    Shard& shard = *task.shard;
    try {
      Reply reply = shard.handle(task);
      task.payload.give_back();  // before anybody hears of it
      settle(task, std::move(reply));
    } catch (const Error& error) {
      transport_.fail(error);
    } catch (const std::exception& error) {
      transport_.fail(Error(ErrorKind::kStopped,
                            label + ": " + error.what() + " while working on key '" + shard.key.name + "'.",
                            {{}, shard.key.name, {}}));
    }
    --shard.uses;
    if (task.held_bytes > 0) transport_.let_go(van_of(task.worker), task.held_bytes);
  }

  // Copies of keys that are gone.
  void drop_captured() {
    const std::vector<uint32_t> known = registry_.wire_keys();  // of those that are inherited, too
    MutexLock lock(captured_mutex_);
    for (auto it = captured_.begin(); it != captured_.end();)
      it = std::find(known.begin(), known.end(), std::get<0>(it->first)) == known.end() ? captured_.erase(it)
                                                                                        : std::next(it);
  }

  // What became of a frame.
  void settle(const Task& task, Reply reply) {
    if (reply.problem != nullptr)
      throw frame_refused(label, transport_.label(van_of(task.worker)), task.header, reply.problem,
                          task.shard->key.name);
    if (reply.contradicts >= 0)
      throw scalars_differ(label, worker_label(reply.contradicts), task.shard->settings(), worker_label(task.worker),
                           {task.header.scalars, task.fields}, task.header.round, task.shard->key.name,
                           optimizer_of(task.shard->key));
    if (reply.is_summed) trace(recorder(), TraceKind::kSummed, task.header, task.worker);
    if (reply.published) {
      note_round(reply.published->round);
      trace(recorder(), TraceKind::kUpdated, *reply.published);
    }
    if (!reply.captured.empty()) keep_captured(std::move(reply.captured), snapshot_of(task.header));
    if (!reply.frames.empty()) transport_.send(reply.frames, Transport::Write::kHere);
  }

  // What was captured of a shard replaces its former copy, so there is never more than one copy of all that there is.
  void keep_captured(std::vector<CapturedArray> of_shard, uint64_t snapshot) {
    MutexLock lock(captured_mutex_);
    for (CapturedArray& array : of_shard) {
      array.snapshot = snapshot;
      captured_[{array.wire_key, array.slice, array.part}] = std::move(array);
    }
  }

  void sent(const Frame& frame) override { static_cast<Lender*>(frame.context)->taken_back(); }

  // --- ShardHost: any thread ---------------------------------------------------------------------------------------

  const Optimizer* optimizer_of(const ServerKey& key) const override { return registry_.optimizer_of(key); }
  std::shared_ptr<const Optimizer> optimizer_of(const ServerKey& key, const SharedFields& fields) const override {
    return registry_.optimizer_of(key, fields);
  }
  bool can_move(const ServerKey& key, uint32_t plan) const override { return registry_.can_move(key, plan); }
  int van_of(int worker) const override { return workers_[index_of(worker)].van; }

  void resume(Shard& shard, const Urgency& urgency) override {
    Task task;
    task.kind = Task::Kind::kResume;
    task.shard = &shard;
    ++shard.uses;
    queue(urgency, std::move(task));
  }
  void resume_at(Shard& shard, std::optional<std::chrono::steady_clock::time_point> when) override {
    if (alarms_.set(shard, when)) transport_.ask_for_work();  // which ends a longer wait of the receiver
  }

  // --- going on without a worker -----------------------------------------------------------------------------------

  void dismiss_worker(int worker) override {
    check_can_lose(worker);
    transport_.run_in_receiver([&] {
      let_go(worker);
      const auto ask = [=](const Shard& shard) {
        return shard.claims == nullptr ? shard.turns.problem_of_dismissing(worker) : std::nullopt;
      };
      if (const auto problem = estates_.first_answer(ask))
        return transport_.fail(Error(
            ErrorKind::kPeerLost,
            label + ": " + worker_label(worker) + " was lost, and the job cannot go on without it: " + *problem + ".",
            {}));
      workers_[index_of(worker)].has_departed = true;
      drop_from_seniority(worker);
      estates_.expect_no_claims_of(worker);
      estates_.each_shard([&](Shard& shard) { shard.turns.dismiss(worker); });
      estates_.each_shard([&](Shard& shard) { complete_next(shard, worker); });
      for (Shard* shard : estates_.open_shards()) forget_held(*shard, worker);
      finish_if_all_have_left();
    });
  }

  std::string admit_worker(int worker) override {
    check_can_lose(worker);
    std::string problem;
    transport_.run_in_receiver([&] {
      WorkerState& state = workers_[index_of(worker)];
      if (!state.has_departed) refuse_call("worker " + std::to_string(worker) + " has not departed.");
      const auto ask = [](const Shard& shard) { return shard.turns.problem_of_admitting(shard.published); };
      problem = estates_.first_answer(ask).value_or("");
      if (!problem.empty()) return;
      state.has_departed = state.has_left = false;
      seniority_.push_back(worker);
      estates_.each_shard([&](Shard& shard) { shard.turns.admit(worker, shard.published); });
    });
    return problem;
  }

  void connect_worker(int worker, std::unique_ptr<Stream> stream) override {
    transport_.run_in_receiver([&] {
      check_rank(worker);
      WorkerState& state = workers_[index_of(worker)];
      if (std::exchange(state.is_expected, false)) return transport_.replace_van(state.van, std::move(stream));
      if (!state.is_lost) refuse_call("worker " + std::to_string(worker) + " is not lost.");
      state.is_lost = false;
      ++state.incarnation;
      estates_.each_shard([&](Shard& shard) { shard.turns.enter(worker); });
      each_shard_where_summed([=](Shard& shard) {
        if (!shard.turns.catches_up(worker)) shard.let_in(worker);
      });
      transport_.replace_van(state.van, std::move(stream));
    });
  }

  bool lost(int van, const Error&) override {
    if (!outlives_workers || vans_[index_of(van)].worker < 0) return false;
    vans_[index_of(van)].forget_frame();
    return true;
  }

  // What is left is later ones': a snapshot that was given up may be asked for while the copies of the next one come in.
  std::vector<CapturedArray> take_captured(uint64_t snapshot) override {
    std::vector<CapturedArray> taken;
    MutexLock lock(captured_mutex_);
    for (auto it = captured_.begin(); it != captured_.end();) {
      const uint64_t its = it->second.snapshot;
      if (its == snapshot) taken.push_back(std::move(it->second));
      it = its > snapshot ? std::next(it) : captured_.erase(it);
    }
    return taken;
  }

  // --- reports -----------------------------------------------------------------------------------------------------

  void left(int van) override {
    const int worker = vans_[index_of(van)].worker;
    if (worker < 0) return;
    workers_[index_of(worker)].has_left = has_anybody_left_ = true;
    if (const auto awaited = awaited_from(worker)) throw left_too_early(label, worker_label(worker), *awaited);
    estates_.expect_no_claims_of(worker);
    settle_what_is_complete();
    estates_.each_shard([&](Shard& shard) { go_on_without(shard, worker); });
    finish_if_all_have_left();
  }

  std::optional<Awaited> waiting_for(int van) const override {
    const int worker = vans_[index_of(van)].worker;
    return worker < 0 ? std::nullopt : awaited_from(worker);
  }

  uint64_t last_round() const override { return last_round_; }

  std::optional<std::chrono::steady_clock::time_point> alarm() const override { return alarms_.first(); }
  void ring(std::chrono::steady_clock::time_point now) override {
    for (Shard* shard : alarms_.take(now)) resume(*shard, {});
  }

  void look(std::chrono::steady_clock::time_point now) override {
    estates_.free_idle();
    LateWorkers late;
    estates_.each_shard([&](const Shard& shard) { shard.turns.note_late(now, late); });
    MutexLock lock(lateness_mutex_);
    late_ = late.take();
  }

  std::vector<Late> late() const override {
    MutexLock lock(lateness_mutex_);
    return late_;
  }

  std::vector<double> mean_lateness_s() const override {
    MutexLock lock(lateness_mutex_);
    std::vector<double> means;
    for (const WorkerState& worker : workers_) means.push_back(worker.lateness.mean_s());
    return means;
  }

  Counters counters() const override {
    Counters counters;
    counters.traffic = transport_.traffic();
    counters.system_calls = transport_.system_calls();
    counters.rounds = rounds_;
    counters.last_round = last_round_;
    for (const ReceiveQueue& queue : queues_) counters.received_slices += queue.depth();
    counters.buffer_bytes = transient.bytes_in_use();
    counters.peak_buffer_bytes = transient.peak_bytes();
    counters.keys = registry_.count();
    counters.value_bytes = values.bytes_in_use();
    return counters;
  }

 private:
  using Clock = std::chrono::steady_clock;

  struct WorkerState {
    int van = -1;
    // Receiver thread.
    bool has_left = false;      // it has said goodbye
    uint32_t incarnation = 1;   // processes that this rank has had
    bool is_expected = false;   // the first one that this server knows has no connection yet
    bool is_lost = false;       // the last one is gone, and no other has come yet
    bool has_departed = false;  // and none may
    Lateness lateness{};        // with its lock
  };
  struct VanState {
    int worker;  // -1: only watched
    // Receiver thread, of the frame that is being received:
    PooledBuffer arriving{};     // for its payload
    Shard* receiving = nullptr;  // that it is about

    void forget_frame() {
      arriving.give_back();
      if (receiving != nullptr) --std::exchange(receiving, nullptr)->uses;
    }
  };

  static size_t index_of(int number) { return static_cast<size_t>(number); }
  int num_workers() const { return static_cast<int>(workers_.size()); }
  Recorder* recorder() const { return transport_.options().trace.get(); }
  const std::string& worker_label(int worker) const { return transport_.label(van_of(worker)); }

  void check_rank(int worker) const {
    if (worker < 0 || worker >= num_workers()) refuse_call("there is no worker " + std::to_string(worker) + ".");
  }

  void check_can_lose(int worker) const {
    check_rank(worker);
    if (!outlives_workers) refuse_call("it was not told to outlive workers.");
  }

  void queue(Task task) {
    const Urgency urgency = urgency_of(task.header);
    queue(urgency, std::move(task));
  }

  void queue(const Urgency& urgency, Task task) {
    auto& queue = queues_[index_of(task.shard->thread)];
    queue.push(urgency, std::move(task));
    if (sums_in_receiver_) transport_.ask_for_work();
  }

  // Of a frame whose round or value would never come, as somebody that it needs has left.
  void check_that_nobody_left(const Shard& shard, int worker, const Header& header) const {
    if (!has_anybody_left_ || shard.turns.is_behind(worker)) return;  // so no frame costs a look at all workers
    const auto check = [&](int other, const Awaited& awaited) {
      if (workers_[index_of(other)].has_left) throw left_too_early(label, worker_label(other), awaited);
    };
    if (is_push(header.kind))
      for (int other = 0; other < num_workers(); ++other)
        if (const auto round = shard.turns.would_wait_for_push_of(other, header))
          check(other, {Awaited::What::kPush, shard.key.name, *round});
    if (header.kind == FrameKind::kInit)
      for (int needed : {shard.key.first(), shard.key.leader_of(worker)})
        if (shard.turns.would_wait_for_init_of(needed, worker))
          check(needed, {Awaited::What::kFirstValue, shard.key.name});
  }

  // What others do that needs this worker too, and it has not done.
  std::optional<Awaited> awaited_from(int worker) const {
    return estates_.first_answer([=](const Shard& shard) { return shard.turns.needs(worker, shard.published); });
  }

  // Receiver thread. Completes the round that this worker would push next, if it has departed and that round begins.
  void complete_next(Shard& shard, int worker) {
    const auto round = shard.turns.to_complete(worker, shard.published);
    if (!round) return;
    Task task = absent_push_of(worker, shard, *round);
    shard.turns.note_push(worker, task.header, Clock::now());
    ++task.incarnation;  // the successor's
    task.has_departed = true;
    queue(std::move(task));
  }

  // Receiver thread. With a quorum no round waits for who has said goodbye; a meeting does, and that is an error.
  void go_on_without(Shard& shard, int worker) {
    if (!shard.key.plan.has_quorum()) return;
    Task task = absent_push_of(worker, shard, shard.turns.pushed(worker) + 1);
    task.has_departed = true;
    queue(std::move(task));
  }

  Task absent_push_of(int worker, Shard& shard, uint64_t round) const {
    Task task;
    task.shard = &shard;
    task.worker = worker;
    task.header = shard.absent_push(round);
    task.incarnation = workers_[index_of(worker)].incarnation;
    ++shard.uses;
    return task;
  }

  // Receiver thread. Its process is gone, and so is what had not come whole.
  void let_go(int worker) {
    WorkerState& state = workers_[index_of(worker)];
    transport_.drop_van(state.van);
    vans_[index_of(state.van)].forget_frame();
    state.is_expected = false;
    state.is_lost = has_lost_ = true;
    each_shard_where_summed([=, incarnation = state.incarnation](Shard& shard) {
      shard.lose(worker, incarnation, shard.turns.pushed(worker));
    });
  }

  // Receiver thread, or before start(). It has departed.
  void drop_from_seniority(int worker) {
    seniority_.erase(std::remove(seniority_.begin(), seniority_.end(), worker), seniority_.end());
    if (seniority_.empty() || seniority_.front() == first_worker) return;
    first_worker = seniority_.front();
    has_new_first = true;
  }

  // Receiver thread, which waits. Calls visit(shard) for each, in the thread that sums it.
  void each_shard_where_summed(const std::function<void(Shard&)>& visit) {
    for (int thread = 0; thread < static_cast<int>(queues_.size()); ++thread)
      where_summed(thread, [&] {
        estates_.each_shard([&](Shard& shard) {
          if (shard.thread == thread) visit(shard);
        });
      });
  }
  void where_summed(int thread, const std::function<void()>& call) {
    sums_in_receiver_ ? call() : queues_[index_of(thread)].call(call);
  }

  std::unique_ptr<Registry> registry_of(int rank, bool aggregates) {
    return std::make_unique<Registry>(rank, num_servers_, static_cast<int>(queues_.size()), machines_, aggregates,
                                      groups_ ? &*groups_ : nullptr, *this);
  }
  bool machines_have_leaders(const ServerOptions& options) const {
    return options.local_aggregation && machines_.count() < machines_.num_workers();
  }

  void note_lost_workers(Shard& shard) {
    for (int worker = 0; worker < num_workers(); ++worker) {
      const WorkerState& state = workers_[index_of(worker)];
      if (state.is_lost) shard.lose(worker, state.incarnation, 0);
      if (state.has_departed) shard.turns.dismiss(worker);
    }
  }

  // Of a worker that has departed.
  void forget_held(Shard& shard, int worker) {
    if (shard.claims == nullptr) return;
    if (shard.claims->take_held(worker)) --shard.uses;
    try {
      settle_if_complete(shard);
    } catch (const Error& error) {
      transport_.fail(error);
    }
  }

  // Receiver thread.
  std::set<int> who_is_there() const {
    std::set<int> there;
    for (int worker = 0; worker < num_workers(); ++worker)
      if (!is_over(workers_[index_of(worker)])) there.insert(worker);
    return there;
  }
  static bool is_over(const WorkerState& worker) { return worker.has_left || worker.has_departed; }

  // Receiver thread.
  void finish_if_all_have_left() {
    if (!std::all_of(workers_.begin(), workers_.end(), is_over)) return;
    finished_ = true;
    transport_.signal();
  }

  // Of a shard; where it is summed.
  void note_round(uint64_t round) {
    ++rounds_;
    uint64_t last = last_round_;
    while (last < round && !last_round_.compare_exchange_weak(last, round)) {
    }
  }

  void note_lateness(const ServerKey& key, int worker, const Header& push, double late_s) {
    MutexLock lock(lateness_mutex_);
    if (push.of_machine == 0) return workers_[index_of(worker)].lateness.note(push.round, late_s);
    for (int each : key.machines->workers(key.machines->of(worker)))
      workers_[index_of(each)].lateness.note(push.round, late_s);
  }

  const int rank_, num_servers_;
  const Machines machines_;
  const std::optional<Machines> groups_;
  const bool sums_in_receiver_;
  std::vector<WorkerState> workers_;  // by rank
  std::vector<int> seniority_;        // receiver thread: who has not departed, in the order of coming
  std::vector<VanState> vans_;        // by van
  bool has_anybody_left_ = false;     // receiver thread: any worker has said goodbye

  mutable Mutex lateness_mutex_;  // and WorkerState::lateness
  std::vector<Late> late_ P3_GUARDED_BY(lateness_mutex_);

  Mutex captured_mutex_;
  std::map<std::tuple<uint32_t, uint32_t, uint8_t>, CapturedArray> captured_ P3_GUARDED_BY(captured_mutex_);
  std::atomic<uint64_t> rounds_{0};
  std::atomic<uint64_t> last_round_{0};
  std::atomic<bool> finished_{false};
  std::atomic<bool> has_lost_{false};  // any worker, ever
  std::vector<ReceiveQueue> queues_;   // one for each summing thread
  Alarms alarms_;
  Estates estates_;
  Registry& registry_;   // its own
  Transport transport_;  // last: its threads use all of the above
};

}  // namespace

std::unique_ptr<Server> Server::make(int rank, int num_servers, int num_workers, ServerOptions options) {
  return std::make_unique<ServerNode>(rank, num_servers, num_workers, std::move(options));
}

}  // namespace p3
