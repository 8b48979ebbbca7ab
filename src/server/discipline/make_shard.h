// Which shards a key has: one table of what becomes of the gradients, and in which discipline.
#pragma once

#include <cstdint>
#include <memory>

#include "server/shard.h"

namespace p3 {

// Arguments as those of Shard.
std::unique_ptr<Shard> make_shard(const ServerKey& key, uint32_t index, int thread, ShardHost& host);

}  // namespace p3
