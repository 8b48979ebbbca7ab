// A key of rows on its worker: each round the rows that its gradient touches leave, and those come back that the round
// has changed. Only such a key goes over to another plan.
//
// Threads: what the members hold, with the Worker's lock held; left_over, the receiver thread's.
// Memory: of each plan that is announced, its parts' numbers; the ids of rows that hold sums.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "p3/rows.h"
#include "worker/way.h"

namespace p3 {

// Another plan of a key of rows, to which its rows move.
struct Successor {
  KeyPlan plan;
  std::vector<uint8_t> parts;
  RowRange share;
  Worker::Done done;
};

class RowsWay final : public Way {
 public:
  RowsWay(Key& its_key, WayHost& host) : Way(its_key, host, kRowsFrames) { counters.has_rows = true; }

  RowsCounters counters;
  int pushes = 0;                            // choose_route
  std::vector<int64_t> left_over;            // rows of the landing array that hold sums of the last round
  uint32_t announced = 0;                    // on rank 0: the wire key of the plan that the next push tells of
  uint32_t next_plan = 0;                    // that of the plan that the key moves to
  std::map<uint32_t, Successor> successors;  // by wire key

  uint64_t rows() const;
  size_t row_bytes(uint8_t part) const;

  std::vector<Operation> init(const void* value, void* landing, int32_t priority, Worker::Done done) override;
  std::shared_ptr<Transfer> skip(void* landing, bool gated, bool goes_on) override;
  // Worker has others for these.
  std::shared_ptr<Transfer> push(const void*, void*, bool) override { refuse_slices(); }
  std::shared_ptr<Transfer> fetch(uint8_t, void*) override { refuse_slices(); }
  std::shared_ptr<Transfer> store(uint8_t, const void*) override { refuse_slices(); }

  std::shared_ptr<MachineSum> sum_on(const Machine& machine, const KeyPlan& plan, uint64_t next_round) override;
  std::vector<Operation> begin_to_move() override;
  // Fails the job if the key has no row of such an id.
  void check_ids(const int64_t* ids, uint64_t count) const;
  void report(KeyCounters& all) const override { static_cast<RowsCounters&>(all) = counters; }

 private:
  [[noreturn]] void refuse_slices() const { refuse("is a key of rows; use push_rows and its like"); }
  std::vector<Operation> init_as(bool gives, const void* value, void* landing, int32_t priority, Worker::Done done);
};

}  // namespace p3
