// What a simulation is given: a job of P3, the hosts it runs on, and how they send.
//
// Units: seconds and bytes. Bytes of frames are without the headers of packets; links carry them with. Plain values.
#pragma once

#include <cstdint>
#include <vector>

namespace p3::simulator {

// One direction of a host's NIC: a token bucket in front of which packets queue in the order in which they came.
struct LinkSpec {
  double bytes_per_s = 0;
  double burst_bytes = 0;  // that pass at once after a pause
  double queue_bytes = 0;  // a packet that would make more than these wait is lost; 0: any number may wait
};

struct Host {
  LinkSpec up, down;
};

// Of one worker, before its factor.
struct Layer {
  double forward_s = 0;
  double backward_s = 0;
};

// A slice, or a partition of rows. Layer and server by number.
struct Slice {
  static constexpr int kOfAll = -1;

  int layer = 0;
  int key = 0;  // in forward order
  int server = 0;
  double push_bytes = 0;   // each with P3's header
  double value_bytes = 0;  // to each worker
  // kOfAll: all workers push it, and the sum goes to all. Otherwise a worker's part of what is gathered, as are factors:
  // that worker alone pushes it, and it goes to all machines but that worker's.
  int part_of = kOfAll;
};

enum class Congestion {
  kNone,   // every segment leaves at once, as far as the window goes
  kCubic,  // grows, and falls by three tenths when a segment is lost
  kBbr,    // paced at the greatest rate of delivery, with a window of twice what the path holds, and little more
};

// Whether the mean gradients are clipped by their global norm. No weight changes before that is known.
enum class Clipping {
  kNone,
  // Each server sends each machine its part of the norm, most urgent, when all its slices of a round are summed. A worker
  // waits for all parts before its first layer that has slices, then for each layer's own values.
  kNorm,
  kWait,  // a worker waits for all values of all layers before its first layer, and computes the norm of them
};

// What lies below P3: TCP and the kernel's queues. The same for all connections.
struct Transport {
  double segment_bytes = 8192;  // what links pass as one; smaller is finer and slower to simulate
  double packet_payload_bytes = 1448;
  double packet_header_bytes = 66;  // of Ethernet, IP and TCP with time stamps
  double delay_s = 0.05e-3;         // one way, besides the queues
  double ack_bytes = 66;            // for each segment, in the queues of the other direction; 0: none
  Congestion congestion = Congestion::kNone;
  double loss = 0;    // the share of packets that are lost by chance between the links, below 1; no acknowledgements
  uint64_t seed = 0;  // of which ones
};

// How P3 sends. The defaults are what the data path does.
struct Sender {
  bool priorities = true;  // false: frames leave in the order they came
  // As P3 does not: on a host no value leaves while a push of its round or of an older one waits there.
  bool pushes_first = false;
  double window_bytes = 0;  // written to a connection and not acknowledged; 0: as SocketStream chooses
  double write_bytes = 0;   // the most that one write adds to a socket that has room; 0: as SocketStream chooses
};

struct Job {
  std::vector<Host> hosts;
  std::vector<int> workers;  // host of each
  std::vector<int> servers;
  bool local_aggregation = true;  // one push for all workers of a host
  // [server][host]: whose machine adds up what this host's pushes of that server's slices: another host, or kServer. A
  // leader pushes the sum on, with what its own workers have computed, and passes back the value; a server's part of the
  // norm goes straight to all. Empty: all push to the servers.
  static constexpr int kServer = -1;
  std::vector<std::vector<int>> leaders;
  std::vector<Layer> layers;
  bool releases_at_end = false;  // all gradients are ready when the backward pass ends, none before
  std::vector<Slice> slices;
  Clipping clipping = Clipping::kNone;
  double norm_bytes = 0;  // of a server's part of the norm, with P3's header; for kNorm
  // [worker][iteration]: how much longer than `layers` each iteration computes. All of the same length.
  std::vector<std::vector<double>> factors;
  int warmup = 1;  // iterations that waits and the use of links leave out
  Transport transport;
  Sender sender;
  int traced_iterations = 0;  // the last ones, of which spans are kept
  bool traces_links = false;  // also of what passes the links

  int iterations() const { return factors.empty() ? 0 : static_cast<int>(factors.front().size()); }
};

struct LinkUse {
  double bytes = 0;  // with the headers of packets
  double busy_s = 0;
  double mean_queue_s = 0, greatest_queue_s = 0;  // that a segment has waited
  uint64_t segments = 0, lost = 0;
};

struct Span {
  static constexpr int kForClipping = -1;  // of kWait: for what clipping needs of all layers

  enum Kind { kForward, kBackward, kWait, kPush, kValue, kUp, kDown };
  Kind kind = kForward;
  int node = 0;   // worker; of kPush and kValue the sending host; of kUp and kDown the link's
  int peer = -1;  // the receiving host
  int item = 0;   // layer, or kForClipping; of kPush, kValue, kUp and kDown the slice
  int round = 0;
  double begin_s = 0, end_s = 0;
};

struct Result {
  std::vector<std::vector<double>> ends_s;    // [worker][iteration], since the start
  std::vector<std::vector<double>> waited_s;  // [worker][layer], of all iterations after the warm-up
  std::vector<double> waited_to_clip_s;       // [worker], the same, for what clipping needs of all layers
  std::vector<LinkUse> up, down;              // of each host, after the warm-up
  std::vector<Span> spans;
  double window_bytes = 0;  // of each connection
  uint64_t events = 0;
};

// Throws std::invalid_argument, whose text says what, for a job that cannot be simulated.
void check(const Job& job);

// Threads: any number at once. Throws as check() does.
Result simulate(const Job& job);

// DistributedDataParallel's ring instead of P3: layers' bytes in buckets of at least `bucket_bytes` (the first of at
// least `first_bucket_bytes`), in reverse order, each reduced in turn around the ring of workers; the next forward pass
// begins when all are done, so clipping changes nothing. Of `job.sender` and the servers nothing is used, of `job.slices`
// layer and push_bytes.
Result simulate_ring(const Job& job, double bucket_bytes, double first_bucket_bytes);

}  // namespace p3::simulator
