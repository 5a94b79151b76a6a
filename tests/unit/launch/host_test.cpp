#include "launch/host.h"

#include <gtest/gtest.h>

#include <thread>

namespace lockstep {
namespace {

// Does nothing of its own; a test says what the host is told.
class Silent : public Leader {
 public:
  void report(const StopCause& cause) override { causes.push_back(cause); }
  void kill_all() override {}
  void report_end(End) override { ++num_ends; }
  void ask(int, const Json&, std::function<void(const Json&)>) override {}
  void report_seat(const SeatEnd&) override {}

  std::vector<StopCause> causes;
  int num_ends = 0;
};

// Killed, and then told to stop: that is one end. What was to follow the kill must not hit the next
// generation.
TEST(Host, AKillAndAStopAreOneEnd) {
  EventLoop loop;
  Output output(loop, {.only_rank = 9});
  const RunOptions options{.command = {"sleep", "600"}, .num_ranks = 2};
  Host host(loop, output, options);
  Silent leader;
  host.set_leader(&leader);
  const auto run_until = [&](auto is_reached, std::chrono::seconds limit) {
    const auto end = EventLoop::Clock::now() + limit;
    while (!is_reached() && EventLoop::Clock::now() < end) {
      loop.run_once(std::chrono::milliseconds(5));
      host.look_for_ends();
    }
    return is_reached();
  };
  host.start({.number = 0, .first_rank = 0, .world_size = 2});
  host.kill_now();
  host.stop({.text = "is a test", .signal = SIGTERM});
  ASSERT_TRUE(run_until([&] { return leader.num_ends == 1; }, std::chrono::seconds(60)));
  host.start({.number = 1, .first_rank = 0, .world_size = 2});
  const auto time_of_the_kill = kSweepDeadline + std::chrono::seconds(1);
  EXPECT_FALSE(run_until([&] { return leader.num_ends > 1; }, time_of_the_kill));
  host.kill_now();
  EXPECT_TRUE(run_until([&] { return leader.num_ends == 2; }, std::chrono::seconds(60)));
}

}  // namespace
}  // namespace lockstep
