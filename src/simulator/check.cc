#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>
#include <vector>

#include "simulator/job.h"

namespace p3::simulator {
namespace {

void require(bool holds, const std::string& what) {
  if (!holds) throw std::invalid_argument(what);
}

bool is_positive(double value) { return value > 0 && std::isfinite(value); }
bool is_not_negative(double value) { return value >= 0 && std::isfinite(value); }

void check_link(const LinkSpec& link, const std::string& name) {
  require(is_positive(link.bytes_per_s),
          name + " has a rate of " + std::to_string(link.bytes_per_s) + " bytes/s; it must be a positive number");
  require(is_not_negative(link.burst_bytes) && is_not_negative(link.queue_bytes),
          name + ": burst and queue must be bytes, 0 or more");
}

void check_hosts(const std::vector<int>& places, size_t hosts, const std::string& role) {
  require(!places.empty(), "the job has no " + role);
  for (int place : places)
    require(place >= 0 && static_cast<size_t>(place) < hosts,
            role + " on host " + std::to_string(place) + ": there are " + std::to_string(hosts));
}

// Each host has one machine, and from each a way leads to each server.
void check_leaders(const Job& job) {
  const size_t hosts = job.hosts.size();
  std::vector<int> machines(hosts, 0);
  for (int host : job.workers) machines[static_cast<size_t>(host)] = 1;
  require(job.local_aggregation && std::count(machines.begin(), machines.end(), 1) == static_cast<int>(hosts),
          "with leaders each host needs workers, which push as one");
  require(job.leaders.size() == job.servers.size(), "each server needs its leaders");
  for (const auto& leaders : job.leaders) {
    require(leaders.size() == hosts, "each host needs a leader, or the server");
    for (size_t host = 0; host < hosts; ++host) {
      size_t steps = 0;
      for (int at = static_cast<int>(host); at != Job::kServer; at = leaders[static_cast<size_t>(at)]) {
        if (at < Job::kServer || at >= static_cast<int>(hosts))  // a million times: only then it is worth a text
          throw std::invalid_argument("leader on host " + std::to_string(at) + ": there are " + std::to_string(hosts));
        if (steps++ == hosts)
          throw std::invalid_argument("from host " + std::to_string(host) + " no way leads to the server");
      }
    }
  }
}

}  // namespace

void check(const Job& job) {
  require(!job.hosts.empty(), "the job has no host");
  for (size_t host = 0; host < job.hosts.size(); ++host) {
    check_link(job.hosts[host].up, "the uplink of host " + std::to_string(host));
    check_link(job.hosts[host].down, "the downlink of host " + std::to_string(host));
  }
  check_hosts(job.workers, job.hosts.size(), "worker");
  check_hosts(job.servers, job.hosts.size(), "server");
  if (!job.leaders.empty()) check_leaders(job);
  require(!job.layers.empty(), "the job has no layer");
  for (const Layer& layer : job.layers)
    require(is_not_negative(layer.forward_s) && is_not_negative(layer.backward_s), "a layer's time is negative");
  for (const Slice& slice : job.slices) {
    require(slice.layer >= 0 && static_cast<size_t>(slice.layer) < job.layers.size(), "a slice is of no layer");
    require(slice.key >= 0, "a slice is of no key");
    require(slice.server >= 0 && static_cast<size_t>(slice.server) < job.servers.size(), "a slice has no server");
    require(is_positive(slice.push_bytes) && is_positive(slice.value_bytes), "a slice has no bytes");
    if (slice.part_of == Slice::kOfAll) continue;
    require(slice.part_of >= 0 && static_cast<size_t>(slice.part_of) < job.workers.size(), "a part is of no worker");
    require(job.leaders.empty(), "leaders pass on no parts");
    require(job.clipping != Clipping::kNorm, "no server sums parts, so none tells their norm");
  }
  require(job.clipping != Clipping::kNorm || is_positive(job.norm_bytes), "a part of the norm has no bytes");
  require(job.factors.size() == job.workers.size() && job.iterations() > 0,
          "each worker needs its iterations' factors");
  for (const auto& factors : job.factors) {
    require(factors.size() == job.factors.front().size(), "workers have different numbers of iterations");
    for (double factor : factors) require(is_not_negative(factor), "a factor of the computation is negative");
  }
  require(job.warmup >= 0 && job.warmup < job.iterations(), "no iteration is left after the warm-up");
  const Transport& transport = job.transport;
  require(transport.loss >= 0 && transport.loss < 1, "the share of packets that are lost must be from 0 to below 1");
  require(is_positive(transport.segment_bytes) && is_positive(transport.packet_payload_bytes),
          "segments and packets have bytes");
  require(is_not_negative(transport.packet_header_bytes) && is_not_negative(transport.delay_s) &&
              is_not_negative(transport.ack_bytes) && is_not_negative(job.sender.window_bytes) &&
              is_not_negative(job.sender.write_bytes),
          "bytes and delays cannot be negative");
  for (const Host& host : job.hosts)
    for (const LinkSpec& link : {host.up, host.down})
      require(link.queue_bytes <= 0 || link.queue_bytes > 2 * transport.segment_bytes,
              "a queue must hold more than two segments, or some would never pass");
}

}  // namespace p3::simulator
