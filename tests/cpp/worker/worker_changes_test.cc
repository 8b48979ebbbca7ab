// Keys whose values come back encoded, on their worker: what is made of what comes, and what may not come.
#include <cstring>

#include "p3/codec.h"
#include "worker/local_job.h"
#include "worker/worker_job.h"

namespace p3 {
namespace {

constexpr size_t kElements = 300;
const Compression kCodec = Encoding::kEightBit;

std::vector<char> encoded(const std::vector<float>& values) {
  std::vector<float> left_out(values.size());
  std::vector<char> payload(kCodec.bytes(values.size()));
  encode(kCodec, values.data(), left_out.data(), payload.data(), values.size());
  return payload;
}

std::vector<float> added(std::vector<float> to, const std::vector<char>& payload) {
  add_encoded_to_sum(kCodec, to.data(), payload.data(), to.size());
  return to;
}

std::vector<float> numbers(float factor) {
  std::vector<float> made(kElements);
  for (size_t i = 0; i < kElements; ++i) made[i] = factor * float(i * 7919 % 2003) / 999 - 1;
  return made;
}

KeyPlan plan_with_codec(const Compression& value_codec = kCodec, uint64_t elements = kElements) {
  KeyPlan plan = plan_of(3, elements);
  plan.value_codec = value_codec;
  return plan;
}

Header header_of_answer(const Header& request, FrameKind kind, Encoding encoding, size_t bytes) {
  Header header = request;
  header.kind = kind;
  header.encoding = static_cast<uint8_t>(encoding);
  header.payload_bytes = static_cast<uint32_t>(bytes);
  return header;
}

struct ChangesJob : OneServer {
  explicit ChangesJob(const KeyPlan& plan = plan_with_codec()) : OneServer(unix_pair()) {
    handle = worker.declare("w", plan.elements, plan.dtype, plan.codec);
    worker.agree(handle, plan);
    worker.init(handle, value.data(), landing.data(), 0, results.expect(0));
    answer(server.must_receive(), value);
    EXPECT_TRUE(results.wait_for(1));
  }

  Header push() {
    worker.push(handle, gradient.data(), landing.data(), 0, RoundSettings{}, results.expect(1));
    return server.must_receive();
  }

  // The text with which the worker fails when this comes for a push.
  std::string refusal_of(FrameKind kind, Encoding encoding, const std::vector<char>& payload) {
    server.send(header_of_answer(push(), kind, encoding, payload.size()), payload.data());
    EXPECT_TRUE(results.wait_for(2));
    return results.text(1);
  }

  int handle = 0;
  std::vector<float>&value = array(kElements, 4), &landing = array(kElements), &gradient = array(kElements, 1);
};

TEST(WorkerChanges, AreAddedToWhatLandedLast) {
  ChangesJob job;
  std::vector<float> expected = job.value;
  for (size_t round = 1; round <= 4; ++round) {
    const Header request = job.push();
    if (round == 3) {  // a value may come whole
      expected = numbers(5);
      job.answer(request, expected);
    } else {
      const std::vector<char> payload = encoded(numbers(float(round)));
      expected = added(expected, payload);
      job.server.send(header_of_answer(request, FrameKind::kChange, Encoding::kEightBit, payload.size()),
                      payload.data());
    }
    ASSERT_TRUE(job.results.wait_for(1 + round));
    EXPECT_EQ(job.results.text(round), "");
    EXPECT_TRUE(job.results.updated(round));
    EXPECT_EQ(job.landing, expected);
  }
}

TEST(WorkerChanges, ComeToAWorkerThatSkips) {
  ChangesJob job;
  job.worker.skip(job.handle, job.landing.data(), 0, job.results.expect(1));
  const std::vector<char> payload = encoded(numbers(2));
  job.server.send(header_of_answer(job.server.must_receive(), FrameKind::kChange, Encoding::kEightBit, payload.size()),
                  payload.data());
  ASSERT_TRUE(job.results.wait_for(2));
  EXPECT_EQ(job.landing, added(job.value, payload));
}

TEST(WorkerChanges, OfSumsComeEncodedAndReplaceWhatWasThere) {
  ChangesJob job;
  const std::vector<char> payload = encoded(numbers(2));
  job.server.send(header_of_answer(job.push(), FrameKind::kValue, Encoding::kEightBit, payload.size()), payload.data());
  ASSERT_TRUE(job.results.wait_for(2));
  EXPECT_EQ(job.results.text(1), "");
  EXPECT_EQ(job.landing, added(std::vector<float>(kElements, 0), payload));
}

TEST(WorkerChanges, MustBeAsAgreed) {
  const std::vector<char> payload = encoded(numbers(2));
  const std::vector<char> halves(2 * kElements), plain(4 * kElements);
  const auto refusal_of = [](const KeyPlan& plan, FrameKind kind, Encoding encoding, const std::vector<char>& content) {
    return ChangesJob(plan).refusal_of(kind, encoding, content);
  };
  const KeyPlan plan = plan_with_codec();
  const char other_encoding[] = "in another encoding than agreed";
  for (FrameKind kind : {FrameKind::kChange, FrameKind::kValue}) {
    EXPECT_NE(refusal_of(plan_of(3, kElements), kind, Encoding::kEightBit, payload).find(other_encoding),
              std::string::npos);
    EXPECT_NE(refusal_of(plan, kind, Encoding::kFloat16, halves).find(other_encoding), std::string::npos);
    EXPECT_NE(refusal_of(plan, kind, Encoding::kEightBit, halves).find("wrongly sized"), std::string::npos);
  }
  EXPECT_NE(refusal_of(plan, FrameKind::kChange, Encoding::kPlain, plain).find(other_encoding), std::string::npos);
  EXPECT_NE(refusal_of(plan, FrameKind::kChange, Encoding::kAbsent, {}).find(other_encoding), std::string::npos);
}

TEST(WorkerChanges, OfASliceThatIsShorterAsItIsThereAreNone) {
  OneServer job(unix_pair());
  std::vector<float>&value = job.array(1, 4), &landing = job.array(1);
  const int key = job.worker.declare("w", 1, DType::kFloat32);
  job.worker.agree(key, plan_with_codec(Encoding::kFloat16, 1));
  job.worker.push(key, value.data(), landing.data(), 0, RoundSettings{}, job.results.expect(0));
  const std::vector<char> payload(6);  // a scale and a half
  job.server.send(header_of_answer(job.server.must_receive(), FrameKind::kChange, Encoding::kFloat16, payload.size()),
                  payload.data());
  ASSERT_TRUE(job.results.wait_for(1));
  EXPECT_NE(job.results.text(0).find("in another encoding than agreed"), std::string::npos);
}

TEST(WorkerChanges, AreNoAnswerToAnInit) {
  OneServer job(unix_pair());
  std::vector<float>&value = job.array(kElements, 4), &landing = job.array(kElements);
  const int key = job.worker.declare("w", kElements, DType::kFloat32);
  job.worker.agree(key, plan_with_codec());
  job.worker.init(key, value.data(), landing.data(), 0, job.results.expect(0));
  const std::vector<char> payload = encoded(numbers(2));
  job.server.send(header_of_answer(job.server.must_receive(), FrameKind::kChange, Encoding::kEightBit, payload.size()),
                  payload.data());
  ASSERT_TRUE(job.results.wait_for(1));
  EXPECT_NE(job.results.text(0).find("in another encoding than agreed"), std::string::npos);
}

TEST(WorkerChanges, AreAddedByTheLeaderOfAMachineAndGoOnAsWholeValues) {
  std::unique_ptr<RawPeer> server, neighbour;
  std::vector<float> gradient(kElements, 1), value = numbers(3), landing = value;
  Worker worker(0, 1, options());
  start_as_leader(worker, server, neighbour);
  Results results;
  const int key = worker.declare("w", kElements, DType::kFloat32);
  worker.agree(key, plan_with_codec());
  worker.push(key, gradient.data(), landing.data(), 0, RoundSettings{}, results.expect(0));
  Header pushed;
  pushed.kind = FrameKind::kPush;
  pushed.key = 3;
  pushed.round = 1;
  pushed.payload_bytes = kElements * sizeof(float);
  neighbour->send(pushed, gradient.data());
  const Header of_machine = server->must_receive();
  EXPECT_EQ(of_machine.contributors, 2);
  const std::vector<char> payload = encoded(numbers(2));
  Header change = header_of_answer(of_machine, FrameKind::kChange, Encoding::kEightBit, payload.size());
  change.contributors = 0;
  server->send(change, payload.data());
  const std::vector<float> expected = added(value, payload);
  const Header passed = neighbour->must_receive();
  EXPECT_EQ(passed.kind, FrameKind::kValue);
  EXPECT_EQ(static_cast<Encoding>(passed.encoding), Encoding::kPlain);
  EXPECT_EQ(passed.of_machine, 0);
  ASSERT_EQ(neighbour->payload.size(), kElements * sizeof(float));
  EXPECT_EQ(std::memcmp(neighbour->payload.data(), expected.data(), neighbour->payload.size()), 0);
  ASSERT_TRUE(results.wait_for(1));
  EXPECT_EQ(landing, expected);
  worker.close(1);
}

}  // namespace
}  // namespace p3
