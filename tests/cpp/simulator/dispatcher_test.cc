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
    dispatcher_ = std::make_unique<Dispatcher>(rules_, 10, sinks + 1, events_, *network_, frames_);
    for (int sink = 1; sink <= sinks; ++sink) dispatcher_->add(network_->connect(0, sink), window_bytes);
  }
  void delivered(int, int frame) override {
    order_.push_back(frames_[frame].slice);
    frames_.remove(frame);
  }
  void acknowledged(int connection) override { dispatcher_->acknowledged(connection); }

  // `name` is the slice, so that it can be told.
  void queue(int connection, uint64_t urgency, int name, double bytes = 10) {
    Frame frame;
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
      const Event event = events_.pop();
      if (event.kind == EventKind::kEgressDrained)
        dispatcher_->drained(event.subject);
      else
        network_->handle(event);
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

TEST_F(DispatcherTest, LessUrgentConnectionYieldsThreeQuartersOfItsWindow) {
  rules_.yields = true;
  rules_.write_bytes = 10;
  start(2, 40);
  queue(0, 1, 0, 1000);
  queue(1, 2, 1, 1000);
  dispatcher_->pump(0);
  EXPECT_DOUBLE_EQ(network_->under_way(0), 40);
  EXPECT_DOUBLE_EQ(network_->under_way(1), 10);
}

TEST_F(DispatcherTest, ShortEgressQueueKeepsTheChoiceUntilTheLink) {
  rules_.egress_bytes = 10;
  start(2);
  queue(0, 5, 0, 30);
  dispatcher_->pump(0);
  EXPECT_DOUBLE_EQ(network_->under_way(0), 10) << "one segment, and the queue is as long as it may be";
  queue(1, 1, 1, 20);
  EXPECT_EQ(run_out(), (std::vector<int>{1, 0}));
  EXPECT_NEAR(network_->up(0).use().greatest_queue_s, 0.02, 1e-6) << "less than a segment, and one more";
}

TEST_F(DispatcherTest, AmongEqualsTheOneWithTheFewestBytesUnderWayIsServed) {
  rules_.egress_bytes = 10;
  rules_.least_under_way = true;
  start(2);
  Frame other;
  other.slice = 9;
  network_->write(0, frames_.add(other), 25, true);
  queue(0, 1, 0);
  queue(1, 1, 1);
  queue(1, 1, 2);
  const std::vector<int> order = run_out();
  EXPECT_EQ(order, (std::vector<int>{9, 1, 2, 0}));
}

TEST_F(DispatcherTest, HalfWrittenFrameIsAsUrgentAsTheBestBehindItOnlyWhereItInherits) {
  for (const bool inherits : {false, true}) {
    rules_.egress_bytes = 10;
    rules_.inherits = inherits;
    order_.clear();
    start(2);
    queue(0, 9, 0, 20);
    dispatcher_->pump(0);  // its first half
    queue(0, 1, 1);        // behind the half written frame
    queue(1, 5, 2);
    EXPECT_EQ(run_out(), inherits ? (std::vector<int>{0, 1, 2}) : (std::vector<int>{2, 0, 1}));
  }
}

}  // namespace
}  // namespace p3::simulator
