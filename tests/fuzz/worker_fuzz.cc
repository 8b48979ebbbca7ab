// A whole worker: it initialises, pushes and fetches keys of both kinds, and what calls itself its server and its
// neighbour, or the other one of its group, which it leads or follows, sends sequences of frames, each possibly changed.
// Nothing lands outside the arrays that it was given, and every operation ends.
#include <array>
#include <condition_variable>
#include <mutex>

#include "input.h"
#include "p3/worker.h"
#include "peer.h"

namespace p3 {
namespace {

KeyPlan plan_of(uint32_t wire_key, uint32_t row_elements, uint64_t staleness) {
  KeyPlan plan;
  plan.wire_key = wire_key;
  plan.elements = 60;
  plan.slice_elements = row_elements == 0 ? 40 : 12;
  plan.row_elements = row_elements;
  plan.partitions = row_elements == 0 ? 0 : 2;
  plan.staleness = staleness;
  return plan;
}

class Operations {
 public:
  Worker::Done begin() {
    ++begun_;
    return [this](const Error*, bool) { end(); };
  }
  Worker::RowsDone begin_rows() {
    ++begun_;
    return [this](const Error*, const RowsView&) { end(); };
  }
  bool all_ended() {
    std::unique_lock<std::mutex> lock(mutex_);
    return changed_.wait_for(lock, std::chrono::milliseconds(kHangMs), [this] { return ended_ == begun_; });
  }

 private:
  void end() {
    std::lock_guard<std::mutex> lock(mutex_);
    ++ended_;
    changed_.notify_all();
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  int begun_ = 0, ended_ = 0;
};

Header answer_of(Input& input, const KeyPlan& plan, const uint64_t* rounds, bool to_machine) {
  Header header;
  header.key = plan.wire_key;
  header.slice = input.below(slice_count(plan));
  header.round = rounds[plan.wire_key - 1] + input.below(2);
  header.part = plan.is_synchronous() ? 0 : static_cast<uint8_t>(input.below(2));  // 1: nobody goes on
  switch (input.below(4)) {
    case 0:
      header.kind = plan.has_rows() ? FrameKind::kPart : FrameKind::kValue;
      break;
    case 1:
      header.kind = FrameKind::kValue;
      header.encoding = static_cast<uint8_t>(Encoding::kAbsent);
      break;
    default:
      header.kind = plan.has_rows() ? FrameKind::kRows : FrameKind::kValue;
      header.of_machine = to_machine;
  }
  return header;
}

}  // namespace
}  // namespace p3

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace p3;
  Input input(data, size);
  const uint8_t choices = input.byte(), apart = input.byte();
  const bool checksums = choices & 1, leads = choices & 2, follows = !leads && choices & 4;
  Compression compression;
  if (choices & 8)
    compression.encoding = choices & 16 ? Encoding::kFloat16 : choices & 128 ? Encoding::kTopK : Encoding::kTwoBit;
  if (compression.encoding == Encoding::kTwoBit) compression.options[0] = 0.5;
  if (compression.encoding == Encoding::kTopK) compression.options = {0.001, 0, 0, 1};
  const bool takes_steps = compression.encoding == Encoding::kTopK, is_apart = apart & 1 && !takes_steps;
  const bool has_factors = apart & 4 && !is_apart;
  std::array<KeyPlan, 2> plans = {plan_of(1, 0, is_apart), plan_of(2, 3, is_apart)};
  if (has_factors)
    plans[0].parts = 2, plans[0].update = Update::kWorkers,
    plans[0].reduction = apart & 2 ? Reduction::kAverage : Reduction::kSum;
  else
    plans[0].codec = compression, plans[0].update = takes_steps ? Update::kSteps : Update::kServers;
  const bool comes_back = apart & 8 && !is_apart && !has_factors && !takes_steps;
  if (comes_back) plans[0].value_codec = apart & 16 ? Encoding::kFloat16 : Encoding::kEightBit;

  // Outlive the worker, which borrows them to its end.
  std::vector<float> gradient(60, 1), landing(60), row_landing(60);
  const std::vector<int64_t> ids = {0, 1, 7, 19};
  Operations operations;
  FuzzPeer server, neighbour;
  Worker worker(follows ? 1 : 0, 1, fuzz_node("worker (here)", checksums));
  worker.add_server(0, server.connect(), "the server");
  if ((leads || follows) && apart & 32) {
    worker.add_member(follows ? 0 : 1, neighbour.connect(), "the other one of its group");
    worker.join_groups({2, {2}, {0}});
  } else if (leads || follows) {
    worker.add_local(follows ? 0 : 1, neighbour.connect(), "its neighbour");
  }
  worker.start();
  const int key =
      has_factors ? worker.declare_factors("w", {4, 10, 5}, 2) : worker.declare("w", 60, DType::kFloat32, compression);
  const int rows = worker.declare_rows("emb", 20, 3, DType::kFloat32);
  worker.agree(key, plans[0]);
  worker.agree(rows, plans[1]);
  float* const whole = choices & 32 ? row_landing.data() : nullptr;
  if (choices & 64) {  // otherwise the first answers are to pushes
    worker.init(key, gradient.data(), landing.data(), 0, operations.begin());
    worker.init(rows, gradient.data(), whole, 0, operations.begin());
  }
  worker.choose_route(rows, 0, choices & 128);
  if (is_apart) {  // whose answers may say that nobody goes on
    worker.skip(key, landing.data(), 0, operations.begin(), false, /*goes_on=*/apart & 2);
    worker.skip(rows, whole, 0, operations.begin(), false, /*goes_on=*/apart & 2);
  }
  for (int round = 0; round < 2; ++round) {
    worker.push(key, gradient.data(), landing.data(), 0, {}, operations.begin());
    worker.push_rows(rows, {ids.data(), ids.size(), gradient.data()}, whole, 0, {}, operations.begin_rows());
  }
  worker.fetch_rows(rows, 0, ids.data(), ids.size(), row_landing.data(), 0, operations.begin());
  worker.skip(key, landing.data(), 0, operations.begin());

  const uint64_t rounds[] = {choices & 64 ? 0u : 1u, choices & 64 ? 0u : 1u};
  for (int frames = 0; frames < 40 && !input.empty(); ++frames) {
    const KeyPlan& plan = plans[input.below(2)];
    const bool from_neighbour = (leads || follows) && input.below(2) == 1;
    Header header =
        answer_of(input, plan, rounds, leads && !is_apart && (plan.has_rows() || !(takes_steps || has_factors)));
    if (from_neighbour && leads) {
      header.kind = plan.has_rows() ? FrameKind::kPushRows : FrameKind::kPush;
      header.of_machine = 0;
      header.part = static_cast<uint8_t>(input.below(2));
    }
    if (header.kind == FrameKind::kValue && header.encoding == 0 && header.round > 0 && choices & 8 && choices & 16)
      header.encoding = static_cast<uint8_t>(input.below(2));
    if (header.kind == FrameKind::kValue && header.encoding == 0 && header.round > 0 && takes_steps &&
        input.below(2) == 1)
      header.encoding = static_cast<uint8_t>(Encoding::kTopK);
    if (comes_back && header.kind == FrameKind::kValue && header.encoding == 0 && header.key == 1 && header.round > 0 &&
        input.below(2) == 1) {
      header.encoding = static_cast<uint8_t>(plans[0].value_codec.encoding);
      if (input.below(2) == 1) header.kind = FrameKind::kChange;
    }
    std::vector<char> payload;
    if (comes_back && header.encoding == static_cast<uint8_t>(plans[0].value_codec.encoding))
      payload = input.bytes(plans[0].value_codec.bytes(slice_at(plan, header.slice).elements));
    else if (header.encoding == static_cast<uint8_t>(Encoding::kTopK))
      payload = top_k_payload(input, slice_at(plan, header.slice).elements);
    else if (header.encoding == static_cast<uint8_t>(Encoding::kAbsent))
      payload = {};
    else if (header.kind == FrameKind::kPart)
      payload = input.bytes(input.below(5) * 12);
    else if (plan.has_rows())
      payload = rows_payload(input, plan, header.slice, 12);
    else
      payload = input.bytes(encoded_bytes(static_cast<Encoding>(header.encoding), DType::kFloat32,
                                          slice_at(plan, header.slice).elements));
    (from_neighbour ? neighbour : server).send(input, header, payload, checksums);
    if (input.below(8) == 0) (from_neighbour ? neighbour : server).read();
  }
  server.end();
  if (leads || follows) neighbour.end();
  require(becomes_readable(worker.event_fd()));
  require(operations.all_ended());
  return 0;
}
