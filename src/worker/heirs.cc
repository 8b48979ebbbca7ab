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

}  // namespace

bool Worker::Impl::lost(int van, const Error&) {
  const auto found = std::find(own_van_.begin(), own_van_.end(), van);
  if (!outlives_servers || found == own_van_.end()) return false;
  MutexLock lock(mutex_);
  is_lost_[static_cast<size_t>(found - own_van_.begin())] = true;
  return true;
}

void Worker::Impl::check_that_it_outlives_servers() const {
  if (!outlives_servers) refuse_call("it was not told to outlive servers");
}

void Worker::Impl::inherit(int lost, int heir, const std::vector<int>& ranks) {
  transport_.drop_van(own_van_[static_cast<size_t>(lost)]);
  {
    MutexLock lock(mutex_);
    is_lost_[static_cast<size_t>(lost)] = false;
  }
  go_to(own_van_[static_cast<size_t>(heir)], ranks);
}

void Worker::Impl::take_back(int server, std::unique_ptr<Stream> stream) {
  const int van = own_van_[static_cast<size_t>(server)];
  if (!transport_.is_lost(van)) refuse_call("server " + std::to_string(server) + " is not lost");
  {
    MutexLock lock(mutex_);
    is_lost_[static_cast<size_t>(server)] = false;
  }
  transport_.replace_van(van, std::move(stream));
  std::vector<int> ranks = {server};
  // And of which it has become the heir meanwhile: no claim could go to it.
  for (int other = 0; other < num_servers_; ++other)
    if (van_of_server_[static_cast<size_t>(other)] == van) ranks.push_back(other);
  go_to(van, ranks);
}

void Worker::Impl::go_to(int van, const std::vector<int>& ranks) {
  std::vector<bool> is_moved(van_of_server_.size());
  for (int server : ranks) is_moved[static_cast<size_t>(server)] = true;
  // First all claims leave: what a script begins meanwhile still goes where it went, and is sent again. Nothing lands here.
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
      if (is_moved[server]) van_of_server_[server] = van;
    for (auto& [handle, key] : keys_)
      if (key.plan) send_again(key, is_moved, frames);
    for (uint32_t server = 0; server < is_moved.size(); ++server) {
      if (!is_moved[server]) continue;
      Frame last{nothing_claimed()};
      last.header.key = kNoKey;
      last.header.slice = server;
      last.header.round = kBehindAll;
      frames.push_back({van, last});
    }
    if (leaves_) add_all_that_is_owed(frames);
  }
  transport_.send(frames);
}

void Worker::Impl::claim_of(Key& key, const std::vector<bool>& is_moved, int heir_van,
                            std::vector<Transport::Outgoing>& frames) {
  const KeyPlan& plan = key.plan_in_use();
  for (uint32_t shard = 0; shard < slice_count(plan); ++shard) {
    if (is_moved[static_cast<size_t>(server_of(plan, shard, num_servers_))])
      frames.push_back(claim_to(heir_van, key, shard, key.way->claim(shard)));
  }
}

Transport::Outgoing Worker::Impl::claim_to(int heir_van, const Key& key, uint32_t shard, const Frame& claim) {
  Header header = claim.header;
  header.dtype = static_cast<uint8_t>(key.plan_in_use().dtype);
  header.key = key.plan_in_use().wire_key;
  header.slice = shard;
  Frame sent;
  sent.header = header;
  if (claim.payload != nullptr) {
    PooledBuffer value(claims_, header.payload_bytes);
    std::memcpy(value.data(), claim.payload, header.payload_bytes);
    sent = lent_claims_.lend(header, std::move(value), header.payload_bytes, 1);
  }
  sent.goes_by_fields = claim.goes_by_fields;
  sent.fields = claim.fields;
  return {heir_van, sent};
}

// Of a key that all workers have released, the heir has forgotten it, too. Or another worker has given the value since, and
// the heir has handed the slice over: then it asks in vain.
void* Worker::Impl::receive_ask_into(int van, const Header& ask) {
  const auto known = handle_of_wire_key_.find(ask.key);
  if (!outlives_servers || ask.payload_bytes > 0) refuse(van, ask, "unexpected");
  if (known == handle_of_wire_key_.end()) return this;
  const KeyPlan& plan = keys_.at(known->second).plan_in_use();
  if (ask.slice >= slice_count(plan)) refuse(van, ask, "misplaced");
  return this;  // nothing comes
}

void Worker::Impl::answer_ask(int van, const Header& ask) {
  std::vector<Transport::Outgoing> frames;
  {
    MutexLock lock(mutex_);
    const auto known = handle_of_wire_key_.find(ask.key);
    if (known == handle_of_wire_key_.end()) return;
    Key& key = keys_.at(known->second);
    if (serving_van(key.plan_in_use(), ask.slice) == van) add_what_is_owed(key, ask.slice, frames);
  }
  transport_.send(frames);
}

void Worker::Impl::add_what_is_owed(Key& key, uint32_t shard, std::vector<Transport::Outgoing>& frames) {
  const Frame owed = key.way->owed(shard);
  if (owed.payload == nullptr) return;
  frames.push_back(claim_to(serving_van(key.plan_in_use(), shard), key, shard, owed));
}

void Worker::Impl::add_all_that_is_owed(std::vector<Transport::Outgoing>& frames) {
  for (auto& [handle, key] : keys_)
    if (key.plan)
      for (uint32_t shard = 0; shard < slice_count(key.plan_in_use()); ++shard) add_what_is_owed(key, shard, frames);
}

void Worker::Impl::give_what_is_owed() {
  if (!outlives_servers) return;
  try {
    transport_.run_in_receiver([&] {
      std::vector<Transport::Outgoing> frames;
      {
        MutexLock lock(mutex_);
        leaves_ = true;
        add_all_that_is_owed(frames);
      }
      transport_.send(frames);
    });
  } catch (const Error&) {  // then nobody goes on
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

void Worker::inherit(int lost, int heir, const std::vector<int>& ranks) {
  impl_->check_that_it_outlives_servers();
  impl_->check_server(lost);
  impl_->check_server(heir);
  for (int rank : ranks) impl_->check_server(rank);
  if (lost == heir) impl_->refuse_call("server " + std::to_string(lost) + " cannot be its own heir");
  impl_->transport_.run_in_receiver([&] { impl_->inherit(lost, heir, ranks); });
}

void Worker::take_back(int server, std::unique_ptr<Stream> stream) {
  impl_->check_that_it_outlives_servers();
  impl_->check_server(server);
  impl_->transport_.run_in_receiver([&] { impl_->take_back(server, std::move(stream)); });
}

std::vector<int> Worker::lost_servers() const {
  std::vector<int> lost;
  MutexLock lock(impl_->mutex_);
  for (size_t server = 0; server < impl_->is_lost_.size(); ++server)
    if (impl_->is_lost_[server]) lost.push_back(static_cast<int>(server));
  return lost;
}

}  // namespace p3
