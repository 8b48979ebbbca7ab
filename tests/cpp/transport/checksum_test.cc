// P3_CHECKSUM: a bit that changes between two nodes ends the job with an error that names the peer, and what it spoiled
// never counts. The bits are flipped below a van, in a stream that alters what it carries.
#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "p3/ring_stream.h"
#include "worker/local_job.h"

namespace p3 {
namespace {

using StreamPair = std::pair<std::unique_ptr<Stream>, std::unique_ptr<Stream>>;

StreamPair sockets() {
  const auto [one, other] = unix_pair();
  return {stream_of(one), stream_of(other)};
}

StreamPair rings() {
  const auto [maker, other] = unix_pair();
  const RingStream::Descriptors made = RingStream::make(4096);
  RingStream::Descriptors passed;
  for (size_t i = 0; i < made.size(); ++i) passed[i] = dup(made[i]);
  return {std::make_unique<RingStream>(maker, made, true), std::make_unique<RingStream>(other, passed, false)};
}

// The network: what is read is what was written, but for one bit of one byte.
class AlteringStream : public Stream {
 public:
  AlteringStream(std::unique_ptr<Stream> stream, size_t at) : stream_(std::move(stream)), at_(at) {}

  IoResult read(const iovec* parts, int count) override {
    const IoResult result = stream_->read(parts, count);
    size_t end = begin_ + result.bytes;
    if (at_ >= begin_ && at_ < end) {
      size_t place = at_ - begin_;
      for (; place >= parts->iov_len; ++parts) place -= parts->iov_len;
      static_cast<char*>(parts->iov_base)[place] ^= 4;
    }
    begin_ = end;
    return result;
  }
  IoResult write(const iovec* parts, int count) override { return stream_->write(parts, count); }
  int read_fd() const override { return stream_->read_fd(); }
  int write_fd() const override { return stream_->write_fd(); }
  uint32_t write_event() const override { return stream_->write_event(); }
  void end_writing() override { stream_->end_writing(); }
  void close() override { stream_->close(); }

 private:
  std::unique_ptr<Stream> stream_;
  const size_t at_;
  size_t begin_ = 0;
};

constexpr size_t kNever = ~size_t{0};
constexpr size_t kElements = 100, kFrame = sizeof(Header) + kElements * sizeof(float);

// A worker and a server of one slice, and what happens on the way: the byte that is altered in each direction.
struct ChecksumJob {
  ChecksumJob(StreamPair streams, size_t to_server, size_t to_worker, bool checksums = true) {
    NodeOptions with = timeless("worker 0 (here)");
    with.checksums = checksums;
    worker = std::make_unique<Worker>(0, 1, with);
    ServerOptions options;
    options.node = with;
    options.node.label = "server 0 (there)";
    server = Server::make(0, 1, 1, options);
    worker->add_server(0, std::make_unique<AlteringStream>(std::move(streams.first), to_worker), "server 0 (there)");
    server->add_worker(0, std::make_unique<AlteringStream>(std::move(streams.second), to_server), "worker 0 (here)");
    server->start();
    worker->start();
    KeyPlan plan;
    plan.wire_key = 7;
    plan.elements = kElements;
    server->define(plan, "w", 0);
    key = worker->declare("w", kElements, DType::kFloat32);
    worker->agree(key, plan);
  }

  std::string init() {
    worker->init(key, value.data(), landing.data(), 0, pending.done());
    return pending.wait_for(1);
  }
  std::string push() {
    worker->push(key, value.data(), landing.data(), 0, {}, pending.done());
    return pending.wait_for(1);
  }

  std::vector<float> value = std::vector<float>(kElements, 1), landing = std::vector<float>(kElements, 0);
  Pending pending;
  int key;
  std::unique_ptr<Server> server;
  std::unique_ptr<Worker> worker;
};

class Checksums : public testing::TestWithParam<StreamPair (*)()> {};
INSTANTIATE_TEST_SUITE_P(Over, Checksums, testing::Values(sockets, rings),
                         [](const auto& of) { return of.index == 0 ? "Sockets" : "Rings"; });

constexpr char kAltered[] =
    " sent a slice that is not what its checksum says: the network or a host's memory altered it (key ";

TEST_P(Checksums, RoundsPassUnaltered) {
  ChecksumJob job(GetParam()(), kNever, kNever);
  EXPECT_EQ(job.init(), "");
  for (int round = 0; round < 3; ++round) EXPECT_EQ(job.push(), "");
  EXPECT_EQ(job.landing, job.value);
}

TEST_P(Checksums, AnAlteredGradientNamesTheWorkerKeySliceAndRound) {
  for (size_t at : {sizeof(Header), sizeof(Header) + 13, kFrame - 1, size_t{24}, size_t{32}, size_t{40}}) {
    ChecksumJob job(GetParam()(), kFrame + at, kNever);
    EXPECT_EQ(job.init(), "");
    EXPECT_EQ(job.push(), std::string("server 0 (there): worker 0 (here)") + kAltered + "'w', slice 0, round 1).")
        << "byte " << at;
    EXPECT_EQ(job.server->counters().rounds, 0u);
  }
}

TEST_P(Checksums, AnAlteredFirstValueIsNotTaken) {
  ChecksumJob job(GetParam()(), sizeof(Header) + 5, kNever);
  EXPECT_NE(job.init().find(kAltered), std::string::npos);
}

TEST_P(Checksums, AnAlteredValueNeverCompletesARound) {
  for (size_t at : {sizeof(Header), kFrame - 1, size_t{24}}) {
    ChecksumJob job(GetParam()(), kNever, kFrame + at);
    EXPECT_EQ(job.init(), "");
    EXPECT_EQ(job.push(), std::string("worker 0 (here): server 0 (there)") + kAltered + "7, slice 0, round 1).");
    EXPECT_EQ(job.worker->key_counters(job.key).rounds, 0u);
  }
}

TEST_P(Checksums, WithoutThemABitPassesUnseen) {  // so the tests above flip what nothing else would notice
  ChecksumJob job(GetParam()(), kFrame + sizeof(Header) + 13, kNever, false);
  EXPECT_EQ(job.init(), "");
  EXPECT_EQ(job.push(), "");
  EXPECT_NE(job.landing, job.value);
}

TEST(Checksums, ANodeWithoutThemRefusesThem) {
  Header header;
  header.kind = FrameKind::kPush;
  header.crc32c = 1;
  EXPECT_NE(malformed(header, false).find("P3_CHECKSUM"), std::string::npos);
  EXPECT_EQ(malformed(header, true), "");
  header.kind = FrameKind::kPing;  // carries no slice
  EXPECT_NE(malformed(header, true), "");
}

// Compressed gradients are covered as they are sent, and what a leader adds up and passes on gets checksums of its own.
TEST(Checksums, HoldForCompressedGradientsAndThroughALeader) {
  for (const Encoding encoding : {Encoding::kPlain, Encoding::kFloat16, Encoding::kTwoBit, Encoding::kOneBit}) {
    ServerOptions options;
    options.node = timeless("server 0 (here)");
    options.node.checksums = true;
    options.machines = Machines(std::vector<int>{0, 0});
    const auto server = Server::make(0, 1, 2, options);
    std::vector<std::unique_ptr<Worker>> workers;
    for (int rank = 0; rank < 2; ++rank) {
      NodeOptions with = timeless(name_of_worker(static_cast<size_t>(rank)));
      with.checksums = true;
      workers.push_back(std::make_unique<Worker>(rank, 1, with));
      StreamPair streams = sockets();
      workers.back()->add_server(0, std::move(streams.first), "server 0 (here)");
      server->add_worker(rank, std::move(streams.second), with.label);
    }
    StreamPair near = rings();
    workers[0]->add_local(1, std::move(near.first), "worker 1 (here)");
    workers[1]->add_local(0, std::move(near.second), "worker 0 (here)");
    server->start();
    KeyPlan plan;
    plan.wire_key = 7;
    plan.elements = kElements;
    plan.codec = {encoding, 0.5f};
    server->define(plan, "w", 0);
    Pending pending;
    const std::vector<float> ones(kElements, 1);
    std::vector<std::vector<float>> landings(2, std::vector<float>(kElements));
    int key = 0;
    for (size_t rank = 0; rank < 2; ++rank) {
      workers[rank]->start();
      key = workers[rank]->declare("w", kElements, DType::kFloat32, {encoding, 0.5f});
      workers[rank]->agree(key, plan);
      workers[rank]->init(key, ones.data(), landings[rank].data(), 0, pending.done());
    }
    EXPECT_EQ(pending.wait_for(2), "");
    for (size_t rank = 0; rank < 2; ++rank)
      workers[rank]->push(key, ones.data(), landings[rank].data(), 0, {}, pending.done());
    EXPECT_EQ(pending.wait_for(2), "");
    // The sum of both is encoded, and leaves a threshold.
    for (const auto& landing : landings) EXPECT_EQ(landing[0], encoding == Encoding::kTwoBit ? 0.5f : 2.f);
    for (auto& worker : workers) worker->close(1);
  }
}

}  // namespace
}  // namespace p3
