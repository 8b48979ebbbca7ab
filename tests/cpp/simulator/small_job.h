// Jobs small enough to compute by hand: 1000 bytes/s, packets without headers, no burst, no delay, whole frames as
// segments, acknowledgements that cost nothing.
#pragma once

#include <vector>

#include "simulator/job.h"

namespace p3::simulator {

constexpr double kRate = 1000;

// `hosts` with a worker and a server on each; slices of `bytes` in one layer each, in turn on the servers.
inline Job small_job(int hosts, const std::vector<double>& bytes, int iterations = 2) {
  Job job;
  job.hosts.assign(static_cast<size_t>(hosts), {{kRate, 0, 0}, {kRate, 0, 0}});
  for (int host = 0; host < hosts; ++host) {
    job.workers.push_back(host);
    job.servers.push_back(host);
  }
  for (size_t number = 0; number < bytes.size(); ++number) {
    job.layers.push_back({1, 2});
    const int n = static_cast<int>(number);
    job.slices.push_back({n, n, n % hosts, bytes[number], bytes[number], Slice::kOfAll});
  }
  job.factors.assign(static_cast<size_t>(hosts), std::vector<double>(static_cast<size_t>(iterations), 1));
  job.warmup = iterations > 1 ? 1 : 0;
  job.transport.segment_bytes = 1e9;
  job.transport.packet_header_bytes = 0;
  job.transport.delay_s = 0;
  job.transport.ack_bytes = 0;
  job.sender.window_bytes = 1e9;
  job.sender.write_bytes = 1e9;
  return job;
}

}  // namespace p3::simulator
