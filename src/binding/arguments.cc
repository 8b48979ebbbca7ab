#include "binding/arguments.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "p3/error.h"
#include "p3/machines.h"
#include "p3/ring_stream.h"
#include "p3/socket_stream.h"
#include "p3/trace.h"
#include "p3/wire.h"

namespace p3::binding {

constexpr int kNotsentLowWaterBytes = 128 << 10;

std::unique_ptr<Stream> stream_of(int fd, const std::vector<int>& ring, bool is_maker, TlsStream* tls) {
  if (tls != nullptr) return std::unique_ptr<Stream>(tls);
  if (ring.empty()) return std::make_unique<SocketStream>(fd, kNotsentLowWaterBytes);
  RingStream::Descriptors descriptors;
  if (ring.size() != descriptors.size())
    throw Error(ErrorKind::kUsage, "a ring has " + std::to_string(descriptors.size()) + " descriptors");
  std::copy(ring.begin(), ring.end(), descriptors.begin());
  return std::make_unique<RingStream>(fd, descriptors, is_maker);
}

TlsStream* new_tls_stream(int fd, const std::string& key, bool connects) {
  return new TlsStream(fd, kNotsentLowWaterBytes, key, connects);
}

std::vector<int> make_ring(size_t bytes_each_way) {
  const auto made = RingStream::make(bytes_each_way);
  return {made.begin(), made.end()};
}

Compression compression_of(const std::string& type, const std::map<std::string, double>& options) {
  const Codec& codec = codec_named(type);
  Compression compression(codec.encoding);
  for (size_t i = 0; i < codec.options.size(); ++i) {
    const auto given = options.find(codec.options[i].name);
    compression.options[i] = given == options.end() ? codec.options[i].standard : given->second;
  }
  check(compression);
  return compression;
}

NodeOptions node_options(std::string label, double heartbeat_s, double timeout_s, bool checksums, int trace_fd,
                         bool outlives_scheduler, bool outlives_servers) {
  NodeOptions options;
  options.label = std::move(label);
  options.heartbeat_s = heartbeat_s;
  options.timeout_s = timeout_s;
  options.outlives_scheduler = outlives_scheduler;
  options.outlives_servers = outlives_servers;
  options.checksums = checksums;
  if (trace_fd >= 0) options.trace = std::make_shared<Recorder>(trace_fd);
  return options;
}

ServerOptions server_options(NodeOptions node, bool by_arrival, int threads, const std::vector<int>& machines,
                             bool local_aggregation, const std::vector<int>& groups, int group_leader,
                             bool outlives_workers) {
  ServerOptions options;
  options.node = std::move(node);
  options.sum_order = by_arrival ? SumOrder::kArrival : SumOrder::kRank;
  options.threads = threads;
  options.machines = Machines(machines);
  options.local_aggregation = local_aggregation;
  if (!groups.empty()) options.groups = Machines(groups, group_leader);
  options.outlives_workers = outlives_workers;
  return options;
}

SharedFields shared_fields(const std::vector<double>& values) { return std::make_shared<const FieldValues>(values); }

std::vector<uint8_t> parts_of(const OptimizerSpec& spec, DType dtype) {
  const auto optimizer = Optimizer::make(spec);
  std::vector<uint8_t> parts{0};
  for (int i = 1; i <= optimizer->state_count(); ++i) parts.push_back(static_cast<uint8_t>(i));
  if (optimizer->needs_master(dtype)) parts.push_back(kMaster);
  return parts;
}

std::vector<std::string> state_names(const OptimizerSpec& spec) {
  const auto optimizer = Optimizer::make(spec);
  std::vector<std::string> names;
  for (const Optimizer::State& state : optimizer->states()) names.emplace_back(state.name);
  return names;
}

void fail(Worker& worker, const std::string& text) { worker.fail(Error(ErrorKind::kRemote, text)); }
void fail(Server& server, const std::string& text) { server.fail(Error(ErrorKind::kRemote, text)); }

int shake_hands(TlsStream& stream) { return static_cast<int>(stream.handshake()); }

namespace {

int64_t moved_or_end(const IoResult& result) {
  if (result.bytes > 0 || result.error == EAGAIN) return static_cast<int64_t>(result.bytes);
  if (result.error == 0) return result.end ? -1 : 0;
  if (result.error == ECONNRESET || result.error == EPIPE) return -1;
  throw Error(ErrorKind::kPeerLost,
              result.error == EBADMSG ? "TLS refuses what came: altered on the way" : std::strerror(result.error));
}

}  // namespace

int64_t read_some(TlsStream& stream, char* data, size_t size) {
  const iovec part{data, size};
  return moved_or_end(stream.read(&part, 1));
}

int64_t write_some(TlsStream& stream, const char* data, size_t size) {
  const iovec part{const_cast<char*>(data), size};
  return moved_or_end(stream.write(&part, 1));
}

}  // namespace p3::binding
