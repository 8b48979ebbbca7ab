// DistributedDataParallel's ring (simulate_ring). Every step of it depends on the one before and on the neighbour's, so
// its times follow one from another without an event loop: 1,024 workers take 2,046 steps for a bucket.
//
// In each step a worker sends one of as many pieces as there are workers to the next one, which needs it for its next
// step. A piece streams: its receiver has it when both links have passed it. Bursts and queues are left out.
#include <algorithm>
#include <vector>

#include "simulator/job.h"

namespace p3::simulator {
namespace {

struct Bucket {
  double bytes = 0;
  size_t first_layer = 0;  // the last one in the backward pass: then it is complete
};

std::vector<Bucket> buckets_of(const Job& job, double bucket_bytes, double first_bucket_bytes) {
  std::vector<double> layer_bytes(job.layers.size(), 0);
  for (const Slice& slice : job.slices) layer_bytes[static_cast<size_t>(slice.layer)] += slice.push_bytes;
  std::vector<Bucket> buckets;
  double open = 0;
  for (size_t layer = job.layers.size(); layer-- > 0;) {
    open += layer_bytes[layer];
    const double enough = buckets.empty() ? first_bucket_bytes : bucket_bytes;
    if (open > 0 && (open >= enough || layer == 0)) {
      buckets.push_back({open, layer});
      open = 0;
    }
  }
  return buckets;
}

class Ring {
 public:
  explicit Ring(const Job& job)
      : job_(job),
        wire_share_(1 + job.transport.packet_header_bytes / job.transport.packet_payload_bytes),
        up_free_at_(job.hosts.size(), 0),
        down_free_at_(job.hosts.size(), 0) {
    result_.up.resize(job.hosts.size());
    result_.down.resize(job.hosts.size());
  }

  // Adds up one bucket over all workers, of which each begins at its own time; `at` becomes when each has the sum.
  void reduce(double bytes, std::vector<double>& at, bool counts) {
    const size_t workers = at.size();
    const double piece = bytes / static_cast<double>(workers) * wire_share_;
    std::vector<double> next(workers);
    for (size_t step = 0; step + 1 < workers; ++step) one_step(piece, at, next, counts);  // sums
    for (size_t step = 0; step + 1 < workers; ++step) one_step(piece, at, next, counts);  // and tells them to all
  }

  Result result_;

 private:
  void one_step(double piece, std::vector<double>& at, std::vector<double>& next, bool counts) {
    const size_t workers = at.size();
    for (size_t from = 0; from < workers; ++from) {
      const size_t to = (from + 1) % workers;
      const auto here = static_cast<size_t>(job_.workers[from]), there = static_cast<size_t>(job_.workers[to]);
      next[to] = std::max(at[from], at[to]);
      if (here == there) continue;
      const double up_s = piece / job_.hosts[here].up.bytes_per_s, down_s = piece / job_.hosts[there].down.bytes_per_s;
      const double begin = std::max(at[from], up_free_at_[here]);
      const double reaches = begin + job_.transport.delay_s;
      up_free_at_[here] = begin + up_s;
      down_free_at_[there] = std::max({reaches + up_s, std::max(reaches, down_free_at_[there]) + down_s});
      next[to] = std::max(at[to], down_free_at_[there]);
      if (counts) {
        count(result_.up[here], piece, up_s);
        count(result_.down[there], piece, down_s);
      }
    }
    at.swap(next);
  }

  static void count(LinkUse& use, double bytes, double seconds) {
    use.bytes += bytes;
    use.busy_s += seconds;
    ++use.segments;
  }

  const Job& job_;
  const double wire_share_;
  std::vector<double> up_free_at_, down_free_at_;  // of each host
};

}  // namespace

Result simulate_ring(const Job& job, double bucket_bytes, double first_bucket_bytes) {
  check(job);
  const size_t workers = job.workers.size();
  const std::vector<Bucket> buckets = buckets_of(job, bucket_bytes, first_bucket_bytes);
  Ring ring(job);
  Result& result = ring.result_;
  result.ends_s.resize(workers);
  result.waited_s.assign(workers, std::vector<double>(job.layers.size(), 0));
  result.waited_to_clip_s.assign(workers, 0);
  std::vector<double> now(workers, 0), reduced(workers, 0);
  for (int iteration = 0; iteration < job.iterations(); ++iteration) {
    const bool counts = iteration >= job.warmup, is_traced = iteration >= job.iterations() - job.traced_iterations;
    std::vector<std::vector<double>> ready(workers, std::vector<double>(job.layers.size()));
    for (size_t worker = 0; worker < workers; ++worker) {
      const double factor = job.factors[worker][static_cast<size_t>(iteration)];
      const auto compute = [&](Span::Kind kind, size_t layer, double seconds) {
        if (is_traced)
          result.spans.push_back({kind, static_cast<int>(worker), -1, static_cast<int>(layer), iteration, now[worker],
                                  now[worker] + seconds});
        now[worker] += seconds;
      };
      for (size_t layer = 0; layer < job.layers.size(); ++layer)
        compute(Span::kForward, layer, job.layers[layer].forward_s * factor);
      for (size_t layer = job.layers.size(); layer-- > 0;) {
        compute(Span::kBackward, layer, job.layers[layer].backward_s * factor);
        ready[worker][layer] = now[worker];
      }
      if (job.releases_at_end) ready[worker].assign(job.layers.size(), now[worker]);
    }
    for (const Bucket& bucket : buckets) {
      for (size_t worker = 0; worker < workers; ++worker)
        reduced[worker] = std::max(reduced[worker], ready[worker][bucket.first_layer]);
      const std::vector<double> begun = reduced;
      ring.reduce(bucket.bytes, reduced, counts);
      for (size_t worker = 0; is_traced && worker < workers; ++worker)
        result.spans.push_back({Span::kPush, job.workers[worker], job.workers[(worker + 1) % workers],
                                static_cast<int>(&bucket - buckets.data()), iteration, begun[worker], reduced[worker]});
    }
    for (size_t worker = 0; worker < workers; ++worker) {
      const double held_up = std::max(0.0, reduced[worker] - now[worker]);
      if (counts) result.waited_s[worker][0] += held_up;
      if (is_traced && held_up > 0)
        result.spans.push_back(
            {Span::kWait, static_cast<int>(worker), -1, 0, iteration, now[worker], now[worker] + held_up});
      now[worker] += held_up;
      result.ends_s[worker].push_back(now[worker]);
    }
  }
  for (const auto* links : {&result.up, &result.down})
    for (const LinkUse& use : *links) result.events += use.segments;
  return std::move(result);
}

}  // namespace p3::simulator
