// Communication hooks, each directly on a bucket made by hand: the mean as near as the method
// promises, the same bits on all ranks, the bytes it says. Then whole trainings through a hook,
// beside one without.

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <lockstep/comm_hook.h>
#include <lockstep/ddp.h>
#include <lockstep/error.h>
#include <lockstep/world.h>

#include <cmath>
#include <iostream>
#include <limits>

#include "base/text.h"
#include "multiprocess/checks.h"
#include "support/run_ranks.h"

namespace lockstep::test {
namespace {

using Hook = std::shared_ptr<CommHook>;

constexpr double kInf = std::numeric_limits<double>::infinity();

at::Tensor random_tensor(at::IntArrayRef sizes, int seed) {
  return at::randn(sizes, at::make_generator<at::CPUGeneratorImpl>(seed), at::kFloat);
}

// A bucket as the reducer lays it out: in the engine's memory, each gradient on a cache line of its
// own. The gradients have the sizes and strides of `like`.
GradBucket make_bucket(const World& world, const std::vector<at::Tensor>& like,
                       at::ScalarType type = at::kFloat) {
  const auto line = static_cast<std::int64_t>(64 / c10::elementSize(type));
  std::int64_t total = 0;
  for (const at::Tensor& one : like) total += (one.numel() + line - 1) / line * line;
  const bool has_memory = world.backend()->supportsTensorAlloc(-1) && total > 0;
  GradBucket bucket{.flat = has_memory ? world.backend()->allocateTensor(total, type)
                                       : at::empty({total}, type)};
  bucket.flat.zero_();
  std::int64_t begin = 0;
  for (const at::Tensor& one : like) {
    bucket.gradients.push_back(
        bucket.flat.as_strided(one.sizes(), one.strides(), bucket.flat.storage_offset() + begin));
    bucket.names.push_back(text::format("p{}", bucket.names.size()));
    begin += (one.numel() + line - 1) / line * line;
  }
  return bucket;
}

void fill_random(const GradBucket& bucket, int seed) {
  for (const at::Tensor& gradient : bucket.gradients) {
    gradient.copy_(random_tensor(gradient.sizes(), seed++));
  }
}

void reduce(const Hook& hook, const GradBucket& bucket, HookComm& comm) {
  hook->start(bucket, comm)();
}

// Bytes that the rank gives to the engine for one bucket.
std::int64_t bytes_of(const Hook& hook, const GradBucket& bucket, HookComm& comm) {
  const std::int64_t before = comm.bytes_sent();
  reduce(hook, bucket, comm);
  return comm.bytes_sent() - before;
}

at::Tensor mean_over_ranks(const World& world, const at::Tensor& tensor) {
  if (!tensor.is_complex()) return world.all_gather(tensor).to(at::kDouble).mean(0);
  return at::view_as_complex(mean_over_ranks(world, at::view_as_real(tensor)));
}

bool has_same_bits(const World& world, const at::Tensor& tensor) {
  const at::Tensor all = world.all_gather(tensor.contiguous().view(-1).view(at::kByte));
  return at::equal(all, all[0].expand_as(all));
}

double relative_error(const at::Tensor& value, const at::Tensor& truth) {
  const at::Tensor exact = truth.to(at::kDouble);
  return ((value.to(at::kDouble) - exact).norm() / exact.norm()).item<double>();
}

// A check that speaks through a hook's collectives.
template <typename Body>
std::function<void(const World&)> with_comm(const Body& body) {
  return [body](const World& world) {
    HookComm comm(world);
    body(world, comm);
  };
}

const Check TheirCollectivesCountBytesAndRefuseGaps(
    "TheirCollectivesCountBytesAndRefuseGaps", with_comm([](const World& world, HookComm& comm) {
      EXPECT_EQ(comm.rank(), world.rank());
      const at::Tensor sum = at::full({5}, comm.rank() + 1.0);
      comm.all_reduce(sum)->wait();
      EXPECT_TRUE(at::equal(sum, at::full({5}, comm.size() * (comm.size() + 1) / 2.0)));
      EXPECT_EQ(comm.bytes_sent(), 20);
      at::Tensor rows;
      comm.all_gather(at::full({2, 3}, comm.rank(), at::kLong), rows)->wait();
      EXPECT_EQ(comm.bytes_sent(), 20 + 48);
      EXPECT_TRUE(at::equal(
          rows, at::arange(comm.size(), at::kLong).view({-1, 1}).expand({comm.size(), 6})));
      EXPECT_THROW(comm.all_reduce(at::zeros({3, 4}).t()), UsageError);
      EXPECT_THROW(comm.all_reduce(at::Tensor()), UsageError);
      EXPECT_THROW(comm.all_gather(at::zeros({8}).slice(0, 0, 8, 2), rows), UsageError);
      EXPECT_EQ(comm.bytes_sent(), 20 + 48) << "what was refused was not sent";
    }));

// The bound: each rank's element is rounded once, and so is their sum.
const Check SixteenBitsRoundEachElementTwice(
    "SixteenBitsRoundEachElementTwice", with_comm([](const World& world, HookComm& comm) {
      struct Case {
        Hook hook;
        double rounding;  // half a unit in the last place, relative
        double smallest;  // and absolute, where numbers have no leading one
      };
      for (const Case& one : {Case{bf16_hook(), 0x1p-8, 0}, Case{fp16_hook(), 0x1p-11, 0x1p-25}}) {
        for (const auto type : {at::kFloat, at::kDouble}) {
          const GradBucket bucket =
              make_bucket(world, {at::empty({33, 7}), at::empty({5}), at::empty({0})}, type);
          fill_random(bucket, 10 * (world.rank() + 1));
          const at::Tensor all = world.all_gather(bucket.flat).to(at::kDouble);
          EXPECT_EQ(bytes_of(one.hook, bucket, comm), bucket.flat.numel() * 2);
          const at::Tensor bound =
              all.abs().mean(0) * (2.01 * one.rounding) + (comm.size() + 1) * one.smallest;
          const at::Tensor error = (bucket.flat.to(at::kDouble) - all.mean(0)).abs();
          EXPECT_TRUE((error <= bound).all().item<bool>())
              << one.hook->text() << " is off by " << error.max();
          EXPECT_GT(error.max().item<double>(), one.rounding / 100) << "nothing was rounded";
          EXPECT_TRUE(has_same_bits(world, bucket.flat));
          EXPECT_EQ(bucket.flat.scalar_type(), type);
        }
      }
    }));

const Check SixteenBitsLeaveOtherTypesAsTheyAre(
    "SixteenBitsLeaveOtherTypesAsTheyAre", with_comm([](const World& world, HookComm& comm) {
      for (const Hook& hook : {bf16_hook(), fp16_hook()}) {
        for (const auto type : {at::kHalf, at::kBFloat16}) {
          const GradBucket bucket = make_bucket(world, {at::empty({9, 9})}, type);
          bucket.gradients[0].fill_(2.0 * world.rank());
          EXPECT_EQ(bytes_of(hook, bucket, comm), bucket.flat.nbytes());
          EXPECT_EQ(bucket.gradients[0].min().item<double>(), world.size() - 1.0);
          EXPECT_EQ(bucket.gradients[0].max().item<double>(), world.size() - 1.0);
        }
        GradBucket complex = make_bucket(world, {at::empty({6})}, at::kComplexFloat);
        complex.flat.copy_(
            at::complex(random_tensor({8}, world.rank()), random_tensor({8}, 50 + world.rank())));
        const at::Tensor mean = mean_over_ranks(world, complex.flat);
        EXPECT_EQ(bytes_of(hook, complex, comm), complex.flat.nbytes());
        EXPECT_TRUE(at::allclose(complex.flat.to(at::kComplexDouble), mean, 1e-6, 1e-6));
        EXPECT_TRUE(has_same_bits(world, complex.flat));
      }
    }));

const Check Fp16SumsDoNotOverflow(
    "Fp16SumsDoNotOverflow", with_comm([](const World& world, HookComm& comm) {
      for (const auto type : {at::kFloat, at::kDouble, at::kHalf}) {
        const GradBucket bucket = make_bucket(world, {at::empty({7})}, type);
        bucket.gradients[0].fill_(60000);  // two of them are more than fp16 can hold
        reduce(fp16_hook(), bucket, comm);
        EXPECT_LT(relative_error(bucket.gradients[0], at::full({7}, 60000.0)), 1e-3);
      }
    }));

const Check EmptyBucketsSendNothing(
    "EmptyBucketsSendNothing", with_comm([](const World& world, HookComm& comm) {
      for (const Hook& hook : {bf16_hook(), fp16_hook(), power_sgd_hook({.start_step = 0}),
                               power_sgd_hook(), top_k_hook()}) {
        EXPECT_EQ(bytes_of(hook, make_bucket(world, {at::empty({0, 3})}), comm), 0) << hook->text();
      }
    }));

// Low-rank gradients are recovered exactly, from one step: that is what the factors can hold.
const Check PowerSgdRecoversWhatItsFactorsCanHold(
    "PowerSgdRecoversWhatItsFactorsCanHold", with_comm([](const World& world, HookComm& comm) {
      for (const auto type : {at::kFloat, at::kDouble, at::kBFloat16}) {
        const auto channels_last =
            at::empty({32, 8, 3, 3}).contiguous(at::MemoryFormat::ChannelsLast);
        const GradBucket bucket =
            make_bucket(world,
                        {at::empty({40, 30}), at::empty({7}), channels_last, at::empty({0}),
                         at::empty({4, 4})},  // too small to be worth it
                        type);
        fill_random(bucket, 10 * world.rank());
        const auto exact = [](at::IntArrayRef sizes, int seed) {
          return random_tensor(sizes, seed).to(at::kDouble);
        };
        const at::Tensor own = exact({2, 2}, world.rank());  // ranks differ, within the span
        bucket.gradients[0].copy_(exact({40, 2}, 1).mm(own).mm(exact({2, 30}, 2)));
        bucket.gradients[2].copy_(
            exact({32, 2}, 3).mm(own).mm(exact({2, 72}, 4)).view({32, 8, 3, 3}));
        std::vector<at::Tensor> means;
        for (const at::Tensor& one : bucket.gradients) means.push_back(mean_over_ranks(world, one));
        const Hook hook = power_sgd_hook({.rank = 2, .start_step = 0});
        const std::int64_t factor_bytes = type == at::kDouble ? 8 : 4;
        const auto type_bytes = static_cast<std::int64_t>(c10::elementSize(type));
        EXPECT_EQ(bytes_of(hook, bucket, comm),
                  2 * (40 + 30 + 32 + 72) * factor_bytes + (7 + 16) * type_bytes);
        const double tolerance = type == at::kDouble ? 1e-13 : type == at::kFloat ? 1e-5 : 1e-2;
        for (const std::size_t i : {0, 1, 2, 4}) {
          EXPECT_LT(relative_error(bucket.gradients[i], means[i]), tolerance)
              << "gradient " << i << " of type " << type;
        }
        EXPECT_TRUE(has_same_bits(world, bucket.flat));
      }
    }));

const Check PowerSgdStartsWithThePlainMean(
    "PowerSgdStartsWithThePlainMean", with_comm([](const World& world, HookComm& comm) {
      const Hook hook = power_sgd_hook({.start_step = 2});
      const GradBucket first = make_bucket(world, {at::empty({40, 30}), at::empty({7})});
      GradBucket second = make_bucket(world, {at::empty({20, 20})});
      second.index = 1;
      for (int step = 0; step < 4; ++step) {
        for (const GradBucket& bucket : {first, second}) {
          fill_random(bucket, 100 * step + 10 * world.rank() + bucket.index);
          const at::Tensor mean = world.all_reduce(bucket.flat.clone(), ReduceOp::AVG);
          const std::int64_t bytes = bytes_of(hook, bucket, comm);
          EXPECT_EQ(at::equal(bucket.flat, mean), step < 2) << "bucket " << bucket.index;
          EXPECT_EQ(bytes, step < 2            ? bucket.flat.nbytes()
                           : bucket.index == 0 ? (40 + 30 + 7) * 4
                                               : (20 + 20) * 4);
        }
      }
    }));

const Check PowerSgdSendsWholeWhatWouldNotShrinkEnough(
    "PowerSgdSendsWholeWhatWouldNotShrinkEnough", with_comm([](const World& world, HookComm& comm) {
      const GradBucket bucket = make_bucket(world, {at::empty({30, 20}), at::empty({3})});
      const auto bytes = [&](int rank, double min_compression) {
        fill_random(bucket, world.rank());
        return bytes_of(
            power_sgd_hook({.rank = rank, .start_step = 0, .min_compression = min_compression}),
            bucket, comm);
      };
      EXPECT_EQ(bytes(1, 11.9), (30 + 20 + 3) * 4);  // 600 numbers become 50: 12 times smaller
      EXPECT_EQ(bytes(1, 12), bucket.flat.nbytes());
      EXPECT_EQ(bytes(3, 3.9), (3 * (30 + 20) + 3) * 4);
      EXPECT_EQ(bytes(3, 4), bucket.flat.nbytes());
      EXPECT_EQ(bytes(100, 1), bucket.flat.nbytes());
    }));

// Sum over steps of a constant gradient, relative to the true sum: what is lost for good.
double loss_over_steps(const World& world, HookComm& comm, const Hook& hook, int num_steps,
                       at::ScalarType type = at::kFloat) {
  const GradBucket bucket = make_bucket(world, {at::empty({24, 16}), at::empty({5})}, type);
  fill_random(bucket, 10 * world.rank());
  const at::Tensor gradient = bucket.flat.clone();
  const at::Tensor mean = mean_over_ranks(world, gradient);
  at::Tensor sum = at::zeros_like(mean);
  for (int step = 0; step < num_steps; ++step) {
    bucket.flat.copy_(gradient);
    reduce(hook, bucket, comm);
    EXPECT_TRUE(has_same_bits(world, bucket.flat));
    sum += bucket.flat;
  }
  return relative_error(sum / num_steps, mean);
}

const Check ErrorFeedbackLosesNothing(
    "ErrorFeedbackLosesNothing", with_comm([](const World& world, HookComm& comm) {
      for (const auto type : {at::kFloat, at::kDouble, at::kBFloat16}) {
        for (const bool feeds_back : {true, false}) {
          const auto loss = [&](int num_steps) {
            const double power_sgd = loss_over_steps(
                world, comm,
                power_sgd_hook({.rank = 2, .start_step = 0, .error_feedback = feeds_back}),
                num_steps, type);
            const double top_k = loss_over_steps(
                world, comm, top_k_hook({.fraction = 0.1, .error_feedback = feeds_back}), num_steps,
                type);
            return std::pair(power_sgd, top_k);
          };
          const auto [power_sgd_10, top_k_10] = loss(10);
          const auto [power_sgd_100, top_k_100] = loss(100);
          if (feeds_back) {  // what is late is bounded, so its share falls like 1 / steps
            EXPECT_LT(power_sgd_100, 0.15);
            EXPECT_LT(power_sgd_100, power_sgd_10 / 3);
            EXPECT_LT(top_k_100, 0.15);
            EXPECT_LT(top_k_100, top_k_10 / 3);
          } else {
            EXPECT_GT(power_sgd_100, 0.5);
            EXPECT_GT(top_k_100, 0.3);
          }
        }
      }
    }));

// Factors are f32, the gradient is not: what is written is rounded, in the same way every time. All
// of it comes in the end, once steps without a gradient of their own have brought what was late.
const Check ErrorFeedbackLosesNoRoundingEither(
    "ErrorFeedbackLosesNoRoundingEither", with_comm([](const World& world, HookComm& comm) {
      const GradBucket bucket = make_bucket(world, {at::empty({24, 16})}, at::kBFloat16);
      const Hook hook = power_sgd_hook({.rank = 4, .start_step = 0});
      const at::Tensor gradient = random_tensor({24, 16}, world.rank()).to(at::kBFloat16);
      at::Tensor sum = at::zeros({24, 16}, at::kDouble);
      for (int step = 0; step < 100; ++step) {
        bucket.gradients[0].copy_(gradient);
        if (step >= 20) bucket.gradients[0].zero_();
        reduce(hook, bucket, comm);
        sum += bucket.gradients[0];
      }
      EXPECT_LT(relative_error(sum / 20, mean_over_ranks(world, gradient)), 1e-5);
    }));

// Without feedback and with a constant gradient, warm starts are subspace iteration: they end at
// the best approximation there is. Cold starts stay where one iteration brings them.
const Check PowerSgdWarmStartsImprove(
    "PowerSgdWarmStartsImprove", with_comm([](const World& world, HookComm& comm) {
      // Singular values 1, 1/2, 1/4, ...
      const auto rotation = [](std::int64_t size, int seed) {
        return std::get<0>(at::linalg_qr(random_tensor({size, size}, seed).to(at::kDouble)));
      };
      const at::Tensor u = rotation(30, 1).slice(1, 0, 20);
      const at::Tensor v = rotation(20, 2);
      const at::Tensor values = at::pow(0.5, at::arange(20, at::kDouble));
      const at::Tensor whole = (u * values).mm(v.t());
      const at::Tensor best = (u * values).slice(1, 0, 2).mm(v.slice(1, 0, 2).t());
      const auto error_after = [&](int num_steps, bool is_warm) {
        const Hook hook = power_sgd_hook(
            {.rank = 2, .start_step = 0, .warm_start = is_warm, .error_feedback = false});
        const GradBucket bucket = make_bucket(world, {at::empty({30, 20})}, at::kDouble);
        for (int step = 0; step < num_steps; ++step) {
          bucket.gradients[0].copy_(whole * (world.rank() + 1));
          reduce(hook, bucket, comm);
        }
        return relative_error(bucket.gradients[0], best * (world.size() + 1) / 2.0);
      };
      EXPECT_GT(error_after(1, true), 0.03);
      EXPECT_LT(error_after(15, true), 1e-6);
      EXPECT_GT(error_after(15, false), 0.03);
    }));

const Check StateIsOfOneBucketAndEndsWithTheEpoch(
    "StateIsOfOneBucketAndEndsWithTheEpoch", with_comm([](const World& world, HookComm& comm) {
      for (const Hook& hook : {power_sgd_hook({.start_step = 0}), top_k_hook({.fraction = 0.1})}) {
        GradBucket bucket = make_bucket(world, {at::empty({20, 20})});
        const auto leave_something = [&](int index, int epoch) {
          bucket.index = index;
          bucket.epoch = epoch;
          fill_random(bucket, world.rank());
          reduce(hook, bucket, comm);
        };
        const auto is_left = [&](GradBucket other, int index, int epoch) {
          other.index = index;
          other.epoch = epoch;
          other.flat.zero_();
          reduce(hook, other, comm);
          return other.flat.abs().max().item<double>() > 0;
        };
        leave_something(0, 0);
        EXPECT_TRUE(is_left(bucket, 0, 0)) << hook->text();
        EXPECT_FALSE(is_left(bucket, 1, 0)) << hook->text();
        leave_something(0, 0);
        EXPECT_FALSE(is_left(bucket, 0, 1)) << hook->text();
        leave_something(2, 1);
        EXPECT_FALSE(is_left(bucket, 0, 2)) << hook->text();
        EXPECT_FALSE(is_left(bucket, 2, 2)) << hook->text();
        leave_something(0, 2);
        EXPECT_FALSE(is_left(make_bucket(world, {at::empty({40, 20})}), 0, 2)) << hook->text();
        leave_something(0, 2);
        EXPECT_FALSE(is_left(make_bucket(world, {at::empty({20, 20})}, at::kDouble), 0, 2))
            << hook->text();
      }
    }));

// A right factor of zeros would make zeros of all gradients to come.
const Check PowerSgdLearnsAfterAGradientOfZero(
    "PowerSgdLearnsAfterAGradientOfZero", with_comm([](const World& world, HookComm& comm) {
      for (const bool feeds_back : {true, false}) {
        const Hook hook =
            power_sgd_hook({.rank = 2, .start_step = 0, .error_feedback = feeds_back});
        const GradBucket bucket = make_bucket(world, {at::empty({30, 20})});
        reduce(hook, bucket, comm);
        EXPECT_EQ(bucket.flat.abs().max().item<double>(), 0);
        // Rank 1, so that one of the two vectors adds nothing and is replaced.
        const at::Tensor gradient = random_tensor({30, 1}, 1).mm(random_tensor({1, 20}, 2));
        for (int step = 0; step < 3; ++step) {
          bucket.gradients[0].copy_(gradient);
          reduce(hook, bucket, comm);
          EXPECT_TRUE(has_same_bits(world, bucket.flat));
        }
        EXPECT_LT(relative_error(bucket.gradients[0], gradient), feeds_back ? 0.1 : 1e-5);
      }
    }));

const Check AStepThatIsNotFiniteShowsOnAllRanksAndLeavesNoTrace(
    "AStepThatIsNotFiniteShowsOnAllRanksAndLeavesNoTrace",
    with_comm([](const World& world, HookComm& comm) {
      for (const double bad : {kInf, std::nan("")}) {
        for (const auto& make : {+[] { return power_sgd_hook({.start_step = 0}); },
                                 +[] { return top_k_hook({.fraction = 0.1}); }}) {
          const GradBucket bucket = make_bucket(world, {at::empty({20, 20}), at::empty({3})});
          const auto run = [&](bool has_bad_step) {
            const Hook hook = make();
            for (int step = 0; step < 3; ++step) {
              if (step == 1 && !has_bad_step) continue;
              fill_random(bucket, 10 * world.rank() + 100 * step);
              // On the last rank only, and more of them than top-k sends.
              if (step == 1 && world.rank() == world.size() - 1) {
                bucket.gradients[0].slice(0, 0, 5).fill_(bad);
              }
              reduce(hook, bucket, comm);
              EXPECT_EQ(at::isfinite(bucket.flat).all().item<bool>(), step != 1) << hook->text();
            }
            return bucket.flat.clone();
          };
          const at::Tensor with_bad_step = run(true);
          EXPECT_TRUE(at::equal(with_bad_step, run(false))) << make()->text();
        }
      }
    }));

// Hosts differ, and ranks with uneven shares of the cores have uneven numbers of threads. Here rank
// 0 has one thread and all its processor can do, the others have more threads and less processor.
TEST(CommHooksApart, HaveTheSameBitsWhateverTheProcessorAndThreads) {
  const auto variables = [](int rank) {
    std::map<std::string, std::string> result;
    if (rank > 0) result = {{"ATEN_CPU_CAPABILITY", "default"}, {"MKL_CBWR", "COMPATIBLE"}};
    return result;
  };
  const auto body = [](int) {
    const World world = World::join();
    HookComm comm(world);
    at::set_num_threads(world.rank() + 1);
    for (const Hook& hook : {bf16_hook(), fp16_hook(), power_sgd_hook({.rank = 4, .start_step = 0}),
                             top_k_hook({.fraction = 0.1})}) {
      const GradBucket bucket = make_bucket(world, {at::empty({700, 301}), at::empty({64, 99})});
      for (int step = 0; step < 3; ++step) {
        fill_random(bucket, 100 * step + world.rank());
        reduce(hook, bucket, comm);
        EXPECT_TRUE(has_same_bits(world, bucket.flat)) << hook->text();
      }
    }
  };
  EXPECT_TRUE(all_passed(run_ranks(3, body, {.rank_variables = variables})));
}

const Check PowerSgdIsRepeatableAndHasRandomNumbersOfItsOwn(
    "PowerSgdIsRepeatableAndHasRandomNumbersOfItsOwn",
    with_comm([](const World& world, HookComm& comm) {
      const GradBucket bucket = make_bucket(world, {at::empty({20, 20})});
      const auto run = [&](std::uint64_t seed) {
        fill_random(bucket, world.rank());
        reduce(power_sgd_hook({.start_step = 0, .seed = seed}), bucket, comm);
        return bucket.flat.clone();
      };
      at::manual_seed(5);
      const at::Tensor first = run(1);
      const at::Tensor number = at::rand({1});
      at::manual_seed(5);
      EXPECT_TRUE(at::equal(at::rand({1}), number)) << "the program's random numbers were used";
      EXPECT_TRUE(at::equal(run(1), first));
      EXPECT_FALSE(at::equal(run(2), first));
    }));

const Check TopKIsTheMeanOfWhatWasSent(
    "TopKIsTheMeanOfWhatWasSent", with_comm([](const World& world, HookComm& comm) {
      for (const auto type : {at::kFloat, at::kDouble, at::kBFloat16}) {
        const auto channels_last =
            at::empty({4, 3, 2, 2}).contiguous(at::MemoryFormat::ChannelsLast);
        const GradBucket bucket =
            make_bucket(world, {at::empty({11, 9}), channels_last, at::empty({0})}, type);
        fill_random(bucket, 10 * world.rank());
        // In 16 bits many are equally large, and any of them may be sent: make them differ.
        if (type == at::kBFloat16) {
          bucket.flat.copy_((at::randperm(bucket.flat.numel(),
                                          at::make_generator<at::CPUGeneratorImpl>(world.rank())) -
                             70));
          bucket.flat.add_(0.5);
        }
        const std::int64_t num_elements = bucket.flat.numel();
        const auto k = static_cast<std::int64_t>(0.15 * static_cast<double>(num_elements));
        at::Tensor expected = at::zeros({num_elements}, type == at::kDouble ? type : at::kFloat);
        for (const at::Tensor& one : world.all_gather(bucket.flat).unbind()) {
          const at::Tensor order = one.to(expected.scalar_type()).abs().argsort(0, true);
          const at::Tensor places = order.slice(0, 0, k);
          expected.index_add_(0, places, one.index_select(0, places).to(expected.scalar_type()));
        }
        expected = expected.div(world.size()).to(type);
        EXPECT_EQ(bytes_of(top_k_hook({.fraction = 0.15}), bucket, comm),
                  k * (4 + static_cast<std::int64_t>(c10::elementSize(type))));
        EXPECT_TRUE(at::equal(bucket.flat, expected)) << type;
        EXPECT_TRUE(has_same_bits(world, bucket.flat));
      }
    }));

// In large buckets a sample tells where to look; here also where it misleads, since what is large
// is hidden from it, or makes up all of it.
const Check TopKFindsTheLargestAmongMany(
    "TopKFindsTheLargestAmongMany", with_comm([](const World& world, HookComm& comm) {
      const GradBucket bucket = make_bucket(world, {at::empty({300, 700})});
      // No two are equally large: of those, any might be sent.
      const at::Tensor random =
          random_tensor({210000}, world.rank()).argsort().to(at::kFloat).add_(1);
      const at::Tensor is_sampled = at::arange(210000).remainder(61) == 0;
      for (const at::Tensor& gradient :
           {random, -random, at::where(is_sampled, 0, random),
            at::where(is_sampled, random + 210000, random), at::zeros({210000})}) {
        for (const double fraction : {0.001, 0.01, 0.3}) {
          const auto k = static_cast<std::int64_t>(fraction * 210000);
          const at::Tensor places = gradient.abs().argsort(0, true).slice(0, 0, k);
          const at::Tensor sent =
              at::zeros({210000}).index_copy(0, places, gradient.index_select(0, places));
          bucket.flat.copy_(gradient);
          EXPECT_EQ(bytes_of(top_k_hook({.fraction = fraction}), bucket, comm), k * 8);
          const at::Tensor expected = mean_over_ranks(world, sent);
          EXPECT_TRUE(at::allclose(bucket.flat.to(at::kDouble), expected, 1e-6));
        }
      }
      bucket.flat.copy_(random);
      if (world.rank() == 0) bucket.flat[5] = std::nan("");
      reduce(top_k_hook(), bucket, comm);
      EXPECT_TRUE(bucket.flat[5].isnan().item<bool>()) << "not finite is the largest of all";
    }));

const Check TopKSendsAtLeastOneAndAtMostAll(
    "TopKSendsAtLeastOneAndAtMostAll", with_comm([](const World& world, HookComm& comm) {
      const GradBucket bucket = make_bucket(world, {at::empty({100})});
      fill_random(bucket, world.rank());
      const at::Tensor mean = mean_over_ranks(world, bucket.flat);
      EXPECT_EQ(bytes_of(top_k_hook({.fraction = 1}), bucket, comm), bucket.flat.numel() * 8);
      EXPECT_LT(relative_error(bucket.flat, mean), 1e-6);
      fill_random(bucket, world.rank());
      EXPECT_EQ(bytes_of(top_k_hook({.fraction = 1e-9}), bucket, comm), 8);
      EXPECT_LE(bucket.flat.count_nonzero().item<std::int64_t>(), world.size());
      EXPECT_GE(bucket.flat.count_nonzero().item<std::int64_t>(), 1);

      const GradBucket complex = make_bucket(world, {at::empty({8})}, at::kComplexFloat);
      complex.flat.fill_(c10::complex<double>(1, 2 + world.rank()));
      EXPECT_EQ(bytes_of(top_k_hook({.fraction = 0.5}), complex, comm), 8 * 8);
      EXPECT_TRUE(at::allclose(
          complex.flat, at::full({8}, c10::complex<float>(0, 2 + (world.size() - 1) / 2.0f))));
    }));

const Check TopKSendsLaterWhatItDidNotSend(
    "TopKSendsLaterWhatItDidNotSend", with_comm([](const World&, HookComm& comm) {
      const auto step = [&](const Hook& hook, at::ArrayRef<float> gradient) {
        GradBucket bucket{.flat = at::tensor(gradient)};
        reduce(hook, bucket, comm);
        return bucket.flat;
      };
      const Hook hook = top_k_hook({.fraction = 0.34});  // one of three
      EXPECT_TRUE(at::equal(step(hook, {1, -4, 3}), at::tensor({0.f, -4.f, 0.f})));
      EXPECT_TRUE(at::equal(step(hook, {1, -4, 3}), at::tensor({0.f, 0.f, 6.f})));
      EXPECT_TRUE(at::equal(step(hook, {0, 0, 0}), at::tensor({0.f, -4.f, 0.f})));
      EXPECT_TRUE(at::equal(step(hook, {0, 0, 0}), at::tensor({2.f, 0.f, 0.f})));
      EXPECT_TRUE(at::equal(step(hook, {0, 0, 0}), at::tensor({0.f, 0.f, 0.f})));
      const Hook forgetful = top_k_hook({.fraction = 0.34, .error_feedback = false});
      EXPECT_TRUE(at::equal(step(forgetful, {1, -4, 3}), at::tensor({0.f, -4.f, 0.f})));
      EXPECT_TRUE(at::equal(step(forgetful, {0, 0, 1}), at::tensor({0.f, 0.f, 1.f})));
    }));

class CommHooks : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Sizes, CommHooks, testing::Values(1, 2, 3));

TEST_P(CommHooks, GiveTheMeanTheyPromise) { run_checks(GetParam()); }

TEST(CommHookOptions, AreCheckedAndToldApart) {
  EXPECT_THROW(power_sgd_hook({.rank = 0}), UsageError);
  EXPECT_THROW(power_sgd_hook({.start_step = -1}), UsageError);
  EXPECT_THROW(power_sgd_hook({.min_compression = 0.5}), UsageError);
  EXPECT_THROW(power_sgd_hook({.min_compression = std::nan("")}), UsageError);
  EXPECT_THROW(power_sgd_hook({.min_compression = kInf}), UsageError);
  for (const double fraction : {0.0, -0.1, 1.1, std::nan("")}) {
    EXPECT_THROW(top_k_hook({.fraction = fraction}), UsageError);
  }
  try {
    top_k_hook({.fraction = 7});
    ADD_FAILURE();
  } catch (const UsageError& error) {
    EXPECT_NE(error.message().find("TopKOptions::fraction is 7.\nGive"), std::string::npos)
        << error.message();
  }
  std::vector<std::string> texts;
  for (const Hook& hook :
       {bf16_hook(), fp16_hook(), power_sgd_hook(), power_sgd_hook({.rank = 2}),
        power_sgd_hook({.start_step = 2}), power_sgd_hook({.warm_start = false}),
        power_sgd_hook({.error_feedback = false}), power_sgd_hook({.min_compression = 3}),
        power_sgd_hook({.seed = 1}), top_k_hook(), top_k_hook({.fraction = 0.010001}),
        top_k_hook({.error_feedback = false})}) {
    for (const std::string& other : texts) EXPECT_NE(hook->text(), other);
    texts.push_back(hook->text());
  }
  EXPECT_EQ(power_sgd_hook()->text(), power_sgd_hook()->text());
}

// Passes everything on, and counts.
class CountingHook : public CommHook {
 public:
  explicit CountingHook(Hook inner) : inner_(std::move(inner)) {}
  std::string text() const override { return "counting " + inner_->text(); }
  std::function<void()> start(GradBucket bucket, HookComm& comm) override {
    ++num_starts;
    return inner_->start(std::move(bucket), comm);
  }
  int num_starts = 0;

 private:
  Hook inner_;
};

// All-reduces; notes whether the first bucket's was done before anybody waited for it.
class WatchingHook : public CommHook {
 public:
  std::string text() const override { return "watching"; }
  std::function<void()> start(GradBucket bucket, HookComm& comm) override {
    const auto work = comm.all_reduce(bucket.flat);
    return [this, work, size = comm.size(), index = bucket.index, flat = bucket.flat] {
      if (index == 0) was_done = work->isSuccess();
      work->wait();
      flat.div_(size);
    };
  }
  bool was_done = false;
};

TEST(CommHook, ItsCollectivesMoveOnWhileBackwardGoesOn) {
  EXPECT_TRUE(all_passed(run_ranks(2, [](int rank) {
    const World world = World::join();
    const auto hook = std::make_shared<WatchingHook>();
    std::vector<NamedTensor> parameters;
    for (const char* name : {"a", "b", "c"}) {
      parameters.push_back({name, at::ones({16}).requires_grad_()});
    }
    const DistributedDataParallel ddp(parameters, world,
                                      {.bucket_bytes = 64, .first_bucket_bytes = 64, .hook = hook});
    const at::Tensor inner =
        at::full({16}, rank + 1.0) * parameters[0].tensor * parameters[1].tensor;
    // After c's gradient, and before b's: all have posted c's bucket.
    inner.register_hook([&](const at::Tensor& gradient) {
      world.barrier();
      return gradient;
    });
    (inner * parameters[2].tensor).sum().backward();
    EXPECT_TRUE(hook->was_done);
    for (const NamedTensor& one : parameters) {
      EXPECT_TRUE(at::equal(one.tensor.grad(), at::full({16}, 1.5)));
    }
  })));
}

struct Training {
  double first_loss = 0;
  double last_loss = 0;         // over the data of all ranks
  std::int64_t bytes_sent = 0;  // in the last step
  std::int64_t steps = 0;
  int buckets = 0;
  at::Tensor parameters;
};

struct TrainingOptions {
  Hook hook = {};
  int num_parts = 1;  // of each batch; all but the last backward are under no_sync
  int num_steps = 200;
};

// A small classifier; each rank has data of its own.
Training train(const World& world, const TrainingOptions& options) {
  const int seed = 1000 * world.rank();  // replicas begin different: wrapping makes them equal
  std::vector<NamedTensor> parameters;
  const auto add = [&](const char* name, at::IntArrayRef sizes, double scale) {
    const int index = static_cast<int>(parameters.size());
    parameters.push_back({name, (random_tensor(sizes, seed + index) * scale).requires_grad_()});
    return parameters.back().tensor;
  };
  const std::vector<at::Tensor> p = {add("1.weight", {64, 20}, 0.2),  add("1.bias", {64}, 0.1),
                                     add("2.weight", {64, 64}, 0.15), add("2.bias", {64}, 0.1),
                                     add("3.weight", {4, 64}, 0.1),   add("3.bias", {4}, 0.1)};
  DistributedDataParallel ddp(parameters, world,
                              {.first_bucket_bytes = 4096, .hook = options.hook});

  const at::Tensor inputs = random_tensor({128, 20}, 7 + world.rank());
  const at::Tensor labels = inputs.mm(random_tensor({20, 4}, 5)).argmax(1);
  const auto loss_of = [&](const at::Tensor& data, const at::Tensor& target) {
    at::Tensor hidden = at::relu(at::linear(data, p[0], p[1]));
    hidden = at::relu(at::linear(hidden, p[2], p[3]));
    return at::cross_entropy_loss(at::linear(hidden, p[4], p[5]), target);
  };
  const auto loss_over_ranks = [&] {
    const at::NoGradGuard no_grad;
    return world.all_reduce(loss_of(inputs, labels), ReduceOp::AVG).item<double>();
  };

  Training result;
  result.first_loss = loss_over_ranks();
  for (int step = 0; step < options.num_steps; ++step) {
    for (const at::Tensor& one : p) one.mutable_grad() = at::Tensor();
    const auto data = inputs.chunk(options.num_parts);
    const auto target = labels.chunk(options.num_parts);
    for (std::size_t part = 0; part < data.size(); ++part) {
      const auto backward = [&] {
        (loss_of(data[part], target[part]) / options.num_parts).backward();
      };
      if (part + 1 < data.size()) {
        const auto guard = ddp.no_sync();
        backward();
      } else {
        backward();
      }
    }
    const at::NoGradGuard no_grad;
    for (const at::Tensor& one : p) one.sub_(one.grad(), 0.2);
  }
  result.last_loss = loss_over_ranks();
  const DdpStats stats = ddp.stats();
  result.bytes_sent = stats.bytes_sent;
  result.steps = stats.steps;
  result.buckets = stats.buckets;
  std::vector<at::Tensor> flat;
  for (const at::Tensor& one : p) flat.push_back(one.detach().reshape(-1));
  result.parameters = at::cat(flat);
  return result;
}

struct TrainingCase {
  const char* name;
  Hook (*make)();
  double most_bytes;  // relative to the training without a hook
  double most_loss;   // above that without a hook
};

class TrainingThroughHook : public testing::TestWithParam<TrainingCase> {};
INSTANTIATE_TEST_SUITE_P(
    Hooks, TrainingThroughHook,
    testing::Values(
        TrainingCase{"Bf16", [] { return bf16_hook(); }, 0.51, 0.001},
        TrainingCase{"Fp16", [] { return fp16_hook(); }, 0.51, 0.001},
        TrainingCase{"PowerSgd", [] { return power_sgd_hook({.rank = 2}); }, 0.2, 0.005},
        TrainingCase{"TopK", [] { return top_k_hook({.fraction = 0.05}); }, 0.11, 0.005}),
    [](const auto& one) { return one.param.name; });

TEST_P(TrainingThroughHook, EndsNearTheOneWithout) {
  const auto results = run_ranks(2, [](int rank) {
    const World world = World::join();
    const TrainingCase& one = GetParam();
    const Training plain = train(world, {});
    const auto hook = std::make_shared<CountingHook>(one.make());
    const Training hooked = train(world, {.hook = hook});
    if (rank == 0) {
      std::cout << one.make()->text() << ": loss " << hooked.first_loss << " to "
                << hooked.last_loss << " with " << hooked.bytes_sent
                << " bytes per step, without hook to " << plain.last_loss << " with "
                << plain.bytes_sent << '\n';
    }
    EXPECT_EQ(plain.first_loss, hooked.first_loss);
    EXPECT_LT(plain.last_loss, plain.first_loss / 5) << "the training itself does not work";
    EXPECT_LT(hooked.last_loss, plain.last_loss + one.most_loss);
    EXPECT_FALSE(at::equal(hooked.parameters, plain.parameters)) << "the hook did nothing";
    EXPECT_TRUE(has_same_bits(world, hooked.parameters));
    EXPECT_GE(plain.bytes_sent, static_cast<std::int64_t>(plain.parameters.nbytes()));
    EXPECT_LT(hooked.bytes_sent, one.most_bytes * static_cast<double>(plain.bytes_sent));
    EXPECT_GT(hooked.buckets, 1);
    EXPECT_EQ(hook->num_starts, 200 * hooked.buckets);
  });
  EXPECT_TRUE(all_passed(results));
  std::cout << results[0].output;
}

TEST_P(TrainingThroughHook, SeesAccumulatedGradientsOnly) {
  EXPECT_TRUE(all_passed(run_ranks(2, [](int) {
    const World world = World::join();
    const auto hook = std::make_shared<CountingHook>(GetParam().make());
    const Training plain = train(world, {.num_parts = 4});
    const Training hooked = train(world, {.hook = hook, .num_parts = 4});
    EXPECT_LT(plain.last_loss, plain.first_loss / 5) << "the training itself does not work";
    EXPECT_LT(hooked.last_loss, plain.last_loss + GetParam().most_loss);
    EXPECT_TRUE(has_same_bits(world, hooked.parameters));
    EXPECT_EQ(hooked.steps, 200);
    EXPECT_EQ(hook->num_starts, 200 * hooked.buckets) << "a hook was called under no_sync";
  })));
}

// To the bit what the engine makes of it without a hook.
TEST(TrainingThroughPowerSgd, IsPlainBeforeItStarts) {
  EXPECT_TRUE(all_passed(run_ranks(2, [](int) {
    const World world = World::join();
    const Training plain = train(world, {.num_steps = 10});
    const Training hooked =
        train(world, {.hook = power_sgd_hook({.start_step = 10}), .num_steps = 10});
    EXPECT_TRUE(at::equal(plain.parameters, hooked.parameters));
  })));
}

// What a hook has not sent is in units of gradients, whatever the weights count.
TEST(WeightsThroughHook, AreSharesOfTheWhole) {
  EXPECT_TRUE(all_passed(run_ranks(2, [](int rank) {
    const World world = World::join();
    for (const auto& make : {+[] { return power_sgd_hook({.start_step = 0}); },
                             +[] { return top_k_hook({.fraction = 0.2}); }}) {
      auto weighted = at::zeros({6, 6}).requires_grad_();
      auto plain = at::zeros({6, 6}).requires_grad_();
      DistributedDataParallel one({{"weight", weighted}}, world, {.hook = make()});
      DistributedDataParallel other({{"weight", plain}}, world, {.hook = make()});
      const at::Tensor gradient = random_tensor({6, 6}, rank);
      for (const double samples : {512, 8, 1, 4096}) {
        weighted.mutable_grad() = plain.mutable_grad() = at::Tensor();
        one.set_weight(samples);
        (weighted * gradient).sum().backward();
        (plain * gradient).sum().backward();
        EXPECT_TRUE(at::equal(weighted.grad(), plain.grad())) << samples;
      }
    }
  })));
}

// 50000 tokens of a gradient of 3 are no number of fp16, and need not be one.
TEST(WeightsThroughHook, StayInTheRangeOfFp16) {
  EXPECT_TRUE(all_passed(run_ranks(2, [](int rank) {
    const World world = World::join();
    for (const auto& [hook, type] :
         {std::pair(fp16_hook(), at::kFloat), std::pair(Hook(), at::kHalf)}) {
      auto weight = at::zeros({5}, type).requires_grad_();
      DistributedDataParallel ddp({{"weight", weight}}, world, {.hook = hook});
      ddp.set_weight(rank == 0 ? 50000 : 150000);
      (weight * (rank == 0 ? 4.0 : 8.0)).sum().backward();
      EXPECT_TRUE(at::allclose(weight.grad(), at::full({5}, 7.0, type), 1e-3)) << weight.grad();
    }
  })));
}

// A step that is dropped is as if it had not been.
TEST(DroppedStep, LeavesNoTracesInAHook) {
  EXPECT_TRUE(all_passed(run_ranks(2, [](int rank) {
    const World world = World::join();
    for (const auto& make : {+[] { return power_sgd_hook({.start_step = 0}); },
                             +[] { return top_k_hook({.fraction = 0.2}); }}) {
      auto disturbed = at::zeros({6, 6}).requires_grad_();
      auto plain = at::zeros({6, 6}).requires_grad_();
      DistributedDataParallel one({{"weight", disturbed}}, world, {.hook = make()});
      DistributedDataParallel other({{"weight", plain}}, world, {.hook = make()});
      const auto train = [&](at::Tensor& weight, int step, bool must_fail = false) {
        weight.mutable_grad() = at::Tensor();
        auto input = at::zeros({6, 6}).requires_grad_();
        if (must_fail) {  // after the gradient of the weight
          input.register_hook([](const at::Tensor&) -> at::Tensor {
            throw std::runtime_error("as the test wants it");
          });
        }
        ((weight + input * input) * random_tensor({6, 6}, 10 * rank + step)).sum().backward();
      };
      train(disturbed, 0);
      train(plain, 0);
      EXPECT_ANY_THROW(train(disturbed, 1, rank == 1));
      train(disturbed, 2);
      train(plain, 2);
      EXPECT_TRUE(at::equal(disturbed.grad(), plain.grad()));
    }
  })));
}

}  // namespace
}  // namespace lockstep::test
