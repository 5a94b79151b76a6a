#include "base/gauges.h"

#include <gtest/gtest.h>
#include <stdlib.h>
#include <unistd.h>

#include <cmath>

namespace lockstep {
namespace {

using std::chrono::milliseconds;

// As in a process that a launcher has started.
class GaugesTest : public testing::Test {
 protected:
  GaugesTest() { ::setenv(kGaugesVariable, gauges_address(memory_.get()).c_str(), 1); }
  ~GaugesTest() override { ::unsetenv(kGaugesVariable); }
  GaugeValues read() const { return read_gauges(memory_.get()).value(); }

  const Fd memory_ = make_gauges();
};

TEST_F(GaugesTest, TheLauncherReadsWhatARankWrites) {
  EXPECT_FALSE(read_gauges(memory_.get()));  // nobody has written
  const auto gauges = Gauges::of_process();
  EXPECT_EQ(read().doing, Doing::kStarting);
  EXPECT_EQ(read().loss_step, -1);
  EXPECT_EQ(read().rank, -1);
  gauges->set_place(3, 4, 2);
  gauges->set(Doing::kBackward);
  gauges->add_samples(5);
  gauges->add_samples(6);
  gauges->set_loss(7, 0.5);
  EXPECT_EQ(read().rank, 3);
  EXPECT_EQ(read().size, 4);
  EXPECT_EQ(read().generation, 2);
  EXPECT_EQ(read().doing, Doing::kBackward);
  EXPECT_EQ(read().samples, 11);
  EXPECT_EQ(read().loss_step, 7);
  EXPECT_EQ(read().loss, 0.5);
}

TEST_F(GaugesTest, AllPartsOfAProcessWriteToTheSame) {
  Gauges::of_process()->add_samples(1);
  Gauges::of_process()->add_samples(2);
  EXPECT_EQ(read().samples, 3);
}

TEST_F(GaugesTest, StepsAreTimedFromTheSecondOn) {
  const auto gauges = Gauges::of_process();
  const auto start = std::chrono::steady_clock::now();
  gauges->end_step(10, start, milliseconds(500), 100);
  EXPECT_EQ(read().step_ns, 0);
  EXPECT_EQ(read().waited_ns, 0);  // that may be the wait for slow starters
  gauges->end_step(11, start + milliseconds(20), milliseconds(5), 100);
  gauges->end_step(12, start + milliseconds(50), milliseconds(10), 100);
  EXPECT_EQ(read().steps, 12);
  EXPECT_EQ(read().step_ns, 30'000'000);
  EXPECT_EQ(read().stepping_ns, 50'000'000);
  EXPECT_EQ(read().waited_ns, 15'000'000);
  EXPECT_EQ(read().bytes, 300);
}

TEST_F(GaugesTest, OfSeveralModelsTheFirstCountsSteps) {
  const auto gauges = Gauges::of_process();
  EXPECT_TRUE(gauges->take_steps(0));
  EXPECT_FALSE(gauges->take_steps(1));
  EXPECT_TRUE(gauges->take_steps(0));
  gauges->leave_steps(1);
  EXPECT_FALSE(gauges->take_steps(1));
  gauges->leave_steps(0);
  EXPECT_TRUE(gauges->take_steps(1));
}

TEST_F(GaugesTest, AWaitAndAScopeEnd) {
  const auto gauges = Gauges::of_process();
  gauges->set(Doing::kComputing);
  {
    const DoingScope doing(*gauges, Doing::kSaving);
    GaugeWait wait(gauges.get());
    EXPECT_EQ(read().wait_what, 0);  // nothing was shown yet
    wait.show(kWaitsForMessage, 2, std::chrono::steady_clock::now());
    EXPECT_EQ(read().doing, Doing::kSaving);
    EXPECT_EQ(read().wait_what, kWaitsForMessage);
    EXPECT_EQ(read().wait_for, 2);
  }
  EXPECT_EQ(read().doing, Doing::kComputing);
  EXPECT_EQ(read().wait_what, 0);
}

TEST_F(GaugesTest, AnotherVersionIsNotRead) {
  Gauges::of_process();
  const std::uint32_t other = 77;
  ASSERT_EQ(::pwrite(memory_.get(), &other, sizeof other, 0), 4);
  EXPECT_FALSE(read_gauges(memory_.get()));
}

// A descriptor that is another file by now.
TEST_F(GaugesTest, OtherFilesAreNotWrittenTo) {
  const Fd other = make_gauges();
  ASSERT_GE(::dup2(other.get(), memory_.get()), 0);
  Gauges::of_process()->add_samples(1);
  EXPECT_FALSE(read_gauges(other.get()));
}

TEST(Gauges, WithoutALauncherNobodyReads) {
  const auto gauges = Gauges::of_process();
  gauges->add_samples(1);
  gauges->set_place(0, 1, 0);
  GaugeWait(nullptr).show(1, 1, std::chrono::steady_clock::now());
}

}  // namespace
}  // namespace lockstep
