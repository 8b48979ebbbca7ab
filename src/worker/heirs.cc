// A worker whose server is lost, and that goes on with its heir: docs/replicated-servers.md.
#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>

#include "plan/frames.h"
#include "worker/worker_impl.h"

namespace p3 {
namespace {

// Behind all claims; a goodbye comes later still.
constexpr uint64_t kBehindAll = std::numeric_limits<uint64_t>::max() - 1;

Header nothing_of(uint32_t key, uint32_t slice, DType dtype) {
  Header claim;
  claim.kind = FrameKind::kClaim;
  claim.dtype = static_cast<uint8_t>(dtype);
  claim.encoding = static_cast<uint8_t>(Encoding::kAbsent);
  claim.part = static_cast<uint8_t>(Claimed::kNothing);
  claim.key = key;
  claim.slice = slice;
  set_inits(claim, 0);
  return claim;
}

}  // namespace

bool Worker::Impl::lost(int van, const Error&) {
  if (!outlives_servers || std::find(van_of_server_.begin(), van_of_server_.end(), van) == van_of_server_.end())
    return false;
  MutexLock lock(mutex_);
  for (size_t server = 0; server < van_of_server_.size(); ++server)
    if (van_of_server_[server] == van) is_lost_[server] = true;
  return true;
}

void Worker::Impl::go_to_heir(int lost, int heir) {
  const int former = van_of_server_[static_cast<size_t>(lost)], van = van_of_server_[static_cast<size_t>(heir)];
  if (former == van) return;
  transport_.drop_van(former);
  std::vector<bool> is_moved(van_of_server_.size());
  for (size_t server = 0; server < is_moved.size(); ++server) is_moved[server] = van_of_server_[server] == former;
  // First all claims leave: what a script begins meanwhile still goes to nobody, and is sent again. Nothing lands here.
  std::vector<Transport::Outgoing> frames;
  {
    MutexLock lock(mutex_);
    for (auto& [handle, key] : keys_)
      if (key.plan) claim_of(key, is_moved, van, frames);
  }
  transport_.send(std::exchange(frames, {}));
  {
    MutexLock lock(mutex_);
    for (size_t server = 0; server < is_moved.size(); ++server)
      if (is_moved[server]) {
        is_lost_[server] = is_lost_[static_cast<size_t>(heir)];
        van_of_server_[server] = van;
      }
    for (auto& [handle, key] : keys_)
      if (key.plan) send_again(key, is_moved, frames);
    for (uint32_t server = 0; server < is_moved.size(); ++server) {
      if (!is_moved[server]) continue;
      Frame last;
      last.header = nothing_of(kNoKey, server, DType::kFloat32);
      last.header.round = kBehindAll;
      frames.push_back({van, last});
    }
  }
  transport_.send(frames);
}

void Worker::Impl::claim_of(const Key& key, const std::vector<bool>& is_moved, int heir_van,
                            std::vector<Transport::Outgoing>& frames) {
  const KeyPlan& plan = key.plan_in_use();
  for (uint32_t shard = 0; shard < slice_count(plan); ++shard) {
    if (!is_moved[static_cast<size_t>(server_of(plan, shard, num_servers_))]) continue;
    const Frame has = key.way->claim(shard);
    Frame claim;
    claim.header = nothing_of(plan.wire_key, shard, plan.dtype);
    if (has.payload != nullptr) {
      Header header = claim.header;
      header.encoding = static_cast<uint8_t>(Encoding::kPlain);
      header.part = has.header.part;
      header.round = has.header.round;
      header.priority = has.header.priority;
      header.scalars = has.header.scalars;
      PooledBuffer value(claims_, has.header.payload_bytes);
      std::memcpy(value.data(), has.payload, has.header.payload_bytes);
      claim = lent_claims_.lend(header, std::move(value), has.header.payload_bytes, 1);
      claim.goes_by_fields = true;
      claim.fields = has.fields;
    }
    frames.push_back({heir_van, claim});
  }
}

// What the caller still waits for is sent again as it was: its arrays are ours until it has come.
void Worker::Impl::send_again(Key& key, const std::vector<bool>& is_moved, std::vector<Transport::Outgoing>& frames) {
  const KeyPlan& plan = key.plan_in_use();
  for (uint32_t shard = 0; shard < slice_count(plan); ++shard) {
    if (!is_moved[static_cast<size_t>(server_of(plan, shard, num_servers_))]) continue;
    const bool has_begun = key.active && shard < key.begun.size() && key.begun[shard].header.kind != FrameKind::kPing;
    if (has_begun && !key.landed[shard]) begin_frame(key, key.transfer().again(key.begun[shard]), frames);
  }
}

void Worker::inherit(int lost, int heir) {
  impl_->check_server(lost);
  impl_->check_server(heir);
  if (!impl_->outlives_servers) impl_->refuse_call("it was not told to outlive servers");
  impl_->transport_.run_in_receiver([&] { impl_->go_to_heir(lost, heir); });
}

std::vector<int> Worker::lost_servers() const {
  std::vector<int> lost;
  MutexLock lock(impl_->mutex_);
  for (size_t server = 0; server < impl_->is_lost_.size(); ++server)
    if (impl_->is_lost_[server]) lost.push_back(static_cast<int>(server));
  return lost;
}

}  // namespace p3
