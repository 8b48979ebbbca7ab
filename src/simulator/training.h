// The workers and servers of a job: what is computed, waited for, pushed, summed and broadcast.
//
// A worker's iteration computes forward, layer by layer, each after the layer's values of the last round have landed;
// then backward from the end, after each of which the layer's slices leave, or all of them after the last. A server
// adds up a slice's pushes, and when the last has come the value leaves to all at once. Sums and copies take no time, nor
// does what stays on a host.
// A machine is what pushes as one: the workers of a host, with local aggregation; otherwise each worker.
// Threads: none.
#pragma once

#include <vector>

#include "simulator/dispatcher.h"
#include "simulator/event_queue.h"
#include "simulator/job.h"
#include "simulator/network.h"

namespace p3::simulator {

class Training : private Network::Listener {
 public:
  explicit Training(const Job& job);
  Result run();

 private:
  struct Worker {
    int machine = 0;
    int iteration = 0;
    int waits_for = -1;  // a layer
    double waits_since = 0;
    std::vector<int> missing;  // of each layer: values that have not landed
  };

  struct Machine {
    int host = 0;
    std::vector<int> workers;
    std::vector<int> unready;  // of each slice: workers whose gradient it lacks
  };

  void delivered(int connection, int frame) override;
  void acknowledged(int connection) override { dispatcher_.acknowledged(connection); }
  void passed(Span::Kind link, int host, int frame, double begin, double end) override;

  void connect();
  double window_of(int from_host, int connections) const;
  void begin_forward(int worker, int layer);
  void begin_backward(int worker, int layer);
  void step_done(int worker, int layer);
  void release(int worker, int layer);
  void pushed(int slice, int round);
  void landed(int machine, int slice);
  void leave(int connection, const Frame& frame);
  void leave_warmup();
  uint64_t urgency(int round, const Slice& slice) const;
  double factor(int worker) const;
  bool is_traced(int round) const { return round >= job_.iterations() - job_.traced_iterations; }

  const Slice& slice(int number) const { return job_.slices[static_cast<size_t>(number)]; }
  Worker& worker(int number) { return workers_[static_cast<size_t>(number)]; }
  Machine& machine(int number) { return machines_[static_cast<size_t>(number)]; }
  int server_host(int server) const { return job_.servers[static_cast<size_t>(server)]; }
  int& connection(std::vector<int>& of, int machine, int server) {
    return of[static_cast<size_t>(machine) * job_.servers.size() + static_cast<size_t>(server)];
  }

  const Job job_;
  Result result_;
  EventQueue events_;
  Frames frames_;
  Network network_;
  Dispatcher dispatcher_;
  std::vector<Worker> workers_;
  std::vector<Machine> machines_;
  std::vector<std::vector<int>> slices_of_;  // each layer
  std::vector<int> to_server_, to_machine_;  // connections, by machine and server; -1: on the same host, or not used
  std::vector<int> unpushed_;                // of each slice: machines
  int running_ = 0;                          // workers that have iterations left
  int warming_up_ = 0;
};

}  // namespace p3::simulator
