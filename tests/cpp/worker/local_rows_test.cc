// Keys of rows where workers share machines: real jobs, and leaders and servers whose peers are played by the test.
#include <gtest/gtest.h>

#include <cstring>
#include <map>
#include <numeric>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "plan/rows.h"
#include "worker/local_job.h"

namespace p3 {
namespace {

constexpr uint64_t kRows = 40;
constexpr uint32_t kRow = 3;  // elements of a row

KeyPlan plan_of(DType dtype = DType::kFloat32) {
  KeyPlan plan;
  plan.wire_key = 3;
  plan.elements = kRows * kRow;
  plan.dtype = dtype;
  plan.row_elements = kRow;
  plan.partitions = 3;
  plan.slice_elements = 4 * kRow;
  return plan;
}

template <typename T>
struct Rows {
  std::vector<int64_t> ids;
  std::vector<T> values;
  RowsView view() const { return {ids.data(), ids.size(), values.data()}; }
};

template <typename T>
struct RowsJob : Job {
  RowsJob(const std::vector<int>& machines, bool aggregated, SumOrder order = SumOrder::kRank)
      : Job(machines, aggregated, order), landings(machines.size(), std::vector<T>(kRows * kRow)) {}

  void start(DType dtype = DType::kFloat32) {
    plan.dtype = dtype;
    server->define(plan, "emb", 0);
    const std::vector<T> zeros(kRows * kRow);
    for (size_t i = 0; i < workers.size(); ++i) {
      key = workers[i]->declare_rows("emb", kRows, kRow, dtype);
      workers[i]->agree(key, plan);
      workers[i]->init(key, zeros.data(), landings[i].data(), 0, pending.done());
    }
    EXPECT_EQ(pending.wait_for(workers.size()), "");
  }

  void push(size_t worker, const Rows<T>& rows, bool lands = true, const RoundSettings& settings = {}) {
    workers[worker]->push_rows(key, rows.view(), lands ? landings[worker].data() : nullptr, 0, settings,
                               [done = pending.done()](const Error* error, const RowsView&) { done(error, true); });
  }

  int key = 0;
  KeyPlan plan = plan_of();
  std::vector<std::vector<T>> landings;
};

// Some rows, none, or all of them, whose sums depend on the order of adding.
template <typename T>
Rows<T> random_rows(unsigned seed) {
  std::mt19937 random(seed);
  const unsigned share = random() % 4;  // 0: none, 1: all
  Rows<T> rows;
  for (int64_t id = 0; id < static_cast<int64_t>(kRows); ++id)
    if (share > 0 && random() % share == 0) rows.ids.push_back(id);
  rows.values = as<T>(random_values(rows.ids.size() * kRow, seed));
  return rows;
}

// As documented, row by row: of those who touched it, workers by rank into their machine's sum, then machines.
template <typename T>
std::vector<T> canonical_sum(const std::vector<std::optional<Rows<T>>>& gradients, const Machines& machines) {
  std::map<size_t, float> totals;  // by element
  for (int machine = 0; machine < machines.count(); ++machine) {
    std::map<size_t, float> sums;
    for (int worker : machines.workers(machine)) {
      const auto& rows = gradients[static_cast<size_t>(worker)];
      for (size_t i = 0; rows && i < rows->values.size(); ++i) {
        const size_t element = static_cast<size_t>(rows->ids[i / kRow]) * kRow + i % kRow;
        const auto [known, is_new] = sums.emplace(element, widened(rows->values[i]));
        if (!is_new) known->second += widened(rows->values[i]);
      }
    }
    for (const auto& [element, sum] : sums) {
      const float rounded = widened(narrowed<T>(sum));
      const auto [known, is_new] = totals.emplace(element, rounded);
      if (!is_new) known->second += rounded;
    }
  }
  std::vector<T> whole(kRows * kRow);
  for (const auto& [element, total] : totals) whole[element] = narrowed<T>(total);
  return whole;
}

template <typename T>
void expect_canonical_sums(const std::vector<int>& machines, bool aggregated, DType dtype) {
  RowsJob<T> job(machines, aggregated);
  job.start(dtype);
  for (unsigned round = 1; round <= 8; ++round) {
    std::vector<std::optional<Rows<T>>> gradients;
    uint64_t pushed = 0;
    for (unsigned i = 0; i < machines.size(); ++i) {
      gradients.push_back(random_rows<T>(100 * round + i));
      if (round % 3 == 0 && i == round % machines.size()) gradients.back().reset();
      if (gradients.back()) pushed += gradients.back()->ids.size();
    }
    for (size_t i = machines.size(); i-- > 0;) {  // the last first: order must not come from arrival
      job.workers[i]->choose_route(job.key, 0, round % 2 == 0);
      if (gradients[i])
        job.push(i, *gradients[i]);
      else
        job.workers[i]->skip(job.key, job.landings[i].data(), 0, job.pending.done());
    }
    ASSERT_EQ(job.pending.wait_for(machines.size()), "");
    const auto expected = canonical_sum(gradients, Machines(machines));
    for (size_t i = 0; i < machines.size(); ++i) {
      ASSERT_EQ(job.landings[i], expected) << "worker " << i << ", round " << round;
      ASSERT_EQ(job.workers[i]->key_counters(job.key).pushed_rows, pushed) << "worker " << i;
    }
  }
  for (auto& worker : job.workers) EXPECT_TRUE(eventually([&] { return worker->counters().buffer_bytes == 0; }));
}

TEST(CanonicalOrderOfRows, HoldsWithAndWithoutAggregation) {
  for (const auto& machines : kPlacements)
    for (bool aggregated : {false, true}) expect_canonical_sums<float>(machines, aggregated, DType::kFloat32);
}

TEST(CanonicalOrderOfRows, RoundsEachMachinesSumOfHalfPrecision) {
  for (const auto& machines : kPlacements)
    for (bool aggregated : {false, true}) {
      expect_canonical_sums<half>(machines, aggregated, DType::kFloat16);
      expect_canonical_sums<bfloat16>(machines, aggregated, DType::kBfloat16);
    }
}

TEST(LocalRows, AreAllThereIfAddedAsTheyCome) {
  for (bool aggregated : {false, true}) {
    RowsJob<float> job({0, 1, 0, 1}, aggregated, SumOrder::kArrival);
    job.start();
    const Rows<float> ones = {{1, 39}, std::vector<float>(2 * kRow, 1)};
    for (int round = 0; round < 2; ++round) {
      for (size_t i = 0; i < 4; ++i) job.push(i, ones);
      ASSERT_EQ(job.pending.wait_for(4), "");
      for (const auto& landing : job.landings) {
        EXPECT_EQ(landing[kRow], 4);
        EXPECT_EQ(std::accumulate(landing.begin(), landing.end(), 0.f), 4.f * 2 * kRow);
      }
    }
  }
}

TEST(LocalRows, LeaveTheirMachineOnce) {
  RowsJob<float> job({0, 0, 1, 1}, true);
  job.start();
  const auto traffic = [&] { return job.server->counters().traffic; };
  // 14 rows of every partition but one, in 4 frames of at most 4 rows.
  std::vector<int64_t> ids(13);
  std::iota(ids.begin(), ids.end(), 0);
  const Rows<float> rows = {ids, std::vector<float>(ids.size() * kRow, 1)};
  // A frame that has come is counted by its sender a moment later.
  ASSERT_TRUE(eventually([&] {
    uint64_t received = 0;
    for (const auto& worker : job.workers) received += worker->counters().traffic.slices_received;
    return traffic().slices_sent == received;
  }));
  const auto before = traffic();
  for (size_t i = 0; i < 4; ++i) job.push(i, rows);
  ASSERT_EQ(job.pending.wait_for(4), "");
  EXPECT_EQ(traffic().slices_received - before.slices_received, 2u * (4 + 1 + 1));
  EXPECT_TRUE(eventually([&] { return traffic().slices_sent - before.slices_sent == 2u * (4 + 1 + 1); }));
  for (size_t i = 0; i < 4; ++i) {
    const KeyCounters counters = job.workers[i]->key_counters(job.key);
    EXPECT_EQ(counters.own_rows, 13u);
    EXPECT_EQ(counters.pushed_rows, 4u * 13);
    EXPECT_EQ(counters.touched_rows, 13u);
    EXPECT_EQ(counters.row_bytes_sent, 13 * kRow * sizeof(float) + 6 * sizeof(RowsHeader));
  }
  EXPECT_EQ(job.workers[1]->counters().local.slices_received, 6u);
}

TEST(LocalRows, GoToThoseOfAMachineWhoWantThem) {
  for (size_t wanting : {size_t{0}, size_t{1}, size_t{2}}) {
    RowsJob<float> job({0, 0, 0}, true);
    job.start();
    std::vector<int64_t> ids(kRows);
    std::iota(ids.begin(), ids.end(), 0);
    const Rows<float> rows = {ids, std::vector<float>(kRows * kRow, 1)};
    for (int round = 0; round < 2; ++round) {
      for (size_t i = 0; i < 3; ++i) job.push(i, rows, i == wanting);
      ASSERT_EQ(job.pending.wait_for(3), "");
      for (size_t i = 0; i < 3; ++i)
        EXPECT_EQ(job.landings[i], std::vector<float>(kRows * kRow, i == wanting ? 3.f : 0.f)) << i << wanting;
    }
    // 6 of 32 bytes of header each, and the rows once.
    EXPECT_EQ(job.workers[wanting]->key_counters(job.key).touched_rows, kRows);
    for (auto& worker : job.workers) EXPECT_TRUE(eventually([&] { return worker->counters().buffer_bytes == 0; }));
  }
}

TEST(LocalRows, AreAveragedOverThoseWhoTakePartAndAbsentIfAllSkip) {
  for (bool aggregated : {false, true}) {
    RowsJob<float> job({0, 0, 1}, aggregated);
    job.plan.reduction = Reduction::kAverage;
    job.start();
    const Rows<float> six = {{7}, std::vector<float>(kRow, 6)};
    const auto skip = [&](size_t worker, bool updated) {
      job.workers[worker]->skip(job.key, job.landings[worker].data(), 0,
                                [updated, done = job.pending.done()](const Error* error, bool was_updated) {
                                  EXPECT_EQ(was_updated, updated);
                                  done(error, was_updated);
                                });
    };
    skip(0, true);  // the leader has no gradient, nor scalars
    for (size_t i : {size_t{1}, size_t{2}}) job.push(i, six, true, RoundScalars{0.5});
    ASSERT_EQ(job.pending.wait_for(3), "");
    for (const auto& landing : job.landings) EXPECT_EQ(landing[7 * kRow], 6);
    for (size_t i = 0; i < 3; ++i) skip(i, false);
    ASSERT_EQ(job.pending.wait_for(3), "");
    for (const auto& landing : job.landings) EXPECT_EQ(landing[7 * kRow], 6);
  }
}

TEST(LocalRows, OfNeighboursThatDisagreeNameThem) {
  RowsJob<float> job({0, 0}, true);
  job.start();
  job.push(0, {}, true, RoundScalars{0.5});
  job.push(1, {}, true, RoundScalars{0.25});
  const std::string text = job.pending.wait_for(2);
  EXPECT_NE(text.find("worker 0 (here) (lr 0.5"), std::string::npos) << text;
  EXPECT_NE(text.find("worker 1 (here) (lr 0.25"), std::string::npos) << text;
  EXPECT_NE(text.find("round 1 of key 'emb'"), std::string::npos) << text;
}

TEST(LocalRows, OfWhoLeavesBeforeItsNeighboursAreMissed) {
  for (size_t leaver : {size_t{0}, size_t{1}}) {
    for (bool pushed_before : {false, true}) {
      RowsJob<float> job({0, 0}, true);
      job.start();
      const size_t stayer = 1 - leaver;
      const Rows<float> rows = random_rows<float>(1);
      if (pushed_before) {
        job.push(stayer, rows);
        ASSERT_TRUE(eventually([&] { return job.workers[0]->counters().buffer_bytes > 0; }));  // the leader has some
      }
      job.workers[leaver]->close(10);
      if (!pushed_before) job.push(stayer, rows);
      const std::string text = job.pending.wait_for(1);
      EXPECT_NE(text.find(name_of_worker(leaver) + " ended, but others still push round 1 of key 'emb'"),
                std::string::npos)
          << text;
    }
  }
}

// --- what a leader takes, sends and refuses ------------------------------------------------------------------------

std::vector<char> payload_of(const std::vector<int64_t>& ids, float value, uint32_t partition, size_t frame = 0,
                             uint32_t next_plan = 0, uint32_t pushed_rows = 0) {
  const KeyPlan plan = plan_of();
  const std::vector<RowsPiece> pieces = cut_rows(plan, partition_at(plan, partition), ids.data(), 0, ids.size(), false);
  RowsPiece piece = pieces[frame];
  piece.header.next_plan = next_plan;
  if (piece.header.last != 0) piece.header.pushed_rows = pushed_rows;
  std::vector<char> payload(piece.payload_bytes(kRow * sizeof(float)));
  const std::vector<float> row(kRow, value);
  write_rows(piece, ids.data(), kRow * sizeof(float), payload.data(),
             [&](void* to, uint64_t) { std::memcpy(to, row.data(), kRow * sizeof(float)); });
  return payload;
}

Header header_of(FrameKind kind, const std::vector<char>& payload, uint32_t partition = 0, uint64_t round = 1) {
  Header header;
  header.kind = kind;
  header.key = 3;
  header.slice = partition;
  header.round = round;
  header.payload_bytes = static_cast<uint32_t>(payload.size());
  if (payload.empty()) header.encoding = static_cast<uint8_t>(Encoding::kAbsent);
  return header;
}

// Worker 0 leads; its neighbour and the server are played by the test. Partition 0 has rows 0 to 12.
struct RowsLeader {
  RowsLeader() : worker(0, 1, timeless("worker 0 (here)")) {
    start_as_leader(worker, server, neighbour);
    key = worker.declare_rows("emb", kRows, kRow, DType::kFloat32);
    worker.agree(key, plan_of());
  }

  void push(const std::vector<int64_t>& ids, bool lands = true) {
    values.assign(ids.size() * kRow, 1);
    worker.push_rows(key, {ids.data(), ids.size(), values.data()}, lands ? landing.data() : nullptr, -7, {},
                     [done = pending.done()](const Error* error, const RowsView&) { done(error, true); });
  }
  void send(const std::vector<char>& payload, uint32_t partition = 0, uint8_t part = 1) {
    Header header = header_of(FrameKind::kPushRows, payload, partition);
    header.part = part;
    header.priority = 9;
    neighbour->send(header, payload.data());
  }
  std::string failure() {
    EXPECT_TRUE(wait_readable(worker.event_fd()));
    return worker.error() ? worker.error()->what() : "";
  }

  std::vector<float> values, landing = std::vector<float>(kRows * kRow, 0);
  Pending pending;
  std::unique_ptr<RawPeer> server, neighbour;
  int key;
  Worker worker;
};

RowsHeader rows_header(const RawPeer& peer) {
  RowsHeader rows;
  std::memcpy(&rows, peer.payload.data(), sizeof rows);
  return rows;
}

TEST(MachinesRows, LeaveAsTheirUnionWithTheCountsAndTheLeadersPriority) {
  RowsLeader job;
  const std::vector<int64_t> own = {0, 2}, theirs = {1, 2, 3, 4};
  job.push(own, false);
  job.send(payload_of(theirs, 2, 0));
  Header header = job.server->must_receive();
  EXPECT_EQ(header.kind, FrameKind::kPushRows);
  EXPECT_EQ(header.of_machine, 1);
  EXPECT_EQ(header.contributors, 2);
  EXPECT_EQ(header.priority, -7);
  EXPECT_EQ(header.part, 1);  // the neighbour's request
  EXPECT_EQ(rows_header(*job.server).rows, 4u);
  EXPECT_EQ(rows_header(*job.server).last, 0);
  header = job.server->must_receive();
  EXPECT_EQ(header.contributors, 2);
  EXPECT_EQ(rows_header(*job.server).rows, 1u);
  EXPECT_EQ(rows_header(*job.server).last, 1);
  EXPECT_EQ(rows_header(*job.server).pushed_rows, 6u);

  // The neighbour gets what has become of them, and the leader, who does not want it, only word of it.
  std::vector<char> answers[] = {payload_of({0, 1, 2, 3, 4}, 5, 0, 0), payload_of({0, 1, 2, 3, 4}, 5, 0, 1)};
  for (std::vector<char>& answer : answers) {
    RowsHeader rows;
    std::memcpy(&rows, answer.data(), sizeof rows);
    rows.touched_rows = 5;
    std::memcpy(answer.data(), &rows, sizeof rows);
    Header sent = header_of(FrameKind::kRows, answer);
    sent.of_machine = 1;
    sent.priority = -7;
    job.server->send(sent, answer.data());
    const Header passed = job.neighbour->must_receive();
    EXPECT_EQ(passed.kind, FrameKind::kRows);
    EXPECT_EQ(passed.of_machine, 0);
    EXPECT_EQ(passed.priority, -7);
    EXPECT_EQ(job.neighbour->payload, answer);
  }
  for (uint32_t partition : {1u, 2u}) {
    job.send({}, partition, 0);
    header = job.server->must_receive();
    EXPECT_EQ(header.slice, partition);
    EXPECT_EQ(header.contributors, 1);
    EXPECT_EQ(header.part, 0);
    const std::vector<char> nothing = payload_of({}, 0, partition);
    Header sent = header_of(FrameKind::kRows, nothing, partition);
    sent.of_machine = 1;
    job.server->send(sent, nothing.data());
    EXPECT_EQ(job.neighbour->must_receive().payload_bytes, sizeof(RowsHeader));
  }
  EXPECT_EQ(job.pending.wait_for(1), "");
  EXPECT_EQ(job.worker.key_counters(job.key).touched_rows, 5u);
}

TEST(MachinesRows, OfANeighbourThatCannotBeAreRefused) {
  const auto refusal = [](const std::vector<char>& payload, auto change) {
    RowsLeader job;
    Header header = header_of(FrameKind::kPushRows, payload);
    change(header);
    job.neighbour->send(header, payload.data());
    return job.failure();
  };
  const std::vector<char> good = payload_of({1, 2}, 1, 0);
  EXPECT_NE(refusal(good, [](Header& h) { h.key = 4; }).find("unexpected"), std::string::npos);
  EXPECT_NE(refusal(good, [](Header& h) { h.kind = FrameKind::kPush; }).find("unexpected"), std::string::npos);
  EXPECT_NE(refusal(good, [](Header& h) { h.slice = 3; }).find("of no slice of its key"), std::string::npos);
  EXPECT_NE(refusal(good, [](Header& h) { h.round = 2; }).find("out of turn"), std::string::npos);
  EXPECT_NE(refusal(good, [](Header& h) { h.part = 2; }).find("malformed"), std::string::npos);
  EXPECT_NE(refusal(good, [](Header& h) { h.dtype = 1; }).find("another element type"), std::string::npos);
  EXPECT_NE(refusal(good, [](Header& h) { h.encoding = 1; }).find("another encoding"), std::string::npos);
  EXPECT_NE(refusal(good, [](Header& h) { h.contributors = h.of_machine = 1; }).find("whole machine"),
            std::string::npos);
  const auto same = [](Header&) {};
  EXPECT_NE(refusal(std::vector<char>(31), same).find("another size than agreed"), std::string::npos);
  EXPECT_NE(refusal(std::vector<char>(5000), same).find("another size than agreed"), std::string::npos);
  EXPECT_NE(refusal(payload_of({1}, 1, 0, 0, 7), same).find("only worker 0 may"), std::string::npos);
  const std::string other = refusal(payload_of({39}, 1, 2), same);
  EXPECT_NE(other.find("worker 1 (there) sent a slice that is outside its partition"), std::string::npos) << other;
}

TEST(MachinesRows, ComeOnceARoundInOrder) {
  {
    RowsLeader job;
    for (int i = 0; i < 2; ++i) job.send(payload_of({1}, 1, 0));
    EXPECT_NE(job.failure().find("out of turn"), std::string::npos);
  }
  RowsLeader job;
  for (int i = 0; i < 2; ++i) job.send(payload_of({1, 2, 3, 4, 5}, 1, 0, 0));  // the first of two frames, twice
  EXPECT_NE(job.failure().find("out of order"), std::string::npos);
}

TEST(MachinesRows, OfTheNextRoundComeAfterTheAnswer) {
  RowsLeader job;
  const std::vector<int64_t> own = {0};
  job.push(own);
  job.send(payload_of({1}, 1, 0));
  job.server->must_receive();
  const std::vector<char> payload = payload_of({1}, 1, 0);
  job.neighbour->send(header_of(FrameKind::kPushRows, payload, 0, 2), payload.data());
  EXPECT_NE(job.failure().find("out of turn"), std::string::npos);
}

TEST(MachinesRows, AreNotAnsweredBeforeTheyLeave) {
  RowsLeader job;
  const std::vector<int64_t> own = {0};
  job.push(own);
  const std::vector<char> answer = payload_of({1}, 1, 0);
  Header header = header_of(FrameKind::kRows, answer);
  header.of_machine = 1;
  job.server->send(header, answer.data());
  EXPECT_NE(job.failure().find("server 0 (there) sent a slice that is an answer to no push"), std::string::npos);
}

TEST(MachinesRows, OfALostNeighbourAreMissed) {
  RowsLeader job;
  const std::vector<int64_t> own = {0};
  job.push(own);
  ASSERT_TRUE(eventually([&] { return job.worker.counters().buffer_bytes > 0; }));  // it waits for the neighbour's
  job.send(payload_of({1, 2, 3, 4, 5}, 1, 0, 0));                                   // half of it
  job.neighbour->close();
  const std::string text = job.pending.wait_for(1);
  EXPECT_NE(text.find("lost worker 1 (there) while waiting for round 1 of key 'emb'"), std::string::npos) << text;
}

// --- what a server takes of a machine ------------------------------------------------------------------------------

// All is about partition 0.
struct ServerOfRows : ServerOfTwoMachines {
  ServerOfRows() {
    server->define(plan_of(), "emb", 0);
    std::vector<int64_t> all(13);
    std::iota(all.begin(), all.end(), 0);
    for (size_t frame = 0; frame < 4; ++frame) {
      const std::vector<char> stored = payload_of(all, 0, 0, frame);
      workers[0].send(header_of(FrameKind::kStoreRows, stored, 0, 0), stored.data());
    }
    EXPECT_EQ(workers[0].must_receive().kind, FrameKind::kPart);
  }
  void request(size_t worker) { workers[worker].send(header_of(FrameKind::kInit, {}, 0, 0)); }
  void expect_answer(size_t worker) { EXPECT_EQ(workers[worker].must_receive().kind, FrameKind::kValue); }
};

TEST(ServerOfMachines, RefusesRowsThatCannotBeAMachines) {
  const auto refusal = [](size_t sender, uint8_t of_machine, uint16_t contributors, uint32_t pushed_rows) {
    ServerOfRows job;
    for (size_t worker = 0; worker < 3; ++worker) job.request(worker);
    for (size_t worker = 0; worker < 3; ++worker) job.expect_answer(worker);
    const std::vector<char> rows = payload_of({4, 5, 6}, 1, 0, 0, 0, pushed_rows);
    Header header = header_of(FrameKind::kPushRows, rows);
    header.of_machine = of_machine;
    header.contributors = contributors;
    job.workers[sender].send(header, rows.data());
    return job.failure();
  };
  EXPECT_NE(refusal(0, 1, 1, 3).find("another worker's to send"), std::string::npos);  // it is alone
  EXPECT_NE(refusal(1, 0, 0, 3).find("another worker's to send"), std::string::npos);  // of the machine or not at all
  EXPECT_NE(refusal(1, 1, 3, 3).find("another worker's to send"), std::string::npos);  // they are two
  EXPECT_NE(refusal(2, 0, 0, 3).find("another worker's to send"), std::string::npos);  // its leader's
  EXPECT_NE(refusal(1, 1, 0, 0).find("a machine's sum of 0 workers"), std::string::npos);
  EXPECT_NE(refusal(1, 1, 2, 2).find("more or fewer rows than its machine can have pushed"), std::string::npos);
  EXPECT_NE(refusal(1, 1, 2, 7).find("more or fewer rows than its machine can have pushed"), std::string::npos);
}

TEST(ServerOfMachines, LetsNobodyPushRowsThatItsLeaderMayNotKnow) {
  ServerOfRows job;
  job.request(2);
  const auto received = [&] { return job.server->counters().traffic.slices_received; };
  ASSERT_TRUE(eventually([&] { return received() == 4 + 1; }));
  for (int i = 0; i < 2; ++i) {  // what came before is worked off
    job.request(0);
    job.expect_answer(0);
  }
  EXPECT_FALSE(job.workers[2].readable(0));
  job.request(1);
  job.expect_answer(2);
}

}  // namespace
}  // namespace p3
