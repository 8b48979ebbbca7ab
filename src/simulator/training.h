// The workers and servers of a job: what is computed, waited for, pushed, summed and broadcast.
//
// A worker's iteration computes forward, layer by layer, each after the layer's values of the last round have landed;
// then backward from the end, after each of which the layer's slices leave, or all of them after the last. A server
// adds up a slice's pushes, and when the last has come the value leaves to all at once. Sums and copies take no time, nor
// does what stays on a host. With clipping a worker also waits once in an iteration, for what enum Clipping says.
// A machine is what pushes as one: the workers of a host, with local aggregation; otherwise each worker. With leaders a
// machine adds up, besides its own workers' gradients, what the machines that it leads for a server's slices push to it.
// Threads: none.
#pragma once

#include <array>
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
  static constexpr int kNothing = -2;

  struct Worker {
    int machine = 0;
    int iteration = 0;
    int waits_for = kNothing;  // a layer, or Span::kForClipping
    double waits_since = 0;
    // Of even rounds, and of odd ones: parts of other workers may land before this one has come to their round.
    std::array<std::vector<int>, 2> missing;  // of each layer: values that have not landed
    std::array<int, 2> missing_to_clip = {};  // servers' parts of the norm, or values of all layers
  };

  struct Machine {
    int host = 0;
    std::vector<int> workers;
    std::vector<int> unready;  // of each slice: workers, and machines that it leads, whose gradient it lacks
    int needed_to_clip = 0;    // by each worker, in a round
  };

  // Where a machine pushes slices to, and whence their values come. Of its two connections one is for each direction.
  static constexpr int kNoWay = -1;  // it crosses no network, or no slice crosses it
  static int push_connection(int way) { return 2 * way; }
  static int value_connection(int way) { return 2 * way + 1; }

  void delivered(int connection, int frame) override;
  void acknowledged(int connection) override { dispatcher_.acknowledged(connection); }
  void passed(Span::Kind link, int host, int frame, double begin, double end) override;

  void prepare_leaders();
  void connect();
  void connect_norms();
  double window(uint64_t connections) const;
  void prepare_clipping();
  void begin_forward(int worker, int layer);
  void wait(int worker, int layer);
  void go_on_if_all_is_there(int worker);
  void begin_backward(int worker, int layer);
  void step_done(int worker, int layer);
  void release(int worker, int layer);
  void add(int machine, int slice, int round);
  void pushed(int slice, int round);
  bool has_summed_all(int server);
  void tell_norm(int server, int round);
  void tell(int machine, int slice, int round);
  void landed(int machine, int slice, int round);
  void norm_landed(int machine, int round);
  void leave(int connection, const Frame& frame);
  void leave_warmup();
  uint64_t urgency(int round, const Slice& slice, bool is_push) const;
  static uint64_t norm_urgency(int round);
  double factor(int worker) const;
  bool is_traced(int round) const { return round >= job_.iterations() - job_.traced_iterations; }

  const Slice& slice(int number) const { return job_.slices[static_cast<size_t>(number)]; }
  Worker& worker(int number) { return workers_[static_cast<size_t>(number)]; }
  static size_t parity(int round) { return static_cast<size_t>(round & 1); }
  static int& missing(Worker& worker, int layer, int round) {
    return worker.missing[parity(round)][static_cast<size_t>(layer)];
  }
  Machine& machine(int number) { return machines_[static_cast<size_t>(number)]; }
  int server_host(int server) const { return job_.servers[static_cast<size_t>(server)]; }
  size_t pair(int machine, int server) const {
    return static_cast<size_t>(machine) * job_.servers.size() + static_cast<size_t>(server);
  }
  int& way(int machine, int server) { return ways_[pair(machine, server)]; }
  int leader(int machine, int server) const;
  const std::vector<int>& led(int machine, int server) const;
  int needed(int machine, int slice) const;
  int pushes(int slice) const;
  bool awaits(int machine, int slice) const;

  const Job job_;
  Result result_;
  EventQueue events_;
  Frames frames_;
  Network network_;
  Dispatcher dispatcher_;
  std::vector<Worker> workers_;
  std::vector<Machine> machines_;
  std::vector<int> machine_on_;              // each host; the last one if it has several
  std::vector<std::vector<int>> slices_of_;  // each layer
  std::vector<std::vector<int>> pushers_;    // of each server: machines that push to itself
  std::vector<std::vector<int>> led_;        // by machine and server: machines that it leads; empty without leaders
  std::vector<int> ways_;                    // by machine and server
  std::vector<int> norm_connections_;        // the same: on which its part of the norm comes
  std::vector<int> unpushed_;                // of each slice: pushes
  std::vector<int> slices_on_;               // each server
  std::vector<int> summed_;                  // by each server: slices of a round
  int clips_before_ = kNothing;              // a layer
  int running_ = 0;                          // workers that have iterations left
  int warming_up_ = 0;
};

}  // namespace p3::simulator
