#include "worker/ways/rows/rows_way.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <numeric>
#include <string>
#include <utility>

#include "numeric/sorted_rows.h"
#include "plan/rows.h"
#include "worker/key.h"
#include "worker/ways/rows/machine_rows.h"
#include "worker/ways/rows/rows_transfer.h"
#include "worker/worker_impl.h"

namespace p3 {
namespace {

using Ids = std::vector<int64_t>;
using Kind = Transfer::Kind;

constexpr char kNoRows[] = "is no key of rows; declare it as such";

std::shared_ptr<Ids> neighbours(const RowRange& range) {
  auto ids = std::make_shared<Ids>(range.count);
  std::iota(ids->begin(), ids->end(), static_cast<int64_t>(range.first));
  return ids;
}

}  // namespace

uint64_t RowsWay::rows() const { return row_count(key.declared); }
size_t RowsWay::row_bytes(uint8_t part) const {
  const DType type = key.declared.dtype;
  return key.declared.row_elements * size_of(part == 0 ? type : sum_type(type));
}

std::vector<Operation> RowsWay::init(const void* value, void* landing, int32_t priority, Worker::Done done) {
  return init_as(host_.is_first, value, landing, priority, std::move(done));
}

// The first worker's rows go to the servers; all learn that they are there; who lacks them fetches them.
std::vector<Operation> RowsWay::init_as(bool gives, const void* value, void* landing, int32_t priority,
                                        Worker::Done done) {
  const auto all_rows = [&](Kind kind) {
    const auto ids = neighbours({0, rows()});
    const RowsView view{ids->data(), ids->size(), kind == Kind::kStore ? value : nullptr};
    return std::make_shared<RowsTransfer>(kind, *this, view, kind == Kind::kStore ? nullptr : landing, 0, ids);
  };
  std::vector<Operation> operations;
  if (gives) {
    const auto stored = all_rows(Kind::kStore);
    stored->to_catch_up = init_as(false, nullptr, landing, priority, done);
    operations.push_back({stored, nullptr, priority});
    operations.back().scalars.updates = 1;  // so that servers with staleness know it for the beginning of an init
    const size_t nbytes = landing == nullptr || landing == value ? 0 : bytes(0);
    done = [=, told = std::move(done)](const Error* error, bool updated) {
      if (error == nullptr && nbytes > 0) std::memcpy(landing, value, nbytes);
      told(error, updated);
    };
  }
  operations.push_back({std::make_shared<RowsTransfer>(Kind::kInit, *this, RowsView{}, nullptr), nullptr, priority});
  if (!gives && landing != nullptr) operations.push_back({all_rows(Kind::kFetch), nullptr, priority});
  operations.back().done = std::move(done);
  return operations;
}

std::shared_ptr<Transfer> RowsWay::skip(void* landing, bool gated, bool goes_on) {
  if (gated) refuse_slices();
  return std::make_shared<RowsTransfer>(Kind::kSkip, *this, RowsView{}, landing, 0, nullptr, goes_on);
}

void RowsWay::check_ids(const int64_t* ids, uint64_t count) const {
  const int64_t* const wrong =
      std::find_if(ids, ids + count, [&](int64_t id) { return id < 0 || static_cast<uint64_t>(id) >= rows(); });
  if (wrong == ids + count) return;
  host_.fail(Error(ErrorKind::kDisagreement, host_.label() + ": key '" + key.name + "' has no row " +
                                                 std::to_string(*wrong) + ": it has " + std::to_string(rows()) +
                                                 " rows, which count from 0. Check the indices that the script uses."));
}

std::shared_ptr<MachineSum> RowsWay::sum_on(const Machine& machine, const KeyPlan& plan, uint64_t next_round) {
  return std::make_shared<MachineRows>(machine, plan, next_round);
}

// This worker's share of the rows is fetched with the first plan and stored with the second, part by part; once all
// workers' are there, the servers answer the init of the second.
std::vector<Operation> RowsWay::begin_to_move() {
  const auto found = successors.find(next_plan);
  if (found == successors.end()) return {};
  const Successor& successor = found->second;
  const auto plan = std::make_shared<const KeyPlan>(successor.plan);
  const auto ids = neighbours(successor.share);
  const auto values = std::make_shared<std::vector<char>>(ids->size() * row_bytes(kMaster));
  const RowsView view{ids->data(), ids->size(), values->data()};
  const auto memory = std::make_shared<std::pair<decltype(ids), decltype(values)>>(ids, values);
  const auto add = [&](std::vector<Operation>& to, Kind kind, const RowsView& rows, void* landing, uint8_t part) {
    to.push_back({std::make_shared<RowsTransfer>(kind, *this, rows, landing, part, memory), nullptr});
    if (kind != Kind::kFetch) to.back().plan = plan;
  };
  std::vector<Operation> operations;
  for (uint8_t part : successor.parts) {
    add(operations, Kind::kFetch, view, values->data(), part);
    add(operations, Kind::kStore, view, nullptr, part);
  }
  add(operations, Kind::kInit, {}, nullptr, 0);
  operations.back().done = [done = successor.done](const Error* error, bool updated) {
    if (error == nullptr && done) done(error, updated);  // else the key has not moved
  };
  successors.erase(found);
  next_plan = 0;
  return operations;
}

// --- what Worker has for such keys alone ---------------------------------------------------------------------------

int Worker::declare_rows(std::string name, uint64_t rows, uint64_t row_elements, DType dtype) {
  if (row_elements == 0 || row_elements > std::numeric_limits<uint32_t>::max())
    impl_->refuse_call("key '" + name + "' has rows of " + std::to_string(row_elements) +
                       " elements; a row has at least one, and less than 2^32");
  KeyPlan declared;
  declared.elements = rows * row_elements;
  declared.dtype = dtype;
  declared.row_elements = static_cast<uint32_t>(row_elements);
  return impl_->add_key<RowsWay>(std::move(name), declared);
}

size_t Worker::row_bytes(int key, uint8_t part) const { return impl_->way_of<RowsWay>(key, kNoRows).row_bytes(part); }

void Worker::push_rows(int key, const RowsView& gradient, void* landing, int32_t priority,
                       const RoundSettings& settings, RowsDone done) {
  auto& way = impl_->way_of<RowsWay>(key, kNoRows);
  way.check_ids(gradient.ids, gradient.count);
  RowsView rows = gradient;
  std::shared_ptr<const SortedRows> sorted;
  if (!is_ascending(gradient.ids, gradient.count)) {
    sorted = std::make_shared<const SortedRows>(gradient, way.key.declared.dtype, way.key.declared.row_elements);
    rows = sorted->view();
  }
  const auto transfer = std::make_shared<RowsTransfer>(Kind::kPush, way, rows, landing, 0, std::move(sorted));
  auto told = [transfer, done = std::move(done)](const Error* error, bool) {
    done(error, {transfer->changed().data(), transfer->changed().size(), nullptr});
  };
  Operation operation{transfer, std::move(told), priority, settings.scalars};
  operation.fields = settings.fields;
  impl_->submit(way.key, {std::move(operation)});
}

void Worker::fetch_rows(int key, uint8_t part, const int64_t* ids, uint64_t count, void* landing, int32_t priority,
                        Done done) {
  auto& way = impl_->way_of<RowsWay>(key, kNoRows);
  way.check_ids(ids, count);
  auto transfer = std::make_shared<RowsTransfer>(Kind::kFetch, way, RowsView{ids, count, nullptr}, landing, part);
  impl_->submit(way.key, {{std::move(transfer), std::move(done), priority}});
}

void Worker::store_rows(int key, uint8_t part, const RowsView& content, Done done, uint64_t updates) {
  auto& way = impl_->way_of<RowsWay>(key, kNoRows);
  way.check_ids(content.ids, content.count);
  if (!is_ascending(content.ids, content.count))
    impl_->refuse_call("key '" + way.key.name + "': the ids of rows to store must ascend, each once");
  Operation operation{std::make_shared<RowsTransfer>(Kind::kStore, way, content, nullptr, part), std::move(done)};
  if (part > 0) operation.scalars.updates = static_cast<double>(updates);
  impl_->submit(way.key, {std::move(operation)});
}

void Worker::choose_route(int key, int pushes, bool as_slices) {
  auto& way = impl_->way_of<RowsWay>(key, kNoRows);
  MutexLock lock(impl_->mutex_);
  way.pushes = pushes;
  way.counters.as_slices = as_slices;
}

void Worker::move_rows(int handle, const KeyPlan& plan, std::vector<uint8_t> parts, const RowRange& share, Done done) {
  auto& way = impl_->way_of<RowsWay>(handle, kNoRows);
  Key& key = way.key;
  std::vector<Transport::Outgoing> frames;
  {
    MutexLock lock(impl_->mutex_);
    if (!plan.can_follow(key.declared) || !key.fits(plan) || plan.wire_key == 0 ||
        share.first + share.count > row_count(plan))
      impl_->refuse_call("the rows of key '" + key.name + "' cannot move to such a plan");
    way.successors[plan.wire_key] = {plan, std::move(parts), share, std::move(done)};
    impl_->add_wire_key(key, handle, plan.wire_key);
    if (impl_->rank == 0) way.announced = plan.wire_key;
    impl_->begin_next(key, frames);
  }
  impl_->transport_.send(frames);
}

}  // namespace p3
