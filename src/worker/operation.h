// What a worker has been asked to do, and the keys that it is about.
// Threads: none of their own; the Worker's lock, but for what a member says.
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "worker/machine_sum.h"
#include "transport/van.h"
#include "p3/worker.h"
#include "worker/rows_transfer.h"

namespace p3 {

// Another plan of a key of rows, to which its rows move.
struct Successor {
  KeyPlan plan;
  std::vector<uint8_t> parts;
  RowRange share;
  Worker::MoveDone done;
};

// Something asked for about one key, and not yet complete.
struct Operation {
  enum class Kind { kInit, kPush, kSkip, kFetch, kStore, kCapture } kind;
  Worker::Done done;
  const void* data = nullptr;  // what goes out
  void* landing = nullptr;     // where the answer comes in; kCapture: the residual
  int32_t priority = 0;
  RoundScalars scalars{};
  uint8_t part = 0;
  std::shared_ptr<RowsTransfer> rows = nullptr;  // of a key of rows, instead of `data` and `landing`
  const Successor* successor = nullptr;          // whose plan it is about, instead of the key's
  // Instead of this one and the next, if the key catches up.
  std::shared_ptr<std::vector<Operation>> to_catch_up = nullptr;
  std::chrono::steady_clock::time_point asked_at = std::chrono::steady_clock::now();

  bool is_round() const { return kind == Kind::kPush || kind == Kind::kSkip; }
  bool is_round_or_init() const { return is_round() || kind == Kind::kInit; }
  bool is_about_a_part() const { return kind == Kind::kFetch || kind == Kind::kStore; }
  // Of rows, part 0 is the value.
  DType type(DType of_key) const {
    return is_about_a_part() && !(rows != nullptr && part == 0) ? sum_type(of_key) : of_key;
  }
};

struct Key final : Encoder {
  std::string name;
  uint64_t elements = 0;
  DType dtype = DType::kFloat32;
  uint32_t row_elements = 0;  // 0: a dense key
  Compression compression;
  std::vector<float> residual;     // what compression has left out so far
  bool as_blocks = false;          // route_rows
  int pushes = 0;                  // choose_route; 0: the route is fixed
  std::vector<int64_t> left_over;  // receiver thread: RowsTransfer::finish
  std::optional<KeyPlan> plan;
  std::optional<KeyPlan> captured_plan;
  std::map<uint32_t, Successor> successors;  // by wire key
  uint32_t next_plan = 0;                    // the successor that the next operation waits for; 0: none
  uint32_t announced = 0;                    // on rank 0: the one that the next push tells of
  uint64_t round = 0;                        // the last one begun
  std::deque<Operation> operations;          // the front one is under way if `active`
  bool active = false;
  bool catches_up = false;    // until its first init is complete, which brings a value and its round
  bool learns_round = false;  // the first slice of that value tells the round
  bool updated = false;       // a slice of the front one has come with a value
  uint32_t outstanding = 0;   // slices that must land, and frames that must leave, before it is complete
  uint32_t to_land = 0;       // those slices
  std::vector<bool> landed;
  bool by_leader = false;                   // its rounds go through the leader of this machine, another worker
  std::shared_ptr<MachineSum> machine_sum;  // this worker leads, and adds up its rounds
  KeyCounters counters;

  // Of the operation under way.
  const KeyPlan& plan_in_use() const {
    return active && operations.front().successor != nullptr ? operations.front().successor->plan : *plan;
  }

  // On the thread that sends; the slices of one round are apart, and rounds follow each other.
  void encode(const Header& header, const void* source, void* payload) override {
    const Slice slice = slice_at(*plan, header.slice);
    float* left_out = residual.empty() ? nullptr : residual.data() + slice.offset;
    p3::encode(compression, static_cast<const float*>(source), left_out, payload, slice.elements);
  }
};

// What stays of a key of rows, and its operations need to know.
struct RowsShape {
  std::string name;
  uint64_t rows = 0;
  uint32_t row_elements = 0;
  DType dtype = DType::kFloat32;
};

// Operations on a key of rows, as Worker's methods describe them. The first value is several: rank 0's rows go to the
// servers; all learn that they are there; who lacks them fetches them.
std::vector<Operation> init_rows(const RowsShape& shape, bool is_rank_0, const void* value, void* landing,
                                 int32_t priority, Worker::Done done);
Operation push_rows(const RowsShape& shape, const RowsView& gradient, void* landing, int32_t priority,
                    const RoundScalars& scalars, Worker::RowsDone done);
Operation skip_rows(void* landing, int32_t priority, Worker::Done done);
Operation fetch_rows(uint8_t part, const RowsView& wished, void* landing, int32_t priority, Worker::Done done);
Operation store_rows(uint8_t part, const RowsView& content, Worker::Done done);
// A worker's share of a move to another plan: the rows are fetched with the first and stored with the second, part by
// part; once all workers' are there, the servers answer the wish for them.
std::vector<Operation> move_rows(const RowsShape& shape, const Successor& successor);

}  // namespace p3
