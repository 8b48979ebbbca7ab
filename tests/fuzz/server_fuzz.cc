// A whole server, whose three workers send sequences of frames: of every kind, for slices and rows, summed and gathered,
// with staleness and without, in turn and out of turn, each possibly changed. It takes them or refuses them; it neither
// touches memory that is not its own nor hangs.
#include <array>

#include "input.h"
#include "p3/server.h"
#include "peer.h"

namespace p3 {
namespace {

constexpr uint32_t kWorkers = 3;

KeyPlan dense(uint32_t wire_key, DType dtype, uint64_t elements) {
  KeyPlan plan;
  plan.wire_key = wire_key;
  plan.dtype = dtype;
  plan.elements = elements;
  plan.slice_elements = 40;
  return plan;
}

KeyPlan with_staleness(KeyPlan plan) {
  plan.staleness = 1;
  return plan;
}

KeyPlan gathered(uint32_t wire_key) {
  KeyPlan plan = dense(wire_key, DType::kFloat32, 50);
  plan.parts = kWorkers;
  plan.update = Update::kWorkers;
  return plan;
}

KeyPlan sparse(uint32_t wire_key, uint32_t partitions) {
  KeyPlan plan = dense(wire_key, DType::kFloat32, 20 * 3);
  plan.slice_elements = 12;
  plan.row_elements = 3;
  plan.partitions = partitions;
  return plan;
}

// The fourth succeeds the third.
const std::array<KeyPlan, 7> kPlans = {dense(1, DType::kFloat32, 100),
                                       dense(2, DType::kFloat16, 10),
                                       sparse(3, 2),
                                       sparse(4, 3),
                                       with_staleness(dense(5, DType::kFloat32, 50)),
                                       with_staleness(sparse(6, 2)),
                                       gathered(7)};
constexpr size_t kFirstApart = 4, kGathered = 6;

// None for a key that it is not for.
Compression for_key(const Compression& wanted, DType type) {
  const Codec* const codec = wanted.codec();
  return codec != nullptr && codec->is_for(type, /*is_vector=*/false) ? wanted : Compression();
}

std::vector<char> payload_of(Input& input, const Header& header, const KeyPlan& plan, const Compression& compression) {
  if (static_cast<Encoding>(header.encoding) == Encoding::kAbsent) return {};
  if (plan.has_rows()) {
    const bool ids_alone = header.kind == FrameKind::kFetchRows;
    return rows_payload(input, plan, header.slice, ids_alone ? 0 : plan.row_elements * sizeof(float));
  }
  const size_t elements = slice_at(plan, header.slice % slice_count(plan)).elements;
  if (header.kind == FrameKind::kPush && static_cast<Encoding>(header.encoding) == Encoding::kTopK)
    return top_k_payload(input, elements);
  if (header.kind == FrameKind::kPush && static_cast<Encoding>(header.encoding) == Encoding::kLargest)
    return largest_payload(input, compression, elements);
  if (header.kind == FrameKind::kPush && static_cast<Encoding>(header.encoding) != Encoding::kPlain)
    return input.bytes(encoded_bytes(for_key(compression, plan.dtype), plan.dtype, elements));
  return input.bytes(elements * size_of(header.kind == FrameKind::kStore ? sum_type(plan.dtype) : plan.dtype));
}

// The next frame that this worker could send, by what it has sent.
class Script {
 public:
  Header next(Input& input, uint32_t worker, const KeyPlan& plan, Encoding pushed, bool of_machine) {
    Header header;
    header.key = plan.wire_key;
    header.slice = input.below(slice_count(plan));
    header.dtype = static_cast<uint8_t>(plan.dtype);
    uint64_t& round = rounds_[worker][plan.wire_key - 1][header.slice];
    header.round = round;
    header.part = 1;
    const auto absent = static_cast<uint8_t>(Encoding::kAbsent);
    switch (input.below(6)) {
      case 0:
        header.kind = FrameKind::kInit;
        if (worker > 0 || plan.has_rows() || plan.is_gathered()) header.encoding = absent;
        return header;
      case 1:
        header.kind = plan.has_rows() ? FrameKind::kFetchRows : FrameKind::kFetch;
        header.part = static_cast<uint8_t>(input.below(3));
        if (header.part == 2 && plan.value_codec.codec() != nullptr) header.part = input.below(2) ? kMaster : kLeftOut;
        header.dtype = static_cast<uint8_t>(header.part == 0 ? plan.dtype : sum_type(plan.dtype));
        if (!plan.has_rows()) header.encoding = absent;
        return header;
      case 2:
        header.kind = plan.has_rows() ? FrameKind::kStoreRows : FrameKind::kStore;
        header.part = plan.has_rows() ? static_cast<uint8_t>(input.below(2)) : 1;
        if (plan.value_codec.codec() != nullptr && input.below(2) == 1)
          header.part = input.below(2) ? kMaster : kLeftOut;
        header.dtype = static_cast<uint8_t>(header.part == 0 ? plan.dtype : sum_type(plan.dtype));
        return header;
      default:
        header.kind = plan.has_rows() ? FrameKind::kPushRows : FrameKind::kPush;
        header.round = ++round;
        header.encoding =
            input.below(8) == 0 ? absent : static_cast<uint8_t>(plan.has_rows() ? Encoding::kPlain : pushed);
        if (plan.is_gathered() && worker_of(plan, header.slice) != static_cast<int>(worker)) header.encoding = absent;
        if (!plan.is_synchronous() || plan.is_gathered()) header.part = static_cast<uint8_t>(input.below(2));
        if (pushed == Encoding::kTopK && input.below(4) == 0) header.encoding = 0;  // it may be plain, too
        header.scalars = {0.5, 0, 1, 1, 1};
        if (of_machine && worker > 0) {
          header.of_machine = 1;
          header.contributors = header.encoding == absent ? 0 : 2;
        }
        return header;
    }
  }

 private:
  uint64_t rounds_[kWorkers][kPlans.size()][2 * kWorkers] = {};  // by slice, of the key that has most
};

// As the scheduler has it done with a store, here at any moment: what comes later is of no key.
void drop_everything(Server& server) {
  try {
    server.drop_store(0);
  } catch (const Error&) {  // the server has failed
  }
}

}  // namespace
}  // namespace p3

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace p3;
  Input input(data, size);
  const uint8_t choices = input.byte(), more = input.byte(), apart = input.byte();
  const bool checksums = choices & 1, aggregated = choices & 2;
  ServerOptions options;
  options.node = fuzz_node("server 0 (here)", checksums);
  options.sum_order = choices & 4 ? SumOrder::kArrival : SumOrder::kRank;
  options.threads = choices & 8 ? 1 : 0;
  options.machines = Machines(std::vector<int>{0, 1, 1});
  options.local_aggregation = aggregated;
  Compression compression;
  compression.encoding = more & 32 ? Encoding::kOneBit : static_cast<Encoding>(more % 3);
  const bool takes_steps = more & 16;  // which needs an optimizer, and no average
  if (apart >> 4 == 6) compression = {Encoding::kLargest, {0.1, 6}};
  if (apart >> 4 == 12) compression = Encoding::kFourBit;
  if (compression.encoding == Encoding::kTwoBit) compression.options[0] = 0.5;
  if (takes_steps) compression = {Encoding::kTopK, {0.001, 0, 0, 1}};

  std::array<FuzzPeer, kWorkers> peers;
  const auto owned = Server::make(0, 1, kWorkers, options);
  Server& server = *owned;
  if (choices & 32 || takes_steps) {
    server.set_optimizer(0,
                         {"sgd", {{"momentum", choices & 64 ? 0.5 : 0}, {"multi_precision", choices & 128 ? 1 : 0}}});
  }
  for (uint32_t rank = 0; rank < kWorkers; ++rank)
    server.add_worker(static_cast<int>(rank), peers[rank].connect(), "a worker");
  std::vector<KeyPlan> plans(kPlans.begin(), kPlans.begin() + (more & 64 ? 4 : 3));
  for (KeyPlan& plan : plans) {
    if (choices & 16 && !takes_steps) plan.reduction = Reduction::kAverage;
    if (plan.has_rows()) continue;
    plan.codec = for_key(compression, plan.dtype);
    if (plan.codec.makes_steps()) plan.update = Update::kSteps;
    const Compression back = apart & 32 ? Encoding::kFloat16 : Encoding::kEightBit;
    if (apart & 16 && !takes_steps) plan.value_codec = for_key(back, plan.dtype);
  }
  for (size_t i = 0; i < 3; ++i) server.define(plans[i], "key", 0);
  if (more & 64) server.define_successor(plans[3], plans[2].wire_key);
  for (size_t i = kFirstApart; i < kGathered && apart & 1 && !takes_steps; ++i) {
    plans.push_back(kPlans[i]);
    if (apart & 2) plans.back().staleness = kUnboundedStaleness;
    if (choices & 16) plans.back().reduction = Reduction::kAverage;
    if (!plans.back().has_rows()) plans.back().codec = compression;
    server.define(plans.back(), "key with staleness", 0);
  }
  if (apart & 4) {
    plans.push_back(kPlans[kGathered]);
    server.define(plans.back(), "key of factors", 0);
  }
  server.start();

  Script script;
  for (int frames = 0; frames < 60 && !input.empty(); ++frames) {
    if (apart & 8 && frames % 20 == 19) drop_everything(server);
    const uint32_t worker = input.below(kWorkers);
    const KeyPlan& plan = plans[input.below(static_cast<uint32_t>(plans.size()))];
    const Encoding pushed = plan.is_gathered() ? Encoding::kPlain : for_key(compression, plan.dtype).encoding;
    const bool of_machine = aggregated && plan.adds_up_on_machine() && !plan.is_gathered();
    const Header header = script.next(input, worker, plan, pushed, of_machine);
    peers[worker].send(input, header, payload_of(input, header, plan, compression), checksums);
    const uint32_t listens = input.below(16);
    if (listens == 0) peers[worker].read();
    if (listens == 1) peers[worker].await_answer();
    if (listens == 2) {
      Header fields;
      fields.kind = FrameKind::kFields;
      peers[worker].send(input, fields, input.bytes(8 * input.below(9)), checksums);
    }
  }
  const bool orderly = more & 128;
  for (FuzzPeer& peer : peers) {
    Header bye;
    bye.kind = FrameKind::kBye;
    Input nothing(nullptr, 0);
    if (orderly) peer.send(nothing, bye, {}, false);
    peer.end();
  }
  // It has lost its workers, or all have said goodbye. What they do not read must not keep it.
  bool ended = false;
  for (int i = 0; i < 100 && !ended; ++i) {
    for (FuzzPeer& peer : peers) peer.read();
    pollfd event{server.event_fd(), POLLIN, 0};
    ended = poll(&event, 1, kHangMs / 100) > 0;
  }
  require(ended);
  server.counters();
  return 0;
}
