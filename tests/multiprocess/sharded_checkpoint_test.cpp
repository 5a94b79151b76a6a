// Checkpoints of models that the ranks of a host share: the files of a training without sharding,
// which goes on with the same bits in any mode and any world.

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <lockstep/lockstep.h>

#include <filesystem>
#include <fstream>
#include <map>

#include "ddp/shards.h"
#include "multiprocess/sharded_saves.h"
#include "support/run_ranks.h"
#include "support/temp_folder.h"

namespace lockstep::test {
namespace {

namespace fs = std::filesystem;

class ShardedSaves : public testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(Models, ShardedSaves, testing::Values("AdamW", "TiedAndFrozen", "Masters"),
                         [](const auto& test) { return test.param + "_shm4"; });

// From one world and mode to the next, beside the same without sharding.
TEST_P(ShardedSaves, AreThoseOfATrainingWithoutShardingInAnyWorld) {
  const TempFolder folder;
  const std::vector<std::pair<int, Shard>> stages = {{4, Shard::kGradients},
                                                     {2, Shard::kNone},
                                                     {3, Shard::kOptimizer},
                                                     {2, Shard::kGradients},
                                                     {4, Shard::kNone}};
  for (std::int64_t stage = 0; stage < std::ssize(stages); ++stage) {
    const auto [size, mode] = stages[static_cast<std::size_t>(stage)];
    const auto body = [&, mode = mode](int) {
      at::set_num_threads(1);
      const World world = World::join({.engine = "shm", .timeout = std::chrono::seconds(40)});
      torch::manual_seed(5);
      const std::string paths[] = {folder.path() + "/replicated", folder.path() + "/shared"};
      SavedTwin replicated(world, Shard::kNone, recipe_of(GetParam()), paths[0]);
      SavedTwin shared(world, mode, recipe_of(GetParam()), paths[1]);
      const std::int64_t from = 3 * stage;
      const std::int64_t to = from + 3;
      EXPECT_EQ(replicated.checkpoints.load_latest().step, from);
      EXPECT_EQ(shared.checkpoints.load_latest().step, from);
      shared.expect_same(replicated);
      replicated.run(from, to);
      shared.run(from, to);
      shared.expect_same(replicated);
      if (stage > 0) {  // the same again, over states that live
        EXPECT_EQ(shared.checkpoints.load_latest().step, from);
        shared.run(from, to);
        shared.expect_same(replicated);
      }
      replicated.checkpoints.save(to);
      shared.checkpoints.save(to);
      if (world.rank() != 0) return;
      const std::string name = "/" + std::to_string(stage) + "-step-" + std::to_string(to);
      expect_same_files(paths[0] + name, paths[1] + name);
    };
    ASSERT_TRUE(all_passed(run_ranks(size, body))) << "stage " << stage;
  }
}

std::vector<OnEngine> saving_worlds() {
  std::vector<OnEngine> rows = {{"shm", "aa"}, {"shm", "aaa"}};
  if (why_no_engine("gloo").empty()) rows.push_back({"hierarchical", "aab"});
  return rows;
}

class ShardedResume : public testing::TestWithParam<OnEngine> {};
INSTANTIATE_TEST_SUITE_P(Worlds, ShardedResume, testing::ValuesIn(saving_worlds()),
                         [](const auto& test) {
                           return test.param.hosts + "_" + test.param.engine +
                                  std::to_string(test.param.size());
                         });

// Also while the checkpoint is written; and its states are the host's before any step is made.
TEST_P(ShardedResume, GoesOnAsIfItHadNotStopped) {
  const TempFolder folder;
  EXPECT_TRUE(all_passed(run_on(GetParam(), [&](const World& world) {
    at::set_num_threads(1);
    for (const Shard mode : {Shard::kOptimizer, Shard::kGradients}) {
      for (const char* const name : {"AdamW", "Masters"}) {
        const std::string path = folder.path() + "/" + name_of(mode) + name;
        SavedTwin whole(world, mode, recipe_of(name), path + "-whole");
        whole.run(0, 6);
        {
          SavedTwin first(world, mode, recipe_of(name), path);
          first.run(0, 3);
          first.checkpoints.save_async(3);
          first.run(3, 5);
          first.checkpoints.wait();
        }
        SavedTwin second(world, mode, recipe_of(name), path);
        EXPECT_EQ(second.checkpoints.load_latest().step, 3);
        const auto shards = Shards::of(second.twin.model->wide->weight);
        for (auto& [parameter, state] : second.twin.optimizer->state()) {
          auto& its = static_cast<torch::optim::AdamWParamState&>(*state);
          EXPECT_EQ(Shards::holder_of(its.exp_avg()), shards);
          EXPECT_EQ(Shards::holder_of(its.exp_avg_sq()), shards);
        }
        second.run(3, 6);
        second.expect_same(whole);
      }
    }
  })));
}

// A graph from before the load is refused on every rank, whichever of them has read the tensors.
TEST_P(ShardedResume, ALoadIsSeenOnAllRanks) {
  const TempFolder folder;
  EXPECT_TRUE(all_passed(run_on(GetParam(), [&](const World& world) {
    SavedTwin one(world, Shard::kOptimizer, recipe_of("AdamW"), folder.path());
    one.checkpoints.save(0);
    std::map<std::string, std::int64_t> versions;
    for (const auto& its : one.twin.model->named_parameters()) {
      versions[its.key()] = its.value()._version();
    }
    const at::Tensor loss = one.loss(0);
    one.checkpoints.load_latest();
    for (const auto& its : one.twin.model->named_parameters()) {
      EXPECT_GT(its.value()._version(), versions[its.key()]) << its.key();
    }
    EXPECT_THROW(loss.backward(), c10::Error);
  })));
}

// Bytes that this process has read from files.
std::int64_t num_read() {
  std::ifstream file("/proc/self/io");
  std::string word;
  std::int64_t number = 0;
  while (file >> word >> number) {
    if (word == "rchar:") return number;
  }
  return -1;
}

TEST(ShardedCheckpoint, EachTensorIsReadOnceOnAHost_shm3) {
  const TempFolder folder;
  EXPECT_TRUE(all_passed(run_ranks(3, [&](int) {
    const World world = World::join({.engine = "shm"});
    std::map<Shard, double> all;
    for (const Shard mode : {Shard::kNone, Shard::kOptimizer}) {
      SavedTwin one(world, mode, recipe_of("AdamW"), folder.path() + "/" + name_of(mode));
      one.run(0, 1);
      one.checkpoints.save(1);
      const std::int64_t before = num_read();
      one.checkpoints.load_latest();
      all[mode] = world.sum(static_cast<double>(num_read() - before));
    }
    double saved = 0;
    for (const auto& entry : fs::directory_iterator(folder.path() + "/kNone/0-step-1")) {
      saved += static_cast<double>(entry.file_size());
    }
    EXPECT_NEAR((all[Shard::kNone] - all[Shard::kOptimizer]) / saved, 2, 0.2);  // of three times
  })));
}

struct ShardedOverHosts : testing::Test {
  void SetUp() override {
    if (!why_no_engine("gloo").empty()) GTEST_SKIP() << "this build has no gloo";
  }
  const OnEngine layout = {"hierarchical", "aab"};
};

// Also tensors that are sent in pieces, and whoever reads: a rank that shares with another one, or
// one by itself.
TEST_F(ShardedOverHosts, OneReadsAndOneOfEachHostWrites) {
  const TempFolder folder;
  EXPECT_TRUE(all_passed(run_on(layout, [&](const World& world) {
    const std::string path = folder.path() + (world.rank() == 2 ? "/b" : "/a");
    torch::nn::Linear model(2200, 2200);
    torch::nn::Linear small(3, 2);
    model->register_module("small", small);
    DistributedDataParallel ddp(model, world, {.shard = Shard::kOptimizer, .shard_min_bytes = 0});
    optim::Sharded<optim::SGD> optimizer(model->parameters(), torch::optim::SGDOptions(0.1));
    Checkpointer checkpoints(path, world);
    checkpoints.add(model.ptr()).add(optimizer).add(ddp);
    ddp.change_parameters([&] {
      for (auto& one : model->parameters()) one.copy_(numbers(one.sizes().vec(), 3));
    });
    checkpoints.save(1);
    for (const int reader : {0, 2}) {
      ddp.change_parameters([&] {
        for (auto& one : model->parameters()) one.fill_(world.rank());
      });
      const bool sees_it = (world.rank() == 2) == (reader == 2);
      checkpoints.load(sees_it ? path + "/0-step-1" : folder.path() + "/not-there");
      for (const auto& one : model->named_parameters()) {
        EXPECT_TRUE(one.value().equal(numbers(one.value().sizes().vec(), 3)))
            << one.key() << " from rank " << reader;
      }
      small(at::ones({1, 3})).sum().backward();  // nothing has changed but by the load
      optimizer.step();
      expect_same_bits(world, small->weight.detach(), "small.weight");
    }
  })));
}

// Whoever of the host has hashed it.
TEST_F(ShardedOverHosts, DifferentParametersAreNotSaved) {
  const TempFolder folder;
  EXPECT_TRUE(all_passed(run_on(layout, [&](const World& world) {
    for (const char* const name : {"table.weight", "last.bias"}) {
      SavedTwin one(world, Shard::kOptimizer, recipe_of("AdamW"), folder.path() + "/" + name);
      one.run(0, 1);
      one.checkpoints.save(1);
      world.barrier();
      if (world.rank() == 2) {  // the only one of its host
        one.twin.ddp->change_parameters([&] { one.twin.model->named_parameters()[name].add_(1); });
      }
      world.barrier();
      const auto error = thrown_by<MismatchError>([&] { one.checkpoints.save(2); });
      expect_says(error,
                  {std::string("model.") + name + " is not the same on rank 0 and on rank 2"});
    }
  })));
}

// All ranks are told of what only one host knows, and the checkpoint from before stays.
TEST_F(ShardedOverHosts, TornParametersAreNotSaved) {
  const TempFolder folder;
  EXPECT_TRUE(all_passed(run_on(layout, [&](const World& world) {
    SavedTwin one(world, Shard::kOptimizer, recipe_of("AdamW"), folder.path() + "/one");
    one.run(0, 1);
    one.checkpoints.save(1);
    if (world.rank() == 2) {
      const auto shards = Shards::of(one.twin.model->wide->weight);
      shards->begin_update(1, 0, [] { return std::vector<std::string>{"a step"}; });
      std::exception_ptr failure;
      try {
        shards->run_update(
            {.write = [](int, std::size_t) { throw std::runtime_error("it fails"); }, .runs = {}});
      } catch (const std::runtime_error&) {
        failure = std::current_exception();
      }
      EXPECT_THROW(shards->end_update(failure, {0}), Error);
    }
    const auto error = thrown_by<UsageError>([&] { one.checkpoints.save(2); });
    expect_says(error, {"half updated", "Go on from a checkpoint"});
    SavedTwin next(world, Shard::kOptimizer, recipe_of("AdamW"), folder.path() + "/next");
    EXPECT_EQ(next.checkpoints.load(folder.path() + "/one/0-step-1").step, 1);
    EXPECT_FALSE(fs::exists(folder.path() + "/one/1-step-2"));
  })));
}

// An optimizer that fails in the middle of a step.
struct Failing : optim::AdamW {
  using optim::AdamW::AdamW;
  at::Tensor step(LossClosure closure = nullptr) override {
    const at::Tensor loss = optim::AdamW::step(std::move(closure));
    if (is_failing) throw std::runtime_error("it fails");
    return loss;
  }
  static inline bool is_failing = false;
};

// Neither another wrapper nor rewrap() makes torn parameters whole: a checkpoint does.
TEST(ShardedCheckpoint, TornParametersStayTornUntilItIsLoaded) {
  const TempFolder folder;
  EXPECT_TRUE(all_passed(run_ranks(2, [&](int rank) {
    const World world = World::join({.engine = "shm"});
    for (const Shard mode : {Shard::kOptimizer, Shard::kGradients}) {
      Recipe recipe = recipe_of("AdamW");
      recipe.make = maker<Failing>(torch::optim::AdamWOptions(1e-2));
      const std::string path = folder.path() + "/" + name_of(mode);
      SavedTwin expected(world, Shard::kNone, recipe, path + "/expected");
      expected.run(0, 4);
      WideNet model;
      auto optimizer = recipe.make(mode, model->parameters());
      auto wrapped = std::make_unique<DistributedDataParallel>(
          model, world, DdpOptions{.shard = mode, .shard_min_bytes = 0});
      const auto run = [&](int from, int to) {
        for (int step = from; step < to; ++step) {
          optimizer->zero_grad();
          loss_of(model->forward(batch(rank, step), step % 3 != 2)).backward();
          optimizer->step();
        }
      };
      Checkpointer checkpoints(path + "/torn", world);
      checkpoints.add(model).add(*optimizer);
      run(0, 2);
      checkpoints.save(2);
      Failing::is_failing = true;  // on whichever rank takes a piece
      expect_says(thrown_by<Error>([&] { run(2, 3); }), {"it fails"});
      Failing::is_failing = false;
      const auto expect_torn = [&] {
        expect_says(thrown_by<UsageError>([&] { run(2, 3); }), {"half updated", "checkpoint"});
        expect_says(thrown_by<UsageError>([&] { checkpoints.save(3); }), {"half updated"});
      };
      expect_torn();
      wrapped->rewrap();
      expect_torn();
      wrapped.reset();
      expect_says(thrown_by<UsageError>([&] { checkpoints.save(3); }), {"half updated"});
      expect_says(thrown_by<UsageError>([&] { save_weights(path + "/weights", *model); }),
                  {"half updated"});
      expect_says(thrown_by<UsageError>([&] { checkpoints.load_latest(); }), {"Wrap the model"});
      expect_says(thrown_by<UsageError>([&] {
                    const DistributedDataParallel alone(
                        model, *world.split(rank), DdpOptions{.shard = mode, .shard_min_bytes = 0});
                  }),
                  {"half updated"});
      wrapped = std::make_unique<DistributedDataParallel>(
          model, world, DdpOptions{.shard = mode, .shard_min_bytes = 0});
      expect_torn();
      // The optimizer's states are torn, too.
      Checkpointer weights_only(path + "/weights_only", world);
      weights_only.add(model);
      weights_only.load(path + "/torn/0-step-2", {.strict = false});
      expect_torn();
      EXPECT_EQ(checkpoints.load_latest().step, 2);
      run(2, 4);
      for (const auto& one : model->named_parameters()) {
        EXPECT_TRUE(one.value().equal(expected.twin.model->named_parameters()[one.key()]))
            << one.key() << ", " << name_of(mode);
      }
    }
  })));
}

TEST(ShardedCheckpoint, AWorldWithoutRanksThatShareIsRefused) {
  const TempFolder folder;
  EXPECT_TRUE(all_passed(run_ranks(2, [&](int rank) {
    const World world = World::join({.engine = "shm"});
    SavedTwin one(world, Shard::kOptimizer, recipe_of("AdamW"), folder.path() + "/all");
    one.run(0, 1);
    one.checkpoints.save(1);
    const std::string other = "rank " + std::to_string(1 - rank) + " shares";
    Checkpointer alone(folder.path() + "/" + std::to_string(rank), *world.split(rank));
    alone.add(one.twin.model).add(*one.twin.optimizer);
    expect_says(thrown_by<UsageError>([&] { alone.save(1); }), {"'model.", other});
    const auto load = [&](Checkpointer& checkpoints, const LoadOptions& options) {
      checkpoints.load(folder.path() + "/all/0-step-1", options);
    };
    expect_says(thrown_by<UsageError>([&] { load(alone, {}); }), {"'model.", other});
    Checkpointer states(folder.path() + "/s" + std::to_string(rank), *world.split(rank));
    states.add(*one.twin.optimizer);
    expect_says(thrown_by<UsageError>([&] { load(states, {.strict = false}); }), {other});
    one.run(1, 2);  // nothing has changed
  })));
}

TEST(ShardedCheckpoint, WeightsAreLoadedByTheRanksOfAHostTogether_shm3) {
  const TempFolder folder;
  EXPECT_TRUE(all_passed(run_ranks(3, [&](int rank) {
    const World world = World::join({.engine = "shm"});
    const Recipe& recipe = recipe_of("TiedAndFrozen");
    const std::string path = folder.path() + "/model.safetensors";
    SavedTwin replicated(world, Shard::kNone, recipe, folder.path() + "/replicated");
    SavedTwin shared(world, Shard::kGradients, recipe, folder.path() + "/shared");
    replicated.run(0, 2);
    if (rank == 0) save_weights(path, *replicated.twin.model);
    world.barrier();
    const at::Tensor loss = shared.loss(0);
    const std::int64_t version = shared.twin.model->first->bias._version();  // frozen
    load_weights(path, *shared.twin.model);
    shared.expect_same(replicated);
    EXPECT_GT(shared.twin.model->first->bias._version(), version);
    // A rank that cannot read ends the call on all.
    const auto error = thrown_by<Error>(
        [&] { load_weights(rank == 1 ? path + "-not" : path, *shared.twin.model); });
    expect_says(error, {"model.safetensors-not"});
    load_weights(path, *replicated.twin.model);
    replicated.twin.optimizer->state().clear();
    replicated.run(2, 4);
    shared.run(2, 4);
    shared.expect_same(replicated);
    world.barrier();
    const at::Tensor old = shared.loss(0);
    load_weights(path, *shared.twin.model);
    EXPECT_THROW(old.backward(), c10::Error);
  })));
}

}  // namespace
}  // namespace lockstep::test
