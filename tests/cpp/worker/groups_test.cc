// Groups of workers with shared leaders: real workers and real servers over sockets, and members played by the test.
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "worker/local_job.h"

namespace p3 {
namespace {

struct Shape {
  int workers, servers;
  std::vector<int> sizes;
};

// Connected as p3/cluster/groups.py has it. Servers have the workers of their ranks for homes.
class GroupsJob : public Cores {
 public:
  explicit GroupsJob(const Shape& shape) : groups{shape.workers, shape.sizes, {}} {
    for (int size : shape.sizes) all_ *= size;
    for (int server = 0; server < shape.servers; ++server) groups.homes.push_back(server % shape.workers);
    for (int rank = 0; rank < shape.workers; ++rank)
      workers.push_back(std::make_unique<Worker>(rank, shape.servers, timeless(name(rank))));
    for (int server = 0; server < shape.servers; ++server) add_server(server);
    for (int rank = 0; rank < shape.workers; ++rank) connect_to_members(rank);
    for (auto& server : servers) server->start();
    for (auto& worker : workers) worker->join_groups(groups);
    for (auto& worker : workers) worker->start();
  }

  std::vector<int> greatest_groups() const {
    std::vector<int> found;
    for (int rank = 0; rank < groups.workers; ++rank) found.push_back(rank / all_);
    return found;
  }

  Groups groups;

 private:
  static std::string name(int rank) { return name_of_worker(static_cast<size_t>(rank)); }

  void add_server(int server) {
    const std::string its_name = "server " + std::to_string(server) + " (here)";
    ServerOptions options;
    options.node = timeless(its_name);
    options.groups = Machines(greatest_groups(), groups.homes[static_cast<size_t>(server)] % all_);
    servers.push_back(Server::make(server, static_cast<int>(groups.homes.size()), groups.workers, options));
    for (int rank = 0; rank < groups.workers; ++rank) {
      const auto [ours, its] = unix_pair();
      workers[static_cast<size_t>(rank)]->add_server(server, stream_of(ours), its_name);
      servers.back()->add_worker(rank, stream_of(its), name(rank));
    }
  }

  // Of lower ranks; the others do so themselves.
  void connect_to_members(int rank) {
    for (int other : groups.members(rank)) {
      if (other >= rank) continue;
      const auto [up, down] = unix_pair();
      workers[static_cast<size_t>(rank)]->add_member(other, stream_of(up), name(other));
      workers[static_cast<size_t>(other)]->add_member(rank, stream_of(down), name(rank));
    }
  }

  int all_ = 1;  // workers of a greatest group
};

KeyPlan plan_of(uint64_t elements, DType dtype = DType::kFloat32, const Compression& codec = {}) {
  KeyPlan plan;
  plan.elements = elements;
  plan.dtype = dtype;
  plan.slice_elements = 100;
  plan.codec = codec;
  return plan;
}

// Also groups of one, of all, a last one that is smaller, and groups of groups; more servers than members, and fewer.
const std::vector<Shape> kShapes = {
    {2, 1, {2}}, {4, 4, {2}},    {4, 4, {4}},    {5, 3, {2}},    {6, 6, {3}},     {7, 2, {4}},       {3, 4, {3}},
    {8, 8, {4}}, {4, 4, {2, 2}}, {8, 3, {2, 2}}, {6, 6, {3, 2}}, {12, 5, {2, 3}}, {8, 8, {2, 2, 2}},
};

// By rank into the sums of groups, these into those of greater groups, and the greatest ones' into the total.
template <typename T>
std::vector<T> sum_of_groups(const std::vector<std::vector<T>>& gradients, std::vector<int> sizes) {
  sizes.push_back(static_cast<int>(gradients.size()));
  std::vector<T> sums;
  for (size_t i = 0; i < gradients[0].size(); ++i) {
    std::vector<float> values;
    for (const auto& gradient : gradients) values.push_back(widened(gradient[i]));
    for (int size : sizes) {
      std::vector<float> of_groups;
      for (size_t begin = 0; begin < values.size(); begin += static_cast<size_t>(size)) {
        const size_t end = std::min(begin + static_cast<size_t>(size), values.size());
        const std::vector<float> its(values.begin() + static_cast<ptrdiff_t>(begin),
                                     values.begin() + static_cast<ptrdiff_t>(end));
        of_groups.push_back(widened(narrowed<T>(sum_of(its))));
      }
      values = of_groups;
    }
    sums.push_back(narrowed<T>(values.front()));
  }
  return sums;
}

template <typename T>
void expect_sums(const Shape& shape, DType dtype) {
  constexpr size_t kElements = 1250;
  GroupsJob job(shape);
  const int key = job.make_key(plan_of(kElements, dtype));
  std::vector<T> zeros(kElements);
  std::vector<std::vector<T>> landings(job.workers.size(), zeros);
  ASSERT_EQ(job.init(key, zeros, landings), "");
  for (unsigned round = 1; round <= 3; ++round) {
    std::vector<std::vector<T>> gradients;
    for (unsigned i = 0; i < job.workers.size(); ++i)
      gradients.push_back(as<T>(random_values(kElements, 100 * round + i)));
    for (size_t i = job.workers.size(); i-- > 0;)  // the last first: order must not come from arrival
      job.workers[i]->push(key, gradients[i].data(), landings[i].data(), 0, {}, job.pending.done());
    ASSERT_EQ(job.pending.wait_for(job.workers.size()), "");
    const auto expected = sum_of_groups(gradients, shape.sizes);
    for (size_t i = 0; i < job.workers.size(); ++i) ASSERT_EQ(landings[i], expected) << "worker " << i;
    const auto is_power_of_two = [](int size) { return (size & (size - 1)) == 0; };
    if (std::all_of(shape.sizes.begin(), shape.sizes.end(), is_power_of_two) && sizeof(T) == 4) {
      ASSERT_EQ(expected, canonical_sum(gradients, Machines(shape.workers)));
    }
  }
}

TEST(Groups, AddUpInTheOrderOfRanksAndThoseOfAPowerOfTwoAsWithout) {
  for (size_t i = 0; i < kShapes.size(); ++i) {
    SCOPED_TRACE(::testing::Message() << "shape " << i);
    expect_sums<float>(kShapes[i], DType::kFloat32);
    expect_sums<half>(kShapes[i], DType::kFloat16);
  }
}

// Over all that are small: each push comes to the server through leaders, each of whom is told by as many as it expects.
TEST(Groups, AreATreeForEachServer) {
  for (int workers = 1; workers <= 24; ++workers)
    for (const std::vector<int>& sizes :
         std::vector<std::vector<int>>{{2}, {3}, {5}, {8}, {2, 2}, {2, 3}, {4, 2}, {2, 2, 3}}) {
      Groups groups{workers, sizes, {}};
      for (int home = 0; home < workers; ++home) groups.homes.push_back(home);
      if (!groups.problem(workers).empty()) continue;
      for (int server = 0; server < workers; ++server)
        for (int worker = 0; worker < workers; ++worker) {
          const int leader = groups.leader_of(worker, server);
          const std::vector<int> members = groups.members(worker);
          const auto is_member = [&](int rank) { return std::count(members.begin(), members.end(), rank) == 1; };
          if (worker == server) {
            EXPECT_EQ(leader, worker);  // its own
          }
          const auto levels = groups.levels_of(worker, server);
          std::vector<int> places;
          for (const Groups::Level& level : levels) places.push_back(level.places - 1);
          for (const Groups::Follower& each : groups.followers_of(worker, server)) {
            EXPECT_TRUE(is_member(each.worker));
            EXPECT_EQ(groups.leader_of(each.worker, server), worker);
            EXPECT_EQ(groups.levels_of(each.worker, server).size(), static_cast<size_t>(each.level));
            EXPECT_NE(each.place, levels[static_cast<size_t>(each.level)].own);
            --places[static_cast<size_t>(each.level)];
          }
          for (int missing : places) EXPECT_EQ(missing, 0);
          if (leader == worker) {
            EXPECT_EQ(levels.size(), sizes.size());
            continue;
          }
          EXPECT_TRUE(is_member(leader));
          const auto followers = groups.followers_of(leader, server);
          EXPECT_EQ(std::count_if(followers.begin(), followers.end(),
                                  [=](const Groups::Follower& each) { return each.worker == worker; }),
                    1);
        }
    }
}

TEST(Groups, EachServerGetsOnePushOfEachGroupAndMembersLeadInTurn) {
  GroupsJob job({8, 4, {4}});
  constexpr size_t kElements = 1600;  // 16 slices, 4 on each server
  const int key = job.make_key(plan_of(kElements));
  std::vector<float> zeros(kElements), ones(kElements, 1);
  std::vector<std::vector<float>> landings(8, zeros);
  ASSERT_EQ(job.init(key, zeros, landings), "");
  std::vector<uint64_t> before;
  for (auto& server : job.servers) before.push_back(server->counters().traffic.slices_received);
  for (size_t i = 0; i < 8; ++i) job.workers[i]->push(key, ones.data(), landings[i].data(), 0, {}, job.pending.done());
  ASSERT_EQ(job.pending.wait_for(8), "");
  for (const auto& landing : landings) EXPECT_EQ(landing, std::vector<float>(kElements, 8));
  for (size_t i = 0; i < 4; ++i)
    EXPECT_EQ(job.servers[i]->counters().traffic.slices_received - before[i], 8u) << "server " << i;  // 4, of 2 groups
  for (auto& worker : job.workers) {
    EXPECT_EQ(worker->counters().local.slices_sent, 0u);  // all of it leaves its machine
    // Three first values' requests for each slice aside: 4 sums up, and 12 that others lead; 12 that it passes on.
    EXPECT_TRUE(eventually([&] { return worker->counters().traffic.slices_sent == 16 + 4 + 12 + 12; }));
    EXPECT_EQ(worker->counters().traffic.slices_received, 16u + 4u + 12u + 12u);
    EXPECT_EQ(worker->counters().buffer_bytes, 0u);
  }
}

// All the kinds of keys that a job may have, with gradients or without, in any order.
TEST(Groups, MixWithKeysThatDoNotAddUpInThem) {
  for (unsigned seed = 0; seed < 12; ++seed) {
    SCOPED_TRACE(::testing::Message() << "seed " << seed);
    std::mt19937 random(seed);
    const Shape& shape = kShapes[random() % kShapes.size()];
    GroupsJob job(shape);
    const Compression int8 = Encoding::kEightBit;
    KeyPlan mean = plan_of(330);
    mean.reduction = Reduction::kAverage;
    const std::vector<KeyPlan> plans = {plan_of(1), plan_of(700), mean, plan_of(400, DType::kFloat32, int8)};
    std::vector<int> keys;
    std::vector<std::vector<std::vector<float>>> landings;
    std::vector<std::vector<float>> gradients;
    for (const KeyPlan& plan : plans) {
      keys.push_back(job.make_key(plan));
      std::vector<float> zeros(plan.elements);
      landings.emplace_back(job.workers.size(), zeros);
      gradients.emplace_back(plan.elements, 3.0f);
      ASSERT_EQ(job.init(keys.back(), zeros, landings.back()), "");
    }
    for (int round = 0; round < 4; ++round) {
      std::vector<size_t> present(plans.size());
      for (size_t i = 0; i < job.workers.size(); ++i)
        for (size_t k = 0; k < plans.size(); ++k) {
          const bool skips = random() % 3 == 0 && i > 0;
          present[k] += !skips;
          if (skips)
            job.workers[i]->skip(keys[k], landings[k][i].data(), 0, job.pending.done());
          else
            job.workers[i]->push(keys[k], gradients[k].data(), landings[k][i].data(), static_cast<int>(random() % 9),
                                 {}, job.pending.done());
        }
      ASSERT_EQ(job.pending.wait_for(job.workers.size() * plans.size()), "");
      for (size_t k = 0; k < plans.size(); ++k) {
        const float expected = plans[k].reduction == Reduction::kAverage ? 3.0f : 3.0f * static_cast<float>(present[k]);
        for (const auto& landing : landings[k])
          for (float value : landing) ASSERT_NEAR(value, expected, 0.02f * expected) << "key " << k;
      }
    }
  }
}

TEST(Groups, CompleteARoundThatAllSkipWithoutAnUpdate) {
  GroupsJob job({4, 2, {2}});
  const int key = job.make_key(plan_of(300));
  std::vector<float> zeros(300), ones(300, 1);
  std::vector<std::vector<float>> landings(4, zeros);
  ASSERT_EQ(job.init(key, ones, landings), "");
  for (size_t i = 0; i < 4; ++i)
    job.workers[i]->skip(key, landings[i].data(), 0, [&, done = job.pending.done()](const Error* error, bool updated) {
      EXPECT_FALSE(updated);
      done(error, updated);
    });
  ASSERT_EQ(job.pending.wait_for(4), "");
  for (const auto& landing : landings) EXPECT_EQ(landing, ones);
}

TEST(Groups, OfGatedRoundsEachSliceLeavesAsItIsReady) {
  GroupsJob job({4, 4, {2, 2}});
  const int key = job.make_key(plan_of(1000));
  std::vector<float> zeros(1000);
  std::vector<std::vector<float>> gradients(4, std::vector<float>(1000, 2)), landings(4, zeros);
  ASSERT_EQ(job.init(key, zeros, landings), "");
  for (size_t i = 0; i < 4; ++i)
    job.workers[i]->push(key, gradients[i].data(), landings[i].data(), 0, {}, job.pending.done(), /*gated=*/true);
  for (uint64_t ready = 100; ready <= 1000; ready += 100)
    for (auto& worker : job.workers) worker->ready(key, ready);
  ASSERT_EQ(job.pending.wait_for(4), "");
  for (const auto& landing : landings) EXPECT_EQ(landing, std::vector<float>(1000, 8));
}

// Each waits for the others' gradients and passes values on while its own leave: far more than sockets hold, both ways.
TEST(Groups, HoldEachOtherUpNever) {
  GroupsJob job({6, 6, {3, 2}});
  KeyPlan plan = plan_of(2'000'000);
  plan.slice_elements = 50'000;
  const int key = job.make_key(plan);
  std::vector<float> zeros(plan.elements), ones(plan.elements, 1);
  std::vector<std::vector<float>> landings(6, zeros);
  ASSERT_EQ(job.init(key, zeros, landings), "");
  for (int round = 0; round < 2; ++round)
    for (size_t i = 0; i < 6; ++i)
      job.workers[i]->push(key, ones.data(), landings[i].data(), 0, {}, job.pending.done());
  ASSERT_EQ(job.pending.wait_for(12), "");
  for (const auto& landing : landings) EXPECT_EQ(landing, std::vector<float>(plan.elements, 6));
}

TEST(Groups, AMemberThatLeavesBeforeTheOthersIsNamed) {
  for (size_t leaver : {size_t{0}, size_t{1}, size_t{2}}) {
    GroupsJob job({3, 3, {3}});
    const int key = job.make_key(plan_of(300));
    std::vector<float> zeros(300);
    std::vector<std::vector<float>> landings(3, zeros);
    ASSERT_EQ(job.init(key, zeros, landings), "");
    for (size_t i = 0; i < 3; ++i)
      if (i != leaver) job.workers[i]->push(key, zeros.data(), landings[i].data(), 0, {}, job.pending.done());
    job.workers[leaver]->close(10);
    const std::string text = job.pending.wait_for(2);
    EXPECT_NE(text.find(name_of_worker(leaver) + " ended, but others still push round 1 of key 'key0'"),
              std::string::npos)
        << text;
  }
}

TEST(Groups, MayEndOnceAllHaveWhatTheyNeed) {
  GroupsJob job({6, 4, {3}});
  const int key = job.make_key(plan_of(500));
  std::vector<float> zeros(500);
  std::vector<std::vector<float>> landings(6, zeros);
  ASSERT_EQ(job.init(key, zeros, landings), "");
  for (size_t i = 0; i < 6; ++i) job.workers[i]->push(key, zeros.data(), landings[i].data(), 0, {}, job.pending.done());
  ASSERT_EQ(job.pending.wait_for(6), "");
  for (auto& worker : job.workers) EXPECT_TRUE(worker->close(10));
  for (auto& server : job.servers) {
    EXPECT_TRUE(wait_readable(server->event_fd()));
    EXPECT_TRUE(server->finished());
    EXPECT_FALSE(server->error());
  }
}

// Worker 0 of two servers, and worker 1, which leads their group for the second; played by the test.
struct Member {
  Member() : worker(0, 2, timeless("worker 0 (here)")) {
    for (int server = 0; server < 2; ++server) {
      const auto [ours, its] = unix_pair();
      servers.emplace_back(ours);
      worker.add_server(server, stream_of(its), "server " + std::to_string(server) + " (there)");
    }
    const auto [near, its] = unix_pair();
    other = std::make_unique<RawPeer>(near);
    worker.add_member(1, stream_of(its), "worker 1 (there)");
    worker.join_groups({2, {2}, {0, 1}});
    worker.start();
    KeyPlan plan = plan_of(200);  // a slice on each server
    plan.wire_key = 3;
    key = worker.declare("w", plan.elements, plan.dtype);
    worker.agree(key, plan);
  }
  static Header push_of(uint32_t slice) {
    Header header;
    header.kind = FrameKind::kPush;
    header.key = 3;
    header.slice = slice;
    header.round = 1;
    header.payload_bytes = 400;
    return header;
  }
  std::string failure() {
    EXPECT_TRUE(wait_readable(worker.event_fd()));
    return worker.error() ? worker.error()->what() : "";
  }

  std::vector<float> ones = std::vector<float>(200, 1), landing = std::vector<float>(200);
  Pending pending;
  std::vector<RawPeer> servers;
  std::unique_ptr<RawPeer> other;
  int key = 0;
  Worker worker;
};

TEST(GroupMember, PushesToWhoLeadsAndLeadsItself) {
  Member job;
  job.worker.push(job.key, job.ones.data(), job.landing.data(), 5, {}, job.pending.done());
  Header theirs = job.other->must_receive();  // for the second server
  EXPECT_EQ(theirs.kind, FrameKind::kPush);
  EXPECT_EQ(theirs.slice, 1u);
  EXPECT_EQ(theirs.of_machine, 0);
  job.other->send(Member::push_of(0), job.ones.data());
  Header sum = job.servers[0].must_receive();
  EXPECT_EQ(sum.of_machine, 1);
  EXPECT_EQ(sum.contributors, 2);
  sum.kind = FrameKind::kValue;
  sum.contributors = 0;
  const std::vector<float> twos(100, 2), threes(100, 3);
  job.servers[0].send(sum, twos.data());
  const Header passed = job.other->must_receive();
  EXPECT_EQ(passed.kind, FrameKind::kValue);
  EXPECT_EQ(passed.slice, 0u);
  EXPECT_EQ(passed.of_machine, 0);
  theirs.kind = FrameKind::kValue;
  job.other->send(theirs, threes.data());
  EXPECT_EQ(job.pending.wait_for(1), "");
  EXPECT_EQ(job.landing[0], 2);
  EXPECT_EQ(job.landing[199], 3);
}

TEST(GroupMember, RefusesWhatIsAnothersToSend) {
  const auto refusal = [](auto send) {
    Member job;
    job.worker.push(job.key, job.ones.data(), job.landing.data(), 0, {}, job.pending.done());
    job.other->must_receive();
    send(job);
    return job.failure();
  };
  const std::vector<float> ones(100, 1);
  const auto value = [](uint32_t slice) {
    Header header = Member::push_of(slice);
    header.kind = FrameKind::kValue;
    return header;
  };
  // A gradient for a slice that this one does not lead; the value of one that it does, before its sum is there, and from
  // the other; of the other's slice from its server.
  EXPECT_NE(refusal([&](Member& job) { job.other->send(Member::push_of(1), ones.data()); }).find("misplaced"),
            std::string::npos);
  EXPECT_NE(refusal([&](Member& job) { job.servers[0].send(value(0), ones.data()); }).find("another number of workers"),
            std::string::npos);
  EXPECT_NE(refusal([&](Member& job) { job.other->send(value(0), ones.data()); }).find("another number of workers"),
            std::string::npos);
  EXPECT_NE(refusal([&](Member& job) { job.servers[1].send(value(1), ones.data()); }).find("misplaced"),
            std::string::npos);
  EXPECT_NE(refusal([&](Member& job) { job.other->send(value(7), ones.data()); }).find("misplaced"), std::string::npos);
}

TEST(GroupMember, ThatIsLostIsNamedWithWhatIsWaitedFor) {
  Member job;
  job.worker.push(job.key, job.ones.data(), job.landing.data(), 0, {}, job.pending.done());
  job.other->must_receive();
  job.other->close();
  const std::string text = job.pending.wait_for(1);
  EXPECT_NE(text.find("lost worker 1 (there) while waiting for round 1 of key 'w'"), std::string::npos) << text;
}

// Where gradients are clipped. Worker 0 leads for server 0, workers 1 and 2 for the others.
TEST(GroupMember, KeepsBackWhatItPassesOnWhileItsPushesWait) {
  constexpr uint64_t kSlice = 1 << 20;  // more elements than a socket takes
  const std::vector<float> ones(2 * kSlice, 1);
  const std::vector<int32_t> one(1, 1);
  std::vector<float> landing(2 * kSlice);
  std::vector<int32_t> landing_of_one(1);
  Pending pending;
  std::vector<RawPeer> servers, members;
  Worker worker(0, 3, timeless("worker 0 (here)"));
  for (int rank = 0; rank < 3; ++rank) {
    const auto [ours, its] = unix_pair();
    servers.emplace_back(ours);
    worker.add_server(rank, stream_of(its), "server " + std::to_string(rank) + " (there)");
  }
  for (int rank = 1; rank < 3; ++rank) {
    const auto [near, its] = unix_pair();
    members.emplace_back(near);
    worker.add_member(rank, stream_of(its), "worker " + std::to_string(rank) + " (there)");
  }
  worker.join_groups({3, {3}, {0, 1, 2}});
  worker.start();
  KeyPlan norm;
  norm.elements = norm.slice_elements = kNormElements;
  norm.dtype = DType::kFloat64;
  norm.reduction = Reduction::kNorm;
  norm.wire_key = 9;
  worker.agree(worker.declare("norm", norm.elements, norm.dtype), norm);
  const auto agree = [&](const std::string& name, uint64_t elements, DType dtype, uint32_t wire_key) {
    KeyPlan plan;
    plan.elements = elements;
    plan.dtype = dtype;
    plan.slice_elements = kSlice;
    plan.wire_key = wire_key;
    const int key = worker.declare(name, plan.elements, plan.dtype);
    worker.agree(key, plan);
    return key;
  };
  const int counts = agree("counts", 1, DType::kInt32, 2), weights = agree("weights", 2 * kSlice, DType::kFloat32, 3);
  worker.push(counts, one.data(), landing_of_one.data(), 0, {}, pending.done());
  worker.push(weights, ones.data(), landing.data(), 0, {}, pending.done());
  const auto push = [](uint32_t key, DType dtype, uint32_t bytes) {
    Header header;
    header.kind = FrameKind::kPush;
    header.key = key;
    header.dtype = static_cast<uint8_t>(dtype);
    header.round = 1;
    header.payload_bytes = bytes;
    return header;
  };
  for (RawPeer& member : members) {
    member.send(push(3, DType::kFloat32, kSlice * sizeof(float)), ones.data());
    member.send(push(2, DType::kInt32, sizeof(int32_t)), one.data());
  }
  // Nobody reads at worker 1, so its part of the weights waits. The servers answer the rest, the weights first.
  Header sums[2];
  for (int i = 0; i < 2; ++i) {
    const Header sum = servers[0].must_receive();
    sums[sum.key == 2] = sum;
  }
  for (Header& sum : sums) {
    sum.kind = FrameKind::kValue;
    sum.contributors = 0;
    servers[0].send(sum, ones.data());
  }
  EXPECT_EQ(members[1].must_receive().key, 2u) << "which is no part of the norm";
  EXPECT_EQ(members[0].must_receive().kind, FrameKind::kPush);
  const Header passed = members[1].must_receive();
  EXPECT_EQ(passed.kind, FrameKind::kValue);
  EXPECT_EQ(passed.key, 3u);
}

TEST(GroupsOptions, ThatContradictThemselvesAreRefused) {
  ServerOptions options;
  options.node = timeless("server 0 (here)");
  options.groups = Machines(std::vector<int>{0, 0, 1});
  EXPECT_THROW(Server::make(0, 1, 4, options), Error);
  options.machines = Machines(std::vector<int>{5, 5, 6});
  EXPECT_THROW(Server::make(0, 1, 3, options), Error);  // machines have leaders
  options.local_aggregation = false;
  EXPECT_NO_THROW(Server::make(0, 1, 3, options));
  options.outlives_workers = true;
  EXPECT_THROW(Server::make(0, 1, 3, options), Error);

  const auto joined = [](int workers, const std::vector<int>& sizes, const std::vector<int>& homes) {
    Worker worker(1, 2, timeless("worker 1 (here)"));
    worker.add_member(0, stream_of(unix_pair().first), "worker 0 (there)");
    try {
      worker.join_groups({workers, sizes, homes});
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  EXPECT_EQ(joined(2, {2}, {0, 1}), "");
  EXPECT_NE(joined(2, {2}, {0}).find("each server needs a home"), std::string::npos);
  EXPECT_NE(joined(2, {2}, {0, -1}).find("a home is a rank"), std::string::npos);
  EXPECT_NE(joined(2, {}, {0, 1}).find("no size"), std::string::npos);
  EXPECT_NE(joined(2, {3}, {0, 1}).find("larger than the job"), std::string::npos);
  EXPECT_NE(joined(6, {2, 2}, {0, 1}).find("a multiple of them all"), std::string::npos);
  EXPECT_NE(joined(3, {3}, {0, 1}).find("connected to others"), std::string::npos);
  EXPECT_NE(joined(1, {1}, {0, 1}).find("connected to others"), std::string::npos);

  NodeOptions outliving = timeless("worker 1 (here)");
  outliving.outlives_servers = true;
  Worker worker(1, 2, outliving);
  EXPECT_THROW(worker.add_member(0, stream_of(unix_pair().first), "worker 0 (there)"), Error);
  Worker itself(1, 2, timeless("worker 1 (here)"));
  EXPECT_THROW(itself.add_member(1, stream_of(unix_pair().first), "itself"), Error);
  itself.add_local(0, stream_of(unix_pair().first), "worker 0 (there)");
  EXPECT_THROW(itself.add_member(2, stream_of(unix_pair().first), "worker 2 (there)"), Error);
}

}  // namespace
}  // namespace p3
