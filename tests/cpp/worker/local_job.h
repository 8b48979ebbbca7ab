// Jobs of real workers and a real server over sockets, where workers share machines.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <type_traits>
#include <vector>

#include "base/half.h"
#include "p3/server.h"
#include "p3/worker.h"
#include "transport/raw_peer.h"

namespace p3 {

inline std::string name_of_worker(size_t rank) { return "worker " + std::to_string(rank) + " (here)"; }

// Starts worker 0, which leads its machine, between a server and a worker 1 that the test plays.
inline void start_as_leader(Worker& worker, std::unique_ptr<RawPeer>& server, std::unique_ptr<RawPeer>& neighbour) {
  const auto [ours, its] = unix_pair();
  const auto [near, nears] = unix_pair();
  server = std::make_unique<RawPeer>(ours);
  neighbour = std::make_unique<RawPeer>(near);
  worker.add_server(0, stream_of(its), "server 0 (there)");
  worker.add_local(1, stream_of(nears), "worker 1 (there)");
  worker.start();
}

// Waits for any number of operations.
class Pending {
 public:
  Worker::Done done() {
    return [this](const Error* error, bool) {
      std::lock_guard<std::mutex> lock(mutex_);
      ++completed_;
      if (error != nullptr && error_.empty()) error_ = error->what();
      changed_.notify_all();
    };
  }
  // The first error, or nothing.
  std::string wait_for(size_t count) {
    std::unique_lock<std::mutex> lock(mutex_);
    EXPECT_TRUE(changed_.wait_for(lock, std::chrono::milliseconds(kDeadlineMs), [&] { return completed_ >= count; }));
    completed_ -= count;
    return error_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  size_t completed_ = 0;
  std::string error_;
};

// Worker 0, which leads its machine, of a key of four elements; its neighbour, worker 1, and the server are played by the
// test.
struct Leader {
  explicit Leader(const Compression& codec = {}) : worker(0, 1, timeless("worker 0 (here)")) {
    start_as_leader(worker, server, neighbour);
    KeyPlan plan;
    plan.wire_key = 3;
    plan.elements = 4;
    plan.codec = codec;
    key = worker.declare("w", 4, DType::kFloat32, codec);
    worker.agree(key, plan);
  }
  // Of the neighbour.
  static Header push_of(uint64_t round = 1) {
    Header header;
    header.kind = FrameKind::kPush;
    header.key = 3;
    header.round = round;
    header.payload_bytes = 16;
    return header;
  }
  std::string failure() {
    EXPECT_TRUE(wait_readable(worker.event_fd()));
    return worker.error() ? worker.error()->what() : "";
  }

  std::vector<float> ones = {1, 1, 1, 1}, landing = {0, 0, 0, 0};
  Pending pending;
  std::unique_ptr<RawPeer> server, neighbour;
  int key;
  Worker worker;
};

// What jobs of real cores have in common.
struct Cores {
  ~Cores() {
    for (auto& worker : workers) worker->close(1);
  }

  // On all of them; its handle is the same on all workers.
  int make_key(KeyPlan plan) {
    plan.wire_key = static_cast<uint32_t>(keys++);
    const std::string name = "key" + std::to_string(plan.wire_key);
    for (auto& server : servers) server->define(plan, name, 0);
    int handle = 0;
    for (auto& worker : workers) {
      handle = worker->declare(name, plan.elements, plan.dtype, plan.codec);
      worker->agree(handle, plan);
    }
    return handle;
  }

  template <typename Array>
  std::string init(int key, Array& value, std::vector<Array>& landings) {
    for (size_t i = 0; i < workers.size(); ++i)
      workers[i]->init(key, value.data(), landings[i].data(), 0, pending.done());
    return pending.wait_for(workers.size());
  }

  int keys = 0;
  Pending pending;
  std::vector<std::unique_ptr<Server>> servers;
  std::vector<std::unique_ptr<Worker>> workers;
};

// With one server. `machines`: of each worker.
struct Job : Cores {
  explicit Job(const std::vector<int>& machines, bool aggregated, SumOrder order = SumOrder::kRank) {
    ServerOptions options;
    options.node = timeless("server 0 (here)");
    options.machines = Machines(machines);
    options.local_aggregation = aggregated;
    options.sum_order = order;
    const Machines places(machines);
    servers.push_back(Server::make(0, 1, static_cast<int>(machines.size()), options));
    server = servers.front().get();
    for (size_t rank = 0; rank < machines.size(); ++rank) {
      const auto [ours, its] = unix_pair();
      workers.push_back(std::make_unique<Worker>(static_cast<int>(rank), 1, timeless(name_of_worker(rank))));
      workers.back()->add_server(0, stream_of(ours), "server 0 (here)");
      server->add_worker(static_cast<int>(rank), stream_of(its), name_of_worker(rank));
      const auto leader = static_cast<size_t>(places.leader_of(static_cast<int>(rank)));
      if (!aggregated || leader == rank) continue;
      const auto [up, down] = unix_pair();
      workers.back()->add_local(static_cast<int>(leader), stream_of(up), name_of_worker(leader));
      workers[leader]->add_local(static_cast<int>(rank), stream_of(down), name_of_worker(rank));
    }
    server->start();
    for (auto& worker : workers) worker->start();
  }

  int declare(uint64_t elements, DType dtype = DType::kFloat32, const Compression& codec = {}) {
    KeyPlan plan;
    plan.reduction = reduction;
    plan.elements = elements;
    plan.dtype = dtype;
    plan.codec = codec;
    plan.slice_elements = 1000;
    return make_key(plan);
  }

  Reduction reduction = Reduction::kSum;  // of keys to come
  Server* server = nullptr;
};

// A server of three workers played by the test; the last two share a machine.
struct ServerOfTwoMachines {
  ServerOfTwoMachines() {
    ServerOptions options;
    options.node = timeless("server 0 (here)");
    options.machines = Machines(std::vector<int>{0, 1, 1});
    server = Server::make(0, 1, 3, options);
    for (int rank = 0; rank < 3; ++rank) {
      const auto [ours, its] = unix_pair();
      workers.emplace_back(ours);
      server->add_worker(rank, stream_of(its), "worker " + std::to_string(rank) + " (there)");
    }
    server->start();
  }
  std::string failure() {
    EXPECT_TRUE(wait_readable(server->event_fd()));
    return server->error() ? server->error()->what() : "";
  }

  std::vector<RawPeer> workers;
  std::unique_ptr<Server> server;
};

// Values whose sum depends on the order.
inline std::vector<float> random_values(size_t n, unsigned seed) {
  std::mt19937 random(seed);
  std::uniform_real_distribution<float> exponent(-8, 8);
  std::vector<float> values(n);
  for (float& value : values) value = std::exp2(exponent(random)) * (random() % 2 ? 1.f : -1.f);
  return values;
}

template <typename T>
std::vector<T> as(const std::vector<float>& values) {
  if constexpr (sizeof(T) == 4) {
    return values;
  } else {
    std::vector<T> made;
    for (float value : values)
      if constexpr (std::is_same_v<T, half>)
        made.push_back(float_to_half(value));
      else
        made.push_back(float_to_bfloat16(value));
    return made;
  }
}

inline float widened(float value) { return value; }
inline float widened(half value) { return half_to_float(value); }
inline float widened(bfloat16 value) { return bfloat16_to_float(value); }
template <typename T>
T narrowed(float value) {
  return as<T>({value})[0];
}

// The sum as documented: of the first places, as many as the largest power of two below their number, and of the others.
inline float sum_of(const std::vector<float>& values) {
  if (values.size() == 1) return values[0];
  ptrdiff_t first = 1;
  while (2 * static_cast<size_t>(first) < values.size()) first *= 2;
  return sum_of({values.begin(), values.begin() + first}) + sum_of({values.begin() + first, values.end()});
}

// Workers by rank into their machine's sum, machines in the order of their lowest ranks.
template <typename T>
std::vector<T> canonical_sum(const std::vector<std::vector<T>>& gradients, const Machines& machines) {
  std::vector<T> sums;
  for (size_t i = 0; i < gradients[0].size(); ++i) {
    std::vector<float> of_machines;
    for (int machine = 0; machine < machines.count(); ++machine) {
      std::vector<float> values;
      for (int worker : machines.workers(machine)) values.push_back(widened(gradients[static_cast<size_t>(worker)][i]));
      of_machines.push_back(widened(narrowed<T>(sum_of(values))));
    }
    sums.push_back(narrowed<T>(sum_of(of_machines)));
  }
  return sums;
}

inline const std::vector<std::vector<int>> kPlacements = {{7, 7, 7, 7}, {0, 1, 0, 1}, {1, 0, 0}, {0, 1, 2}};

}  // namespace p3
