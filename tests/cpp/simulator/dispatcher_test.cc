#include "simulator/dispatcher.h"

#include <gtest/gtest.h>

#include <memory>
#include <vector>

#include "simulator/small_job.h"

namespace p3::simulator {
namespace {

// One host that sends to several: which frames arrive in which order.
class DispatcherTest : public testing::Test, public Network::Listener {
 protected:
  // Connections from host 0 to each other host.
  void start(int sinks, double window_bytes = 1e9) {
    Job job = small_job(sinks + 1, {1});
    job.transport.segment_bytes = 10;
    network_ = std::make_unique<Network>(job, events_, *this);
    dispatcher_ = std::make_unique<Dispatcher>(rules_, sinks + 1, events_, *network_, frames_);
    for (int sink = 1; sink <= sinks; ++sink) dispatcher_->add(network_->connect(0, sink), window_bytes);
  }
  void delivered(int, int frame) override {
    order_.push_back(frames_[frame].slice);
    frames_.remove(frame);
  }
  void acknowledged(int connection) override { dispatcher_->acknowledged(connection); }

  // `name` is the slice, so that it can be told.
  void queue(int connection, uint64_t urgency, int name, double bytes = 10, bool is_push = false, int round = 0) {
    Frame frame;
    frame.is_push = is_push;
    frame.round = round;
    frame.urgency = urgency;
    frame.slice = name;
    frame.bytes = frame.left = bytes;
    dispatcher_->queue(connection, frames_.add(frame));
  }
  std::vector<int> run_out() {
    dispatcher_->pump(0);
    run_until(1e9);
    return order_;
  }
  void run_until(double time) {
    while (!events_.empty()) {
      network_->handle(events_.pop());
      if (events_.now() >= time) return;
    }
  }

  Sender rules_;
  EventQueue events_;
  Frames frames_;
  std::unique_ptr<Network> network_;
  std::unique_ptr<Dispatcher> dispatcher_;
  std::vector<int> order_;
};

TEST_F(DispatcherTest, MostUrgentLeavesFirstAndEqualsInOrder) {
  start(1);
  queue(0, 5, 0);
  queue(0, 3, 1);
  queue(0, 5, 2);
  queue(0, 1, 3);
  EXPECT_EQ(run_out(), (std::vector<int>{3, 1, 0, 2}));
}

TEST_F(DispatcherTest, ConnectionsTakeTurnsAmongEquals) {
  start(3);
  for (int name = 0; name < 6; ++name) queue(name / 2, 1, name);
  EXPECT_EQ(run_out(), (std::vector<int>{0, 2, 4, 1, 3, 5}));
}

TEST_F(DispatcherTest, WindowLetsLaterFramesOvertakeWhatIsNotYetWritten) {
  rules_.write_bytes = 10;
  start(1, 20);
  queue(0, 5, 0, 30);
  queue(0, 6, 1, 20);
  dispatcher_->pump(0);
  EXPECT_DOUBLE_EQ(network_->under_way(0), 20) << "the window is full";
  queue(0, 1, 2, 20);
  EXPECT_EQ(run_out(), (std::vector<int>{0, 2, 1}));
}

TEST_F(DispatcherTest, FrameThatWaitsForAFullSocketIsOvertakenNoMore) {
  rules_.write_bytes = 10;
  start(1, 20);
  queue(0, 5, 0, 20);
  queue(0, 6, 1, 20);
  dispatcher_->pump(0);  // as the van does, which takes the frame off its queue before it finds the socket full
  queue(0, 1, 2, 20);
  EXPECT_EQ(run_out(), (std::vector<int>{0, 1, 2}));
}

TEST_F(DispatcherTest, ValuesYieldToPushesOfTheirRoundIfTheyAreTo) {
  rules_.write_bytes = 10;
  const auto order = [this](bool pushes_first, int round_of_push) {
    rules_.pushes_first = pushes_first;
    order_.clear();
    events_ = {};
    frames_ = {};
    start(2, 20);
    queue(0, 10 * static_cast<uint64_t>(round_of_push), 0, 60, true, round_of_push);
    queue(1, 35, 1, 30, false, 3);
    return run_out();
  };
  EXPECT_EQ(order(false, 3), (std::vector<int>{1, 0})) << "each connection has its window";
  EXPECT_EQ(order(true, 3), (std::vector<int>{0, 1}));
  EXPECT_EQ(order(true, 2), (std::vector<int>{0, 1}));
  EXPECT_EQ(order(true, 4), (std::vector<int>{1, 0})) << "the value is of an older round";
}

TEST_F(DispatcherTest, FullSocketTakesMoreWhenAThirdIsFree) {
  rules_.write_bytes = 10;
  start(1, 40);
  queue(0, 1, 0, 100);
  dispatcher_->pump(0);
  EXPECT_DOUBLE_EQ(network_->under_way(0), 40);
  run_until(0.0205);  // the first segment has passed both links and is acknowledged: a quarter is free
  EXPECT_DOUBLE_EQ(network_->under_way(0), 30);
  run_until(0.0305);  // two: half
  EXPECT_DOUBLE_EQ(network_->under_way(0), 40);
}

}  // namespace
}  // namespace p3::simulator
