// The core's arguments, made of what Cython can pass. Errors: as what they make throws, and Error(kUsage).
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "p3/codec.h"
#include "p3/dtype.h"
#include "p3/node.h"
#include "p3/optimizer.h"
#include "p3/server.h"
#include "p3/stream.h"
#include "p3/tls_stream.h"
#include "p3/worker.h"

namespace p3::binding {

// A van's stream: the TLS connection, if there is one, which it takes over; the bare socket; or, with the descriptors of a
// ring, shared memory, of which the socket tells only the end.
std::unique_ptr<Stream> stream_of(int fd, const std::vector<int>& ring, bool is_maker, TlsStream* tls);
TlsStream* new_tls_stream(int fd, const std::string& key, bool connects);
std::vector<int> make_ring(size_t bytes_each_way);

// `options`: by name; those that are not there are the standard ones.
Compression compression_of(const std::string& type, const std::map<std::string, double>& options);

// Takes the descriptor over. -1: no trace.
NodeOptions node_options(std::string label, double heartbeat_s, double timeout_s, bool checksums, int trace_fd,
                         bool outlives_scheduler, bool outlives_servers = false);
// `groups`: of each worker; none: there are none. `group_leader`: who leads them for this server, by place.
ServerOptions server_options(NodeOptions node, bool by_arrival, int threads, const std::vector<int>& machines,
                             bool local_aggregation, const std::vector<int>& groups, int group_leader,
                             bool outlives_workers);

SharedFields shared_fields(const std::vector<double>& values);

// The parts that a key of that type has where the optimizer updates it: 0, its value, and the parts of its state.
std::vector<uint8_t> parts_of(const OptimizerSpec& spec, DType dtype);

// Of the arrays that the servers keep beside a weight.
std::vector<std::string> state_names(const OptimizerSpec& spec);

void fail(Worker& worker, const std::string& text);
void fail(Server& server, const std::string& text);

// One step of a handshake. 0: done, 1: wait until readable, 2: until writable.
int shake_hands(TlsStream& stream);
// Bytes moved, 0 where none can move now, -1 where the other end has gone. Throws Error(kPeerLost) for all else.
int64_t read_some(TlsStream& stream, char* data, size_t size);
int64_t write_some(TlsStream& stream, const char* data, size_t size);

}  // namespace p3::binding
