#include "server/discipline/make_shard.h"

#include "server/discipline/quorum/quorum_slice.h"
#include "server/discipline/stale/stale_partition.h"
#include "server/discipline/stale/stale_slice.h"
#include "server/discipline/sync/norm_slice.h"
#include "server/discipline/sync/partition.h"
#include "server/discipline/sync/slice.h"

namespace p3 {
namespace {

using Make = std::unique_ptr<Shard>(const ServerKey&, uint32_t index, int thread, ShardHost&);

template <typename SomeShard>
std::unique_ptr<Shard> make(const ServerKey& key, uint32_t index, int thread, ShardHost& host) {
  return std::make_unique<SomeShard>(key, index, thread, host);
}

// By whether it has rows, and whether its rounds are synchronous.
constexpr Make* kShards[2][2] = {
    {make<StaleSlice>, make<ServerSlice>},
    {make<StalePartition>, make<ServerPartition>},
};

}  // namespace

std::unique_ptr<Shard> make_shard(const ServerKey& key, uint32_t index, int thread, ShardHost& host) {
  if (key.plan.tells_norms()) return make<NormSlice>(key, index, thread, host);
  if (key.plan.has_quorum()) return make<QuorumSlice>(key, index, thread, host);
  return kShards[key.plan.has_rows()][key.plan.is_synchronous()](key, index, thread, host);
}

}  // namespace p3
