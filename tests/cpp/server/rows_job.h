// A server with a key of rows, whose workers are played by the test.
#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <deque>
#include <numeric>
#include <utility>
#include <vector>

#include "plan/rows.h"
#include "server/server_job.h"

namespace p3 {

constexpr uint32_t kRow = 2;  // elements of a row

struct Rows {
  std::vector<int64_t> ids;
  std::vector<float> values;
};

inline Rows filled(std::vector<int64_t> ids, float value) {
  std::vector<float> values(ids.size() * kRow, value);
  return {std::move(ids), std::move(values)};
}

// Key 1 has 10 rows in 2 partitions, 3 rows to a frame.
struct RowsJob : Job {
  explicit RowsJob(int num_workers, bool with_optimizer = true, ServerOptions with = options(), uint64_t staleness = 0,
                   bool average = false)
      : Job(num_workers, std::move(with)) {
    plan.wire_key = 1;
    plan.elements = 10 * kRow;
    plan.row_elements = kRow;
    plan.partitions = 2;
    plan.slice_elements = 3 * kRow;
    plan.staleness = staleness;
    if (average) plan.reduction = Reduction::kAverage;
    if (with_optimizer) server.set_optimizer(0, {"sgd", {}});
    server.define(plan, "emb", 0);
  }

  RawPeer& peer(int worker) { return workers[static_cast<size_t>(worker)]; }

  void send_rows(FrameKind kind, int worker, uint32_t partition, uint64_t round, const Rows& rows, uint8_t part,
                 bool as_blocks = false) {
    const auto pieces = cut_rows(plan, partition_at(plan, partition), rows.ids.data(), 0, rows.ids.size(), as_blocks);
    for (const RowsPiece& piece : pieces) {
      std::vector<char> payload(piece.payload_bytes(kRow * sizeof(float)));
      write_rows(piece, rows.ids.data(), kRow * sizeof(float), payload.data(),
                 [&](void* to, uint64_t i) { std::memcpy(to, rows.values.data() + i * kRow, kRow * sizeof(float)); });
      send_payload(kind, worker, partition, round, part, payload);
    }
  }

  void send_payload(FrameKind kind, int worker, uint32_t partition, uint64_t round, uint8_t part,
                    const std::vector<char>& payload, double lr = 1) {
    Header made = header(kind, 1, partition, round, payload.size());
    made.payload_bytes = static_cast<uint32_t>(payload.size());
    made.part = part;
    made.priority = 5;
    made.scalars.lr = lr;
    made.scalars.rescale = 1;
    peer(worker).send(made, payload.data());
  }

  // Rank 0's rows, all `value`; then everybody's request, and the answers.
  void fill(float value) {
    for (uint32_t i = 0; i < plan.partitions; ++i) {
      const RowRange range = partition_at(plan, i);
      std::vector<int64_t> ids(range.count);
      std::iota(ids.begin(), ids.end(), int64_t(range.first));
      send_rows(FrameKind::kStoreRows, 0, i, 0, filled(ids, value), 0);
      EXPECT_EQ(peer(0).must_receive().kind, FrameKind::kPart);
      for (size_t worker = 0; worker < workers.size(); ++worker) {
        workers[worker].send(header(FrameKind::kInit, 1, i, 0, 0));
      }
      for (RawPeer& worker : workers) {
        const Header answer = worker.must_receive();
        EXPECT_EQ(answer.kind, FrameKind::kValue);
        EXPECT_EQ(answer.payload_bytes, 0u);
      }
    }
  }

  // The value of a row of partition 0, as this worker asks for it after that round.
  float fetch_row(int worker, uint64_t round, int64_t id) {
    const RowsPiece piece = cut_rows(plan, partition_at(plan, 0), &id, 0, 1, false)[0];
    std::vector<char> request(piece.payload_bytes(0));
    write_ids(piece, &id, request.data());
    send_payload(FrameKind::kFetchRows, worker, 0, round, 0, request);
    EXPECT_EQ(peer(worker).must_receive().kind, FrameKind::kPart);
    float value = 0;
    EXPECT_EQ(peer(worker).payload.size(), kRow * sizeof value);
    std::memcpy(&value, peer(worker).payload.data(), sizeof value);
    return value;
  }

  // The frames of one partition's round up to the last.
  std::vector<ReceivedRows> receive_rows(int worker, uint32_t partition, uint64_t round) {
    std::vector<ReceivedRows> frames;
    payloads.clear();
    uint64_t next_row = 0;
    do {
      const Header got = peer(worker).must_receive();
      EXPECT_EQ(got.kind, FrameKind::kRows);
      EXPECT_EQ(got.slice, partition);
      EXPECT_EQ(got.round, round);
      EXPECT_EQ(got.priority, 5);
      has_part = got.part == 1;
      payloads.push_back(peer(worker).payload);
      ReceivedRows& rows = frames.emplace_back();
      const char* problem = read_rows(plan, partition_at(plan, partition), kRow * sizeof(float), payloads.back().data(),
                                      payloads.back().size(), next_row, rows);
      EXPECT_EQ(problem, nullptr);
      if (problem != nullptr) return frames;
    } while (frames.back().header.last == 0);
    return frames;
  }

  static float value_of(const ReceivedRows& rows, size_t i) {
    float value;
    std::memcpy(&value, rows.row(i) + sizeof value, sizeof value);  // the last element of the row
    return value;
  }

  KeyPlan plan;
  bool has_part = false;                   // of what receive_rows() returned last: Header::part
  std::deque<std::vector<char>> payloads;  // of the same
};

}  // namespace p3
