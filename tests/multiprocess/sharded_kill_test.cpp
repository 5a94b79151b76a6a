// A rank is killed at a random moment of a training whose parameters the ranks of a host share.

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <lockstep/lockstep.h>
#include <sys/mman.h>

#include <atomic>
#include <csignal>
#include <random>
#include <thread>

#include "multiprocess/sharded_model.h"
#include "support/error_of.h"
#include "support/has.h"
#include "support/run_ranks.h"

namespace lockstep::test {
namespace {

using Clock = std::chrono::steady_clock;

// What ranks tell each other besides lockstep.
struct Told {
  std::atomic<std::int64_t> died_at;  // on the clock that all processes share
  std::atomic<int> num_noticed;
};

class SharedTold {
 public:
  SharedTold()
      : memory_(::mmap(nullptr, sizeof(Told), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS,
                       -1, 0)) {}
  ~SharedTold() { ::munmap(memory_, sizeof(Told)); }
  SharedTold(const SharedTold&) = delete;
  SharedTold& operator=(const SharedTold&) = delete;
  Told* operator->() const { return static_cast<Told*>(memory_); }

 private:
  void* memory_;
};

struct Plan {
  Shard mode;
  int victim;
  int step;          // in which it dies, or
  bool is_in_step;   // in optimizer.step() of it, else from the beginning of its forward
  int microseconds;  // later
};

constexpr int kSteps = 5;

// The parameters of a training that nobody disturbs, before each step and at the end.
std::vector<std::vector<at::Tensor>> undisturbed(const World& world) {
  std::vector<std::vector<at::Tensor>> all;
  Twin<> twin(world, Shard::kNone, [](std::vector<at::Tensor> parameters) {
    return std::make_unique<optim::AdamW>(std::move(parameters), 1e-2);
  });
  for (int step = 0; step <= kSteps; ++step) {
    auto& now = all.emplace_back();
    for (const auto& one : twin.model->parameters()) now.push_back(one.detach().clone());
    if (step == kSteps) break;
    twin.optimizer->zero_grad();
    loss_of(twin.model->forward(batch(world.rank(), step))).backward();
    twin.optimizer->step();
  }
  return all;
}

void die_later(const Plan& plan, const SharedTold& told) {
  std::thread([&plan, &told] {
    std::this_thread::sleep_for(std::chrono::microseconds(plan.microseconds));
    told->died_at = Clock::now().time_since_epoch().count();
    ::raise(SIGKILL);
  }).detach();
}

void train_until_lost(const World& world, const Plan& plan, const SharedTold& told) {
  const auto expected = undisturbed(world);
  Twin<> twin(world, plan.mode, [](std::vector<at::Tensor> parameters) {
    return std::make_unique<optim::Sharded<optim::AdamW>>(std::move(parameters), 1e-2);
  });
  int step = 0;
  std::string error;
  try {
    for (; step < kSteps; ++step) {
      const bool is_mine = world.rank() == plan.victim && step == plan.step;
      if (is_mine && !plan.is_in_step) die_later(plan, told);
      twin.optimizer->zero_grad();
      loss_of(twin.model->forward(batch(world.rank(), step))).backward();
      if (is_mine && plan.is_in_step) die_later(plan, told);
      twin.optimizer->step();
    }
    for (;;) world.barrier();  // until the victim is dead
  } catch (const PeerLostError& lost) {
    error = lost.what();
    EXPECT_EQ(lost.peer(), plan.victim) << error;
  }
  const Clock::duration took(Clock::now().time_since_epoch().count() - told->died_at.load());
  const std::string victim = "rank " + std::to_string(plan.victim) + " (pid";
  EXPECT_TRUE(has(error, victim) && has(error, "killed by signal 9")) << error;
  // A second, and patience with a busy machine.
  EXPECT_LT(std::chrono::duration<double>(took).count(), 1 + 3) << error;
  // Nobody ends, or looks, before both have noticed.
  ++told->num_noticed;
  const auto deadline = Clock::now() + std::chrono::seconds(10);
  while (told->num_noticed.load() < 2 && Clock::now() < deadline) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  const bool is_torn = has(error, "half done");
  const bool is_after = has(error, "those after this step");
  const bool is_before = has(error, "those before this step");
  std::cout << (is_torn     ? "torn"
                : is_after  ? "after"
                : is_before ? "before"
                            : "elsewhere")
            << " in step " << step << std::endl;
  EXPECT_LE(is_torn + is_after + is_before, 1) << error;
  if (!is_torn) {
    const auto& same = expected[static_cast<std::size_t>(step + (is_after ? 1 : 0))];
    for (std::size_t i = 0; i < same.size(); ++i) {
      EXPECT_TRUE(twin.model->parameters()[i].equal(same[i])) << i << "\n" << error;
    }
    // The optimizer has done as many steps.
    const auto& states = twin.optimizer->state();
    const auto state = states.find(twin.model->wide->weight.unsafeGetTensorImpl());
    const int done = step + (is_after ? 1 : 0);
    ASSERT_EQ(state == states.end(), done == 0);
    if (done > 0) {
      const auto& held = static_cast<const torch::optim::AdamWParamState&>(*state->second);
      EXPECT_EQ(held.step(), done) << error;
    }
    return;
  }
  EXPECT_TRUE(has(error_of([&] { twin.optimizer->step(); }), "half updated"));
  EXPECT_NE(error_of([&] { loss_of(twin.model->forward(batch(0))).backward(); }), "no error");
}

TEST(ShardedRandomKill, LeavesParametersAsTheErrorSays) {
  const unsigned seed = std::random_device()();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937 random(seed);
  for (int round = 0; round < soak(25, 100); ++round) {
    Plan plan{.mode = round % 2 == 0 ? Shard::kGradients : Shard::kOptimizer,
              .victim = static_cast<int>(random() % 3),
              .step = 1 + static_cast<int>(random() % (kSteps - 1)),
              .is_in_step = random() % 3 != 0,
              .microseconds = 0};
    plan.microseconds = static_cast<int>(random() % (plan.is_in_step ? 600 : 8000));
    const SharedTold told;
    const RankResults results = run_ranks(3, [&](int) {
      at::set_num_threads(1);
      const World world = World::join({.engine = "shm", .timeout = std::chrono::seconds(20)});
      train_until_lost(world, plan, told);
    });
    for (int rank = 0; rank < 3; ++rank) {
      const RankResult& one = results[static_cast<std::size_t>(rank)];
      if (rank == plan.victim) {
        EXPECT_EQ(one.status.signal, SIGKILL);
      } else {
        EXPECT_TRUE(one.status.is_ok());
        std::cout << "round " << round << (plan.is_in_step ? ", step() " : ", any ") << one.output;
      }
    }
    if (HasFailure()) {
      std::cout << show(results) << std::endl;
      return;
    }
  }
}

}  // namespace
}  // namespace lockstep::test
