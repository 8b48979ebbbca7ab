#include "p3/worker.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <limits>
#include <map>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include "worker/machine_leader.h"
#include "worker/machine_rows.h"
#include "wire/disagreement.h"
#include "wire/routing.h"
#include "transport/transport.h"
#include "worker/operation.h"

namespace p3 {
namespace {

using Clock = std::chrono::steady_clock;

struct Awaited {
  const Key* key;
  uint64_t round;
};

}  // namespace

class Worker::Impl : public Transport::Handler {
 public:
  Impl(int rank, int num_servers, NodeOptions options)
      : rank_(rank),
        num_servers_(num_servers),
        leader_(rank, transport_, van_of_server_),
        transport_(std::move(options), *this) {
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
    arriving_rows_.emplace_back();
  }

  void add_local(int worker, std::unique_ptr<Stream> stream, std::string peer) {
    if (worker < 0 || worker == rank_ || leader_van_ >= 0 || (worker < rank_ && leader_.leads()))
      throw Error(ErrorKind::kUsage, label() + ": worker " + std::to_string(worker) + " cannot be a neighbour.");
    const int van = transport_.add_van(std::move(stream), std::move(peer), local_peer(worker),
                                       /*is_bounded=*/worker > rank_);
    server_of_van_.push_back(-1);
    arriving_rows_.emplace_back();
    if (worker < rank_)
      leader_van_ = van;
    else
      leader_.add_member(worker, van);
  }

  void add_watch(std::unique_ptr<Stream> stream, std::string peer) {
    transport_.add_van(std::move(stream), std::move(peer));
    server_of_van_.push_back(-1);
    arriving_rows_.emplace_back();
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

  int declare_rows(std::string name, uint64_t rows, uint64_t row_elements, DType dtype) {
    if (row_elements == 0 || row_elements > std::numeric_limits<uint32_t>::max())
      throw Error(ErrorKind::kUsage, label() + ": key '" + name + "' has rows of " + std::to_string(row_elements) +
                                         " elements; a row has at least one, and less than 2^32.");
    std::lock_guard<std::mutex> lock(mutex_);
    Key& key = keys_.emplace_back();
    key.name = std::move(name);
    key.elements = rows * row_elements;
    key.dtype = dtype;
    key.row_elements = static_cast<uint32_t>(row_elements);
    return static_cast<int>(keys_.size()) - 1;
  }

  void agree(int handle, const KeyPlan& plan, bool catches_up) {
    std::vector<Transport::Outgoing> frames;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      Key& key = find(handle);
      if (key.plan) throw Error(ErrorKind::kUsage, label() + ": key '" + key.name + "' was agreed already.");
      if (plan.elements != key.elements || plan.dtype != key.dtype || plan.row_elements != key.row_elements ||
          !makes_sense(plan))
        throw Error(ErrorKind::kUsage, label() + ": the plan of key '" + key.name + "' does not fit its declaration.");
      key.plan = plan;
      key.catches_up = catches_up;
      const bool aggregated = key.compression.encoding == Encoding::kPlain;
      key.by_leader = aggregated && leader_van_ >= 0;
      if (aggregated && leader_.leads()) key.machine_sum = leader_.sum_of(plan, 1);
      handle_of_wire_key_[plan.wire_key] = handle;
      begin_next(key, frames);
    }
    transport_.send(frames);
  }

  // One after the other; `done` is only that of the last one.
  void submit(int handle, std::vector<Operation> operations) {
    std::vector<Transport::Outgoing> frames;
    std::optional<Error> failure;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      Key& key = find(handle);
      const bool of_any_key = operations.front().kind == Operation::Kind::kCapture;
      if (!of_any_key && (operations.front().rows != nullptr) != (key.row_elements > 0))
        throw Error(ErrorKind::kUsage, label() + ": key '" + key.name + "' is " +
                                           (key.row_elements > 0 ? "a key of rows; use init_rows and its like."
                                                                 : "no key of rows; declare it as such."));
      failure = failure_;
      if (!failure) {
        pending_ += operations.size();
        for (Operation& operation : operations) key.operations.push_back(std::move(operation));
        begin_next(key, frames);
      }
    }
    if (failure)
      operations.back().done(&*failure, false);
    else
      transport_.send(frames);
  }

  // --- snapshots ---------------------------------------------------------------------------------------------------

  void capture(int handle, uint64_t snapshot, float* residual, Done done) {
    if (residual != nullptr) require_residual(handle);
    Operation operation{Operation::Kind::kCapture, std::move(done)};
    operation.landing = residual;
    operation.scalars.updates = static_cast<double>(snapshot);
    submit(handle, {std::move(operation)});
  }

  bool keeps_residual(int handle) {
    std::lock_guard<std::mutex> lock(mutex_);
    return !find(handle).residual.empty();
  }

  void require_residual(int handle) {
    if (!keeps_residual(handle))
      throw Error(ErrorKind::kUsage, label() + ": the compression of the key with handle " + std::to_string(handle) +
                                         " leaves nothing out, so the key has no residual.");
  }

  void restore_residual(int handle, const float* residual) {
    require_residual(handle);
    std::lock_guard<std::mutex> lock(mutex_);
    Key& key = find(handle);
    if (key.round > 0)
      throw Error(ErrorKind::kUsage, label() + ": the residual of key '" + key.name +
                                         "' can only be restored before the key's first push.");
    std::copy_n(residual, key.elements, key.residual.data());
  }

  std::optional<KeyPlan> captured_plan(int handle) {
    std::lock_guard<std::mutex> lock(mutex_);
    return find(handle).captured_plan;
  }

  // --- keys of rows ------------------------------------------------------------------------------------------------

  // Throws Error(kUsage) if it is none.
  RowsShape rows_shape(int handle) {
    std::lock_guard<std::mutex> lock(mutex_);
    const Key& key = find(handle);
    if (key.row_elements == 0)
      throw Error(ErrorKind::kUsage, label() + ": key '" + key.name + "' is no key of rows; declare it as such.");
    return {key.name, key.elements / key.row_elements, key.row_elements, key.dtype};
  }

  // Fails the job if the key has no row of such an id.
  void check_ids(const RowsShape& shape, const int64_t* ids, uint64_t count) {
    const int64_t* const wrong =
        std::find_if(ids, ids + count, [&](int64_t id) { return id < 0 || static_cast<uint64_t>(id) >= shape.rows; });
    if (wrong == ids + count) return;
    transport_.fail(
        Error(ErrorKind::kDisagreement, label() + ": key '" + shape.name + "' has no row " + std::to_string(*wrong) +
                                            ": it has " + std::to_string(shape.rows) +
                                            " rows, which count from 0. Check the indices that the script uses."));
  }

  void route_rows(int handle, bool as_slices) {
    rows_shape(handle);
    std::lock_guard<std::mutex> lock(mutex_);
    Key& key = find(handle);
    key.as_blocks = key.counters.as_slices = as_slices;
    key.pushes = 0;
  }

  void choose_route(int handle, int pushes) {
    rows_shape(handle);
    std::lock_guard<std::mutex> lock(mutex_);
    find(handle).pushes = pushes;
  }

  void move_rows(int handle, const KeyPlan& plan, std::vector<uint8_t> parts, const RowRange& share, MoveDone done) {
    std::vector<Transport::Outgoing> frames;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      Key& key = find(handle);
      if (key.row_elements == 0 || plan.elements != key.elements || plan.dtype != key.dtype ||
          plan.row_elements != key.row_elements || plan.wire_key == 0 || !makes_sense(plan) ||
          share.first + share.count > row_count(plan))
        throw Error(ErrorKind::kUsage, label() + ": the rows of key '" + key.name + "' cannot move to such a plan.");
      key.successors[plan.wire_key] = {plan, std::move(parts), share, std::move(done)};
      handle_of_wire_key_[plan.wire_key] = handle;
      if (rank_ == 0) key.announced = plan.wire_key;
      begin_next(key, frames);
    }
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
    const bool orderly = transport_.finish(timeout_s, /*until_read=*/true) && idle;
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
    if (is_push(header.kind)) return receive_push_into(van, key, header);
    if (key.active && key.learns_round && header.kind == FrameKind::kValue) {
      key.learns_round = false;
      key.round = header.round;
    }
    if (!key.active || header.round != key.round || header.key != key.plan_in_use().wire_key)
      refuse(van, header, "out of turn");
    const Operation& operation = key.operations.front();
    if ((header.of_machine != 0) != (operation.is_round() && key.machine_sum != nullptr))
      refuse(van, header, "for another number of workers than agreed");
    if (operation.rows != nullptr) return place_of_rows(van, header, key);
    if (header.kind != (operation.is_round_or_init() ? FrameKind::kValue : FrameKind::kPart) ||
        header.part != operation.part)
      refuse(van, header, "unexpected");
    check_place(van, header, key);
    const DType type = operation.type(key.dtype);
    const auto encoding = static_cast<Encoding>(header.encoding);
    if (!may_come(encoding, operation, key)) refuse(van, header, "in another encoding than agreed");
    if (static_cast<DType>(header.dtype) != type) refuse(van, header, "wrongly sized");
    if (encoding == Encoding::kAbsent) return nullptr;
    const Slice slice = slice_at(*key.plan, header.slice);
    if (header.payload_bytes != encoded_bytes(encoding, type, slice.elements)) refuse(van, header, "wrongly sized");
    char* landing = static_cast<char*>(operation.landing) + slice.offset * size_of(type);
    return encoding == Encoding::kFloat16 ? landing + header.payload_bytes
                                          : landing;  // the second half: widen_in_place
  }

  [[noreturn]] void refuse(int van, const Header& header, const char* what) const override {
    throw slice_refused(label(), transport_.label(van), header, what, std::to_string(header.key));
  }

  void received(int van, const Header& header, void* payload) override {
    if (is_push(header.kind)) return leader_.received(van);
    const auto encoding = static_cast<Encoding>(header.encoding);
    if (encoding == Encoding::kFloat16)
      widen_in_place(reinterpret_cast<float*>(static_cast<char*>(payload) - header.payload_bytes),
                     header.payload_bytes / sizeof(uint16_t));
    const auto [active, rows] = under_way(header);
    Key& key = *active;
    bool updated = encoding != Encoding::kAbsent;
    if (rows != nullptr) {
      Frame own{header, payload};
      if (header.of_machine != 0) {
        const auto left = leader_.pass_on_rows(key, header, payload);
        if (!left) return;
        own = *left;
      }
      bool complete = false;
      const char* problem = rows->land(own.header, own.payload, complete);
      if (problem != nullptr) refuse(van, header, problem);
      if (!complete) return;
      if (key.to_land == 1) rows->finish(key.left_over);
      updated = rows->updated();
    }
    std::vector<Transport::Outgoing> frames;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      key.landed[header.slice] = true;
      --key.to_land;
      key.updated |= updated;
      if (header.of_machine != 0 && rows == nullptr) frames = leader_.pass_on_slice(key, header, payload);
    }
    if (!frames.empty()) transport_.send(frames, Transport::Write::kHere);
    count_down(key);
  }

  // One slice of the key's operation has landed, or one frame that borrows from it has left.
  void count_down(Key& key) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (--key.outstanding > 0) return;
    }
    complete(key);
  }

  // What is under way is complete: tells who asked for it, and begins the key's next operation.
  void complete(Key& key) {
    copy_residual(key);
    std::vector<Transport::Outgoing> frames;
    Done done;
    bool updated;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      complete_front(key);
      updated = key.updated;
      const Operation& operation = key.operations.front();
      if (operation.kind == Operation::Kind::kInit) key.catches_up = key.learns_round = false;
      done = std::move(key.operations.front().done);
      if (operation.successor != nullptr && operation.kind == Operation::Kind::kInit)
        done = adopt(key, *operation.successor);
      key.operations.pop_front();
      key.active = false;
      begin_next(key, frames);
    }
    transport_.send(frames);
    if (done) done(nullptr, updated);
    {
      // Only now: close() must not return before the last `done` has.
      std::lock_guard<std::mutex> lock(mutex_);
      --pending_;
    }
    idle_.notify_all();
  }

  // What the leader of a machine sends for it is lent, but for values, which leave from its landing arrays. All else is
  // this worker's own.
  void sent(const Frame& frame) override {
    const Header& header = frame.header;
    if (header.kind == FrameKind::kRows || (is_push(header.kind) && header.of_machine != 0))
      static_cast<Lender*>(frame.context)->taken_back();
    else
      count_down(*static_cast<Key*>(frame.context));
  }

  bool work() override {
    std::vector<Key*> complete_at_once;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (leader_left_) check_that_nothing_waits_for(leader_van_);
      complete_at_once.swap(complete_at_once_);
    }
    for (Key* key : complete_at_once) complete(*key);
    return leader_.work();
  }

  void left(int van) override {
    if (van == leader_van_ || leader_.place_of(van) > 0) {
      std::lock_guard<std::mutex> lock(mutex_);
      leader_left_ = van == leader_van_;
      if (!leader_left_) leader_.note_departure(van);
      check_that_nothing_waits_for(van);
    }
    if (server_of_van_[static_cast<size_t>(van)] < 0) return;
    throw Error(ErrorKind::kPeerLost, label() + ": " + transport_.label(van) + " left the job" + waiting_for(van) +
                                          " while this worker still runs.");
  }

  std::string waiting_for(int van) const override {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto awaited = awaited_from(van);
    if (!awaited) return {};
    return " while waiting for round " + std::to_string(awaited->round) + " of key '" + awaited->key->name + "'";
  }

  uint64_t last_round() const override { return last_round_; }

  void look(Clock::time_point now) override {
    if (!leader_.leads()) return;
    std::lock_guard<std::mutex> lock(mutex_);
    LateWorkers late;
    for (const Key& key : keys_)
      if (key.machine_sum != nullptr) leader_.note_late(key, now, late);
    late_ = late.take();
  }

  std::vector<Late> late() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return late_;
  }

  void failed(const Error& error) override {
    std::vector<Done> pending;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (!failure_) failure_ = error;
      complete_at_once_.clear();
      for (Key& key : keys_) {
        for (Operation& operation : key.operations) pending.push_back(std::move(operation.done));
        key.operations.clear();
        pending_ -= std::exchange(key.next_plan, 0) != 0;  // a move that waits for its plan
        key.active = false;
      }
    }
    for (const Done& done : pending)
      if (done) done(&*failure_, false);
    {
      std::lock_guard<std::mutex> lock(mutex_);
      pending_ -= pending.size();
    }
    idle_.notify_all();
  }

  int rank() const { return rank_; }
  Transport& transport() { return transport_; }
  const std::string& label() const { return transport_.options().label; }

  Counters counters() const {
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

  // The key of an answer, and what it answers to if that is about rows. They stay while the receiver works on the answer.
  std::pair<Key*, RowsTransfer*> under_way(const Header& header) {
    std::lock_guard<std::mutex> lock(mutex_);
    Key& key = keys_[static_cast<size_t>(handle_of_wire_key_.at(header.key))];
    return {&key, key.operations.front().rows.get()};
  }

  void check_place(int van, const Header& header, const Key& key) const {
    if (header.slice >= slice_count(key.plan_in_use()) || key.landed[header.slice] ||
        van_of(key, key.operations.front(), header.slice) != van)
      refuse(van, header, "misplaced");
    if (header.of_machine != 0 && !key.machine_sum->is_awaiting(header.slice))
      refuse(van, header, "an answer to no push");
  }

  // With the lock held.
  void* place_of_rows(int van, const Header& header, const Key& key) {
    check_place(van, header, key);
    RowsTransfer& rows = *key.operations.front().rows;
    if (const char* problem = rows.problem_with(header)) refuse(van, header, problem);
    if (void* place = rows.place_of(header)) return place;
    std::vector<char>& arriving = arriving_rows_[static_cast<size_t>(van)];
    arriving.resize(header.payload_bytes);
    return arriving.data();
  }

  static bool may_come(Encoding encoding, const Operation& operation, const Key& key) {
    switch (encoding) {
      case Encoding::kPlain:
        return operation.kind != Operation::Kind::kStore && operation.kind != Operation::Kind::kCapture;
      case Encoding::kFloat16:
        return (operation.is_round() || key.catches_up) && key.compression.encoding == Encoding::kFloat16;
      case Encoding::kAbsent:
        return operation.kind == Operation::Kind::kStore || operation.kind == Operation::Kind::kSkip ||
               operation.kind == Operation::Kind::kCapture;
      default:
        return false;
    }
  }

  // Between two rounds of the key, without the lock: nothing else touches the residual, and it may be large.
  void copy_residual(const Key& key) {
    void* landing;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      const Operation& operation = key.operations.front();
      landing = operation.kind == Operation::Kind::kCapture ? operation.landing : nullptr;
    }
    if (landing != nullptr) std::copy(key.residual.begin(), key.residual.end(), static_cast<float*>(landing));
  }

  void complete_front(Key& key) {
    const Operation& operation = key.operations.front();
    ++rounds_;
    if (operation.rows != nullptr && operation.is_round()) {
      note_rows(*operation.rows, key);
      key.next_plan = operation.rows->round().next_plan;
      if (key.next_plan != 0) ++pending_;  // the move, until its operations are there
      const RowsOfRound& round = operation.rows->round();
      if (key.pushes > 0 && operation.rows->updated())
        key.as_blocks = key.counters.as_slices =
            slices_are_cheaper(*key.plan, key.pushes, {round.pushed, round.touched}, operation.rows->holds_value());
    }
    if (operation.is_round() && key.round > last_round_) last_round_ = key.round;
    if (operation.kind != Operation::Kind::kPush) return;
    const double waited_s = std::chrono::duration<double>(Clock::now() - operation.asked_at).count();
    ++key.counters.rounds;
    key.counters.completed_s = std::chrono::duration<double>(Clock::now().time_since_epoch()).count();
    key.counters.waited_s += waited_s;
    key.counters.longest_wait_s = std::max(key.counters.longest_wait_s, waited_s);
  }

  static void note_rows(const RowsTransfer& rows, Key& key) {
    KeyCounters& counters = key.counters;
    counters.own_rows = rows.own_rows();
    counters.pushed_rows = rows.round().pushed;
    counters.touched_rows = rows.round().touched;
    counters.row_bytes_sent += key.machine_sum == nullptr
                                   ? rows.bytes_sent()
                                   : static_cast<MachineRows&>(*key.machine_sum).take_pushed_bytes();
    counters.row_bytes_received += rows.bytes_received();
  }

  // Cuts the key's next operation into frames, unless one is under way or the plan is not known yet.
  void begin_next(Key& key, std::vector<Transport::Outgoing>& frames) {
    if (key.active || !key.plan || failure_) return;
    if (key.next_plan != 0 && !begin_to_move(key)) return;
    if (key.operations.empty()) return;
    if (key.catches_up) begin_to_catch_up(key);
    const Operation& operation = key.operations.front();
    key.active = true;
    const KeyPlan& plan = key.plan_in_use();
    const uint32_t count = slice_count(plan);
    key.updated = false;
    if (operation.is_round()) ++key.round;
    const bool sums_here = operation.is_round() && key.machine_sum != nullptr;
    key.outstanding = key.to_land = count;
    if (sums_here && operation.rows == nullptr) key.outstanding += count * static_cast<uint32_t>(leader_.members());
    key.landed.assign(count, false);
    if (operation.kind == Operation::Kind::kCapture) {
      key.captured_plan = plan;
      if (rank_ != 0) return begin_what_asks_nobody(key);
    }

    Header header;
    header.kind = frame_kind(operation.kind, operation.rows != nullptr);
    header.dtype = static_cast<uint8_t>(operation.type(key.dtype));
    header.part = operation.part;
    header.key = plan.wire_key;
    header.round = key.round;
    header.priority = operation.priority;
    header.scalars = operation.scalars;
    if (operation.is_round()) trace_at(recorder(), operation.asked_at, TraceKind::kReady, header);
    if (operation.rows != nullptr)
      begin_rows(key, header, frames);
    else
      begin_slices(key, header, frames);
    if (sums_here || leader_left_) transport_.ask_for_work();
  }

  // It is complete as soon as the receiver comes to it.
  void begin_what_asks_nobody(Key& key) {
    key.outstanding = key.to_land = 0;
    key.landed.assign(key.landed.size(), true);
    complete_at_once_.push_back(&key);
    transport_.ask_for_work();
  }

  void begin_to_catch_up(Key& key) {
    const std::shared_ptr<std::vector<Operation>> instead = key.operations.front().to_catch_up;
    if (instead != nullptr) {
      pending_ += instead->size();
      pending_ -= 2;
      key.operations.erase(key.operations.begin(), key.operations.begin() + 2);
      key.operations.insert(key.operations.begin(), std::make_move_iterator(instead->begin()),
                            std::make_move_iterator(instead->end()));
    }
    Operation& operation = key.operations.front();
    if (operation.kind != Operation::Kind::kInit) return;
    operation.data = nullptr;
    key.learns_round = true;
  }

  void begin_slices(Key& key, const Header& header, std::vector<Transport::Outgoing>& frames) {
    const Operation& operation = key.operations.front();
    const DType type = operation.type(key.dtype);
    Encoding encoding = operation.data == nullptr ? Encoding::kAbsent : Encoding::kPlain;
    if (operation.kind == Operation::Kind::kPush) encoding = key.compression.encoding;
    Frame frame;
    frame.header = header;
    frame.header.encoding = static_cast<uint8_t>(encoding);
    if (encoding != Encoding::kPlain && encoding != Encoding::kAbsent) frame.encoder = &key;
    for (uint32_t i = 0; i < slice_count(*key.plan); ++i) {
      frame.header.slice = i;
      if (operation.data != nullptr) {
        const Slice slice = slice_at(*key.plan, i);
        frame.header.payload_bytes = static_cast<uint32_t>(encoded_bytes(encoding, type, slice.elements));
        frame.payload = static_cast<const char*>(operation.data) + slice.offset * size_of(type);
      }
      begin_frame(key, frame, frames);
    }
  }

  // Sends a frame of the operation under way, or adds it to this machine's sum. What it borrows stays until it has left,
  // even if a peer answers what it has not been asked yet.
  void begin_frame(Key& key, Frame frame, std::vector<Transport::Outgoing>& frames) {
    const Operation& operation = key.operations.front();
    if (operation.is_round() && key.machine_sum != nullptr) return leader_.bring(key, frame);
    if (frame.payload != nullptr || frame.encoder != nullptr) {
      frame.context = &key;
      ++key.outstanding;
    }
    frames.push_back({van_of(key, operation, frame.header.slice), frame});
  }

  // Where a slice of the operation goes, and its answer comes from.
  int van_of(const Key& key, const Operation& operation, uint32_t slice) const {
    if (operation.is_round() && key.by_leader) return leader_van_;
    return van_of_server_[static_cast<size_t>(server_of(key.plan_in_use(), slice, num_servers_))];
  }

  // --- the leader of a machine, and who follows it ------------------------------------------------------------------

  // With the lock held.
  void* receive_push_into(int van, const Key& key, const Header& header) {
    const int place = leader_.place_of(van);
    if (place == 0 || key.machine_sum == nullptr) refuse(van, header, "unexpected");
    if (const char* problem = key.machine_sum->problem_with(place, header)) refuse(van, header, problem);
    leader_.check_that_nobody_left(key, header.round);
    return leader_.room_for(van, key, header);
  }

  // With the lock held.
  void check_that_nothing_waits_for(int van) const {
    if (const auto awaited = awaited_from(van))
      throw left_too_early(label(), transport_.label(van), push_of(awaited->key->name, awaited->round));
  }

  // What this worker needs of that peer, if anything. With the lock held.
  std::optional<Awaited> awaited_from(int van) const {
    const int place = leader_.place_of(van);
    for (const Key& key : keys_) {
      if (place > 0 && key.machine_sum != nullptr)
        if (const auto round = key.machine_sum->waits_for(place)) return Awaited{&key, *round};
      if (place > 0 || !key.active) continue;
      for (uint32_t i = 0; i < slice_count(key.plan_in_use()); ++i)
        if (!key.landed[i] && van_of(key, key.operations.front(), i) == van) return Awaited{&key, key.round};
    }
    return {};
  }

  // False if the plan that the key goes over to is not known here yet.
  bool begin_to_move(Key& key) {
    const auto found = key.successors.find(key.next_plan);
    if (found == key.successors.end()) return false;
    if (key.machine_sum != nullptr) key.machine_sum = leader_.sum_of(found->second.plan, key.round + 1);
    const RowsShape shape{key.name, key.elements / key.row_elements, key.row_elements, key.dtype};
    std::vector<Operation> moving = p3::move_rows(shape, found->second);
    pending_ += moving.size() - 1;  // the move itself was pending
    key.operations.insert(key.operations.begin(), std::make_move_iterator(moving.begin()),
                          std::make_move_iterator(moving.end()));
    key.next_plan = 0;
    return true;
  }

  // The last operation of a move is complete. Returns what tells the caller.
  Done adopt(Key& key, const Successor& successor) {
    const uint32_t former = key.plan->wire_key;
    handle_of_wire_key_.erase(former);
    key.plan = successor.plan;
    Done told = [done = successor.done, former](const Error*, bool) { done(former); };
    key.successors.erase(key.plan->wire_key);
    return told;
  }

  void begin_rows(Key& key, const Header& header, std::vector<Transport::Outgoing>& frames) {
    RowsTransfer& rows = *key.operations.front().rows;
    const bool tells = header.kind == FrameKind::kPushRows && key.operations.front().kind == Operation::Kind::kPush;
    const uint32_t next_plan = tells ? std::exchange(key.announced, 0) : 0;
    for (const Frame& frame : rows.begin(key.plan_in_use(), header, key.as_blocks, next_plan))
      begin_frame(key, frame, frames);
    for (uint32_t i = 0; i < key.landed.size(); ++i) {
      if (rows.asks(i)) continue;
      key.landed[i] = true;
      --key.outstanding;
      --key.to_land;
    }
  }

  static FrameKind frame_kind(Operation::Kind kind, bool of_rows) {
    switch (kind) {
      case Operation::Kind::kInit:
        return FrameKind::kInit;
      case Operation::Kind::kFetch:
        return of_rows ? FrameKind::kFetchRows : FrameKind::kFetch;
      case Operation::Kind::kStore:
        return of_rows ? FrameKind::kStoreRows : FrameKind::kStore;
      case Operation::Kind::kCapture:
        return FrameKind::kCapture;
      default:
        return of_rows ? FrameKind::kPushRows : FrameKind::kPush;
    }
  }

  std::string waiting_for_any() const {
    std::vector<int> vans = van_of_server_;
    if (leader_van_ >= 0) vans.push_back(leader_van_);
    for (int van : vans) {
      const std::string text = waiting_for(van);
      if (!text.empty()) return text;
    }
    return {};
  }

  const int rank_;
  const int num_servers_;
  std::vector<int> van_of_server_;
  std::vector<int> server_of_van_;  // -1: only watched, or a worker of this machine

  int leader_van_ = -1;   // to the leader of this machine, if that is another worker
  MachineLeader leader_;  // if it is this one

  mutable std::mutex mutex_;
  std::condition_variable idle_;
  std::vector<std::vector<char>> arriving_rows_;  // receiver thread: by van, the payload being received
  std::deque<Key> keys_;                          // a deque: keys stay where they are
  std::unordered_map<uint32_t, int> handle_of_wire_key_;
  std::vector<Key*> complete_at_once_;  // whose operation under way asks no other node
  bool leader_left_ = false;
  size_t pending_ = 0;  // operations whose `done` has not returned
  std::optional<Error> failure_;
  std::atomic<uint64_t> rounds_{0};
  std::atomic<uint64_t> last_round_{0};  // written with the lock held
  std::vector<Late> late_;               // of this machine, if this worker leads it

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
void Worker::add_local(int worker, std::unique_ptr<Stream> stream, std::string label) {
  impl_->add_local(worker, std::move(stream), std::move(label));
}
void Worker::start() { impl_->start(); }

int Worker::declare(std::string name, uint64_t elements, DType dtype, const Compression& compression) {
  return impl_->declare(std::move(name), elements, dtype, compression);
}

void Worker::agree(int key, const KeyPlan& plan, bool catches_up) { impl_->agree(key, plan, catches_up); }

void Worker::init(int key, const void* value, void* landing, int32_t priority, Done done) {
  const void* const data = impl_->rank() == 0 ? value : nullptr;  // rank 0's value is the job's
  impl_->submit(key, {{Operation::Kind::kInit, std::move(done), data, landing, priority}});
}

void Worker::push(int key, const void* gradient, void* landing, int32_t priority, const RoundScalars& scalars,
                  Done done) {
  impl_->submit(key, {{Operation::Kind::kPush, std::move(done), gradient, landing, priority, scalars}});
}

void Worker::skip(int key, void* landing, int32_t priority, Done done) {
  impl_->submit(key, {{Operation::Kind::kSkip, std::move(done), nullptr, landing, priority}});
}

int Worker::declare_rows(std::string name, uint64_t rows, uint64_t row_elements, DType dtype) {
  return impl_->declare_rows(std::move(name), rows, row_elements, dtype);
}

void Worker::init_rows(int key, const void* value, void* landing, int32_t priority, Done done) {
  const RowsShape shape = impl_->rows_shape(key);
  impl_->submit(key, p3::init_rows(shape, impl_->rank() == 0, value, landing, priority, std::move(done)));
}

void Worker::push_rows(int key, const RowsView& gradient, void* landing, int32_t priority, const RoundScalars& scalars,
                       RowsDone done) {
  const RowsShape shape = impl_->rows_shape(key);
  impl_->check_ids(shape, gradient.ids, gradient.count);
  impl_->submit(key, {p3::push_rows(shape, gradient, landing, priority, scalars, std::move(done))});
}

void Worker::skip_rows(int key, void* landing, int32_t priority, Done done) {
  impl_->submit(key, {p3::skip_rows(landing, priority, std::move(done))});
}

void Worker::fetch_rows(int key, uint8_t part, const int64_t* ids, uint64_t count, void* landing, int32_t priority,
                        Done done) {
  impl_->check_ids(impl_->rows_shape(key), ids, count);
  impl_->submit(key, {p3::fetch_rows(part, {ids, count, nullptr}, landing, priority, std::move(done))});
}

void Worker::store_rows(int key, uint8_t part, const RowsView& content, Done done) {
  const RowsShape shape = impl_->rows_shape(key);
  impl_->check_ids(shape, content.ids, content.count);
  if (!is_ascending(content.ids, content.count))
    throw Error(ErrorKind::kUsage,
                impl_->label() + ": key '" + shape.name + "': the ids of rows to store must ascend, each once.");
  impl_->submit(key, {p3::store_rows(part, content, std::move(done))});
}

void Worker::move_rows(int key, const KeyPlan& plan, std::vector<uint8_t> parts, const RowRange& share, MoveDone done) {
  impl_->move_rows(key, plan, std::move(parts), share, std::move(done));
}

void Worker::route_rows(int key, bool as_slices) { impl_->route_rows(key, as_slices); }
void Worker::choose_route(int key, int pushes) { impl_->choose_route(key, pushes); }

void Worker::fetch(int key, uint8_t part, void* landing, Done done) {
  impl_->submit(key, {{Operation::Kind::kFetch, std::move(done), nullptr, landing, 0, {}, part}});
}

void Worker::store(int key, uint8_t part, const void* content, Done done) {
  impl_->submit(key, {{Operation::Kind::kStore, std::move(done), content, nullptr, 0, {}, part}});
}

void Worker::capture(int key, uint64_t snapshot, float* residual, Done done) {
  impl_->capture(key, snapshot, residual, std::move(done));
}
bool Worker::keeps_residual(int key) const { return impl_->keeps_residual(key); }
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
  impl_.release();  // its threads and locks belong to the parent
}

}  // namespace p3
