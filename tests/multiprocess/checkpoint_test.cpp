// Saving and loading: the same bits afterwards, and clear errors.

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <lockstep/lockstep.h>
#include <sys/stat.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/rmsprop.h>
#include <unistd.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <algorithm>
#include <csignal>
#include <fstream>
#include <set>

#include "base/text.h"
#include "multiprocess/checkpoint_run.h"
#include "support/run_ranks.h"

namespace lockstep::test {
namespace {

namespace fs = std::filesystem;

std::vector<std::string> checkpoints_in(const std::string& folder) {
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(folder)) {
    const std::string name = entry.path().filename().string();
    if (name.front() != '.') names.push_back(name);
  }
  std::ranges::sort(names);
  return names;
}

template <typename Error>
void expect_error(const std::function<void()>& call, const std::vector<std::string>& texts) {
  try {
    call();
    ADD_FAILURE() << "no error";
  } catch (const Error& error) {
    for (const std::string& text : texts) {
      EXPECT_NE(std::string(error.what()).find(text), std::string::npos) << text << " is not in:\n"
                                                                         << error.what();
    }
  }
}

// A checkpoint that version 0.1 has written after 8 steps, loaded by this one, goes on as a run
// that was never interrupted. The file was made on another CPU, where matrix products have other
// last bits: so its tensors are compared bit by bit when they are loaded, and the run's up to
// rounding.
TEST(OldCheckpoint, Of01GoesOnExactly) {
  const TempFolder folder;
  const auto body = [&](int) {
    const World world = World::join();
    Training whole(world);
    for (int i = 0; i < 17; ++i) whole.step();
    Training second(world);
    Checkpointer checkpoints(folder.path(), world);
    second.add_to(checkpoints);
    const std::string old = LOCKSTEP_GOLDEN_DIR "/checkpoint-0.1/0-step-8";
    EXPECT_EQ(checkpoints.load(old).step, 8);
    const std::string again = folder.path() + "/0-step-8";
    checkpoints.save(8);
    std::map<std::string, at::Tensor> expected;
    std::map<std::string, at::Tensor> found;
    for (const char* const file : {"tensors-0-of-2.safetensors", "tensors-1-of-2.safetensors"}) {
      for (const NamedTensor& one : load_tensors(old + "/" + file)) expected[one.name] = one.tensor;
      for (const NamedTensor& one : load_tensors(again + "/" + file)) found[one.name] = one.tensor;
    }
    EXPECT_EQ(found.size(), expected.size());
    for (const auto& [name, tensor] : expected) EXPECT_TRUE(found.at(name).equal(tensor)) << name;
    for (int i = 8; i < 17; ++i) second.step();
    // The gradient of a bias before a norm is rounding alone, which Adam makes a whole step of; the
    // running mean follows it.
    const auto compared = [](const Training& run) {
      std::vector<at::Tensor> states = run.state();
      EXPECT_TRUE(states.at(1).equal(run.model->first->bias));
      EXPECT_TRUE(states.at(6).equal(run.model->norm->running_mean));
      states.erase(states.begin() + 6);
      states.erase(states.begin() + 1);
      return states;
    };
    const std::vector<at::Tensor> states = compared(second);
    const std::vector<at::Tensor> expected_states = compared(whole);
    ASSERT_EQ(states.size(), expected_states.size());
    for (std::size_t i = 0; i < states.size(); ++i) {
      const at::Tensor distance = (states[i] - expected_states[i]).abs().max();
      EXPECT_LT(distance.item<double>(), 1e-4) << i;
    }
    EXPECT_EQ(whole.scaler->current_scale(), second.scaler->current_scale());
    EXPECT_EQ(whole.schedule->lr(), second.schedule->lr());
    EXPECT_EQ(whole.loader->state(), second.loader->state());
  };
  EXPECT_TRUE(all_passed(run_ranks(2, body, {.variables = folder.variables()})));
}

// Whatever the other rank calls instead, of the world or of a wrapped model.
TEST(Checkpoint, SaveOnOneRankIsNamed) {
  const TempFolder folder;
  const auto body = [&](int rank) {
    for (const bool is_backward : {true, false}) {
      const World world = World::join();
      Training training(world);
      Checkpointer checkpoints(folder.path(), world);
      training.add_to(checkpoints);
      const auto call = [&] {
        if (rank == 0) return checkpoints.save(0);
        if (!is_backward) return static_cast<void>(world.sum(1));
        training.ddp->accumulate(1);
        training.model->forward(torch::randn({4, 4})).sum().backward();
      };
      expect_error<MismatchError>(
          call,
          {"save (all_gather of ", is_backward ? "all_reduce of f32[" : "all_reduce of f64[1]"});
      std::this_thread::sleep_for(std::chrono::seconds(2));  // until all have seen it
    }
  };
  EXPECT_TRUE(all_passed(run_ranks(2, body, {.variables = folder.variables()})));
}

// All or nothing: the data set is too small for the sampler's state, and the weights stay.
TEST(Checkpoint, WhatDoesNotFitChangesNothing) {
  const TempFolder folder;
  const World world = World::join();
  const auto loader_of = [&](std::int64_t size) {
    const auto data = std::make_shared<TensorDataset>(at::ones({size, 1}), at::ones({size}));
    return Loader(data, DistributedSampler(data->size(), world), LoaderOptions{.batch_size = 4});
  };
  torch::nn::Linear model(2, 1);
  Loader loader = loader_of(40);
  for (int i = 0; i < 5; ++i) loader.next();
  Checkpointer checkpoints(folder.path(), world);
  checkpoints.add(model).add(loader);
  checkpoints.save(1);

  torch::nn::Linear other(2, 1);
  Loader small = loader_of(12);
  small.next();
  Checkpointer others(folder.path() + "/others", world);
  others.add(other).add(small);
  const at::Tensor before = other->weight.detach().clone();
  const SamplerState state = small.state();
  expect_error<UsageError>([&] { others.load(folder.path() + "/0-step-1"); },
                           {"20 samples consumed"});
  EXPECT_TRUE(at::equal(other->weight, before));
  EXPECT_EQ(small.state(), state);
}

class ExactResume : public testing::TestWithParam<std::tuple<std::string, bool, Writers>> {};

// 17 steps of 8 samples and two ranks in epochs of 48: the checkpoint is in the middle of one.
TEST_P(ExactResume, GivesTheSameBits) {
  const TempFolder folder;
  const auto body = [&](int) {
    const auto [optimizer, is_async, writers] = GetParam();
    const World world = World::join();
    Training whole(world, optimizer);
    for (int i = 0; i < 17; ++i) whole.step();

    {
      Training first(world, optimizer);
      Checkpointer checkpoints(folder.path(), world, {.writers = writers});
      first.add_to(checkpoints);
      EXPECT_EQ(checkpoints.load_latest().step, 0);
      for (int i = 0; i < 8; ++i) first.step();
      if (is_async) {
        checkpoints.save_async(8);
        for (int i = 0; i < 3; ++i) first.step();  // must not be in it
        checkpoints.wait();
      } else {
        checkpoints.save(8);
        for (int i = 0; i < 3; ++i) first.step();
      }
    }
    Training second(world, optimizer);
    at::rand({5});  // another random state than after the checkpoint
    Checkpointer checkpoints(folder.path(), world);
    second.add_to(checkpoints);
    const Loaded loaded = checkpoints.load_latest();
    EXPECT_EQ(loaded.step, 8);
    EXPECT_EQ(loaded.path, folder.path() + "/0-step-8");
    EXPECT_TRUE(loaded.skipped.empty());
    for (int i = 8; i < 17; ++i) second.step();
    EXPECT_TRUE(is_equal(whole.state(), second.state()));
    EXPECT_EQ(whole.scaler->current_scale(), second.scaler->current_scale());
    EXPECT_EQ(whole.schedule->lr(), second.schedule->lr());
    EXPECT_EQ(whole.loader->state(), second.loader->state());
  };
  EXPECT_TRUE(all_passed(run_ranks(2, body, {.variables = folder.variables()})));
}

INSTANTIATE_TEST_SUITE_P(All, ExactResume,
                         testing::Values(std::tuple{"AdamW", false, Writers::kEachRank},
                                         std::tuple{"AdamW", true, Writers::kOnePerHost},
                                         std::tuple{"Adam", false, Writers::kOnePerHost},
                                         std::tuple{"SGD", true, Writers::kEachRank},
                                         std::tuple{"RMSprop", false, Writers::kEachRank},
                                         std::tuple{"Adagrad", false, Writers::kEachRank}));

// Hooks that keep what they did not send: each rank its own, in buckets laid out by what the first
// step has shown.
TEST(Resume, CommHooksGoOnExactly) {
  const TempFolder folder;
  const auto body = [&](int rank) {
    const World world = World::join();
    const std::vector<std::function<std::shared_ptr<CommHook>()>> hooks = {
        [] { return power_sgd_hook({.start_step = 2, .min_compression = 1}); },
        [] { return top_k_hook({.fraction = 0.1}); }};
    for (std::size_t i = 0; i < hooks.size(); ++i) {
      // After one step the order of buckets is new and not yet used; after four it is settled.
      for (const int saved : {1, 4}) {
        const std::string path = text::format("{}/{}-{}", folder.path(), i, saved);
        const auto make = [&] {
          return Training(world, "SGD", 4, 1,
                          {.bucket_bytes = 256, .first_bucket_bytes = 64, .hook = hooks[i]()});
        };
        Training whole = make();
        for (int step = 0; step < 9; ++step) whole.step();
        Training first = make();
        Checkpointer saving(path, world);
        first.add_to(saving);
        for (int step = 0; step < saved; ++step) first.step();
        saving.save_async(saved);
        first.step();  // must not be in it
        saving.wait();
        EXPECT_TRUE(
            fs::exists(text::format("{}/0-step-{}/rank-{}-of-2.safetensors", path, saved, rank)));

        Training second = make();
        Checkpointer loading(path + "-loading", world);
        second.add_to(loading);
        loading.load(text::format("{}/0-step-{}", path, saved));
        for (int step = saved; step < 9; ++step) second.step();
        EXPECT_TRUE(is_equal(whole.state(), second.state())) << i << " " << saved;
      }
    }
  };
  EXPECT_TRUE(all_passed(run_ranks(2, body, {.variables = folder.variables()})));
}

// Only rank 0 sees the files: it reads for all.
TEST(Resume, CommHooksGoOnWhereOneRankSeesTheCheckpoint) {
  const TempFolder folder;
  const auto body = [&](int rank) {
    const World world = World::join();
    const auto make = [&] {
      return Training(world, "SGD", 4, 1, {.hook = top_k_hook({.fraction = 0.1})});
    };
    Training first = make();
    Checkpointer saving(folder.path() + "/all", world);
    first.add_to(saving);
    for (int step = 0; step < 3; ++step) first.step();
    saving.save(3);
    const HookState mine = first.ddp->hook_state();

    Training second = make();
    Checkpointer loading(folder.path() + "/other", world);
    second.add_to(loading);
    ASSERT_EQ(::chdir(rank == 0 ? (folder.path() + "/all").c_str() : "/"), 0);
    EXPECT_EQ(loading.load("0-step-3").step, 3);
    EXPECT_TRUE(at::equal(second.ddp->hook_state().at("hook.0"), mine.at("hook.0")));
    const at::Tensor all = world.all_gather(mine.at("hook.0"));
    EXPECT_FALSE(at::equal(all[0], all[1])) << "ranks keep the same: nothing is tested";
  };
  EXPECT_TRUE(all_passed(run_ranks(2, body, {.variables = folder.variables()})));
}

// Two ranks' leftovers become their mean on three; a program without the hook is told.
TEST(Resume, CommHooksGoOnAtAnotherWorldSize) {
  const TempFolder folder;
  const auto body = [&](int rank) {
    const World all = World::join();
    const auto make = [](const World& world) {
      return Training(world, "SGD", 4, 1, {.hook = top_k_hook({.fraction = 0.1})});
    };
    if (rank < 2) {
      const World two =
          World::join({.rank = rank,
                       .size = 2,
                       .store = c10::make_intrusive<c10d::PrefixStore>("two", all.store())});
      Training run = make(two);
      Checkpointer checkpoints(folder.path(), two);
      run.add_to(checkpoints);
      for (int step = 0; step < 3; ++step) run.step();
      checkpoints.save(3);
      save_tensors(text::format("{}/left-{}", folder.path(), rank),
                   {{"left", run.ddp->hook_state().at("hook.0")}});
    }
    all.barrier();
    Training run = make(all);
    Checkpointer checkpoints(folder.path(), all);
    run.add_to(checkpoints);
    EXPECT_EQ(checkpoints.load_latest().step, 3);
    const at::Tensor sum = load_tensors(folder.path() + "/left-0").front().tensor +
                           load_tensors(folder.path() + "/left-1").front().tensor;
    EXPECT_TRUE(at::equal(run.ddp->hook_state().at("hook.0"), sum / 2));
    run.step();
    run.ddp->check_replicas();

    Training other(all, "SGD", 4, 1);
    Checkpointer without(folder.path() + "/other", all);
    other.add_to(without);
    const auto before = other.state();
    const std::string path = folder.path() + "/0-step-3";
    expect_error<UsageError>([&] { without.load(path); }, {"comm hook", "this model has no hook"});
    EXPECT_TRUE(is_equal(before, other.state()));
    const Loaded loaded = without.load(path, {.strict = false});
    EXPECT_EQ(loaded.differences, std::vector<std::string>{"left out: the state of comm hooks"});
    other.step();
    other.ddp->check_replicas();
  };
  EXPECT_TRUE(all_passed(run_ranks(3, body, {.variables = folder.variables()})));
}

// Each rank writes a part: were they not the same, the file would be nobody's model.
TEST(Checkpoint, RanksThatHaveDriftedAreNotMixed) {
  const TempFolder folder;
  const auto body = [&](int rank) {
    const World world = World::join();
    Training run(world);
    Checkpointer checkpoints(folder.path(), world);
    run.add_to(checkpoints);
    run.step();
    const at::NoGradGuard no_grad;
    run.model->norm->running_mean.fill_(rank + 5);  // a rank's own data: rank 0's is taken
    checkpoints.save(1);
    run.model->norm->running_mean.zero_();
    checkpoints.load_latest();
    EXPECT_TRUE(at::equal(run.model->norm->running_mean, at::full({16}, 5.0)));

    if (rank == 1) run.model->last->bias[1] += 1;
    expect_error<MismatchError>([&] { checkpoints.save(2); },
                                {"model.last.bias is not the same on rank 0 and on rank 1"});
    EXPECT_EQ(checkpoints_in(folder.path()), std::vector<std::string>{"0-step-1"});
    if (rank == 1) run.model->last->bias[1] -= 1;
    world.broadcast(run.model->last->bias, 0);
    checkpoints.save(3);
  };
  EXPECT_TRUE(all_passed(run_ranks(2, body, {.variables = folder.variables()})));
}

// Two ranks with batches of 4, then one with batches of 8: the same samples in each step, none
// lost, none twice.
TEST(Resume, AtAnotherWorldSizeTakesTheSameSteps) {
  const TempFolder folder;
  const auto steps_file = [&](int rank) {
    return text::format("{}/steps-{}", folder.path(), rank);
  };
  const auto body = [&](int rank) {
    const World world = World::join();
    Training run(world, "AdamW", 4, 1);
    run.model->eval();  // no dropout: its numbers belong to ranks
    Checkpointer checkpoints(folder.path() + "/c", world);
    run.add_to(checkpoints);
    std::ofstream steps(steps_file(rank));
    for (int i = 0; i < 10; ++i) {
      if (i == 3) checkpoints.save(3);
      for (const std::size_t index : run.step()) steps << index << ' ';
      steps << '\n';
    }
    if (rank == 0) save_weights(folder.path() + "/end.safetensors", *run.model);
  };
  ASSERT_TRUE(all_passed(run_ranks(2, body, {.variables = folder.variables()})));
  const World alone = World::join();
  Training run(alone, "AdamW", 8, 1);
  run.model->eval();
  Checkpointer checkpoints(folder.path() + "/c", alone);
  run.add_to(checkpoints);
  EXPECT_EQ(checkpoints.load_latest().step, 3);
  std::ifstream files[2] = {std::ifstream(steps_file(0)), std::ifstream(steps_file(1))};
  for (int i = 0; i < 10; ++i) {
    std::multiset<std::size_t> theirs;
    for (std::ifstream& file : files) {
      std::string line;
      std::getline(file, line);
      std::istringstream numbers(line);
      for (std::size_t index = 0; numbers >> index;) theirs.insert(index);
    }
    if (i < 3) continue;
    const auto mine = run.step();
    EXPECT_EQ(std::multiset<std::size_t>(mine.begin(), mine.end()), theirs) << "step " << i;
  }
  DropNet end;
  load_weights(folder.path() + "/end.safetensors", *end);
  const auto ours = run.model->parameters();
  const auto others = end->parameters();
  for (std::size_t i = 0; i < ours.size(); ++i) {
    EXPECT_TRUE(at::allclose(ours[i], others[i], 1e-4, 1e-5)) << i;
  }
}

TEST(Checkpoint, AndThreeRanksGoOnFromTwo) {
  const TempFolder folder;
  const auto body = [&](int rank) {
    // Two ranks of the three save, then all three load.
    const World all = World::join();
    std::optional<World> two;
    if (rank < 2) {
      two = World::join({.rank = rank,
                         .size = 2,
                         .store = c10::make_intrusive<c10d::PrefixStore>("two", all.store())});
      Training run(*two);
      Checkpointer checkpoints(folder.path(), *two);
      run.add_to(checkpoints);
      run.step();
      checkpoints.save(1);
    }
    all.barrier();
    Training run(all);
    Checkpointer checkpoints(folder.path(), all);
    run.add_to(checkpoints);
    EXPECT_EQ(checkpoints.load_latest().step, 1);
    run.step();
    run.ddp->check_replicas();
    const at::Tensor drawn = all.all_gather(at::rand({8}));
    EXPECT_FALSE(at::equal(drawn[0], drawn[2]));
    EXPECT_FALSE(at::equal(drawn[1], drawn[2]));
  };
  EXPECT_TRUE(all_passed(run_ranks(3, body, {.variables = folder.variables()})));
}

// As on hosts that share no disk: each has a whole copy, and one that has none is given it.
TEST(Checkpoint, FoldersOfTheirOwn) {
  const TempFolder folder;
  const auto body = [&](int rank) {
    const World world = World::join();
    const std::string mine = text::format("{}/{}", folder.path(), rank);
    std::vector<at::Tensor> saved;
    {
      Training run(world);
      Checkpointer checkpoints(mine, world);
      run.add_to(checkpoints);
      run.step();
      checkpoints.save(1);
      run.step();
      checkpoints.save_async(2);
      checkpoints.wait();
      saved = run.state();
    }
    EXPECT_EQ(checkpoints_in(mine), (std::vector<std::string>{"0-step-1", "1-step-2"}));
    if (rank == 0) fs::remove_all(mine);                                               // a new disk
    if (rank == 2) fs::resize_file(mine + "/1-step-2/tensors-0-of-1.safetensors", 9);  // a bad one
    Training run(world);
    Checkpointer checkpoints(mine, world);
    run.add_to(checkpoints);
    const Loaded loaded = checkpoints.load_latest();
    EXPECT_EQ(loaded.step, 2);
    EXPECT_EQ(loaded.skipped.size(), 1U);
    EXPECT_TRUE(is_equal(saved, run.state()));
    const at::Tensor drawn = world.all_gather(at::rand({8}));
    EXPECT_FALSE(at::equal(drawn[0], drawn[1])) << "each rank has its own random state";
    checkpoints.save(3);
    EXPECT_EQ(checkpoints_in(mine).back(), "2-step-3");
  };
  EXPECT_TRUE(all_passed(run_ranks(3, body, {.variables = folder.variables()})));
}

TEST(Checkpoint, RanksThatDisagreeOrStayAwayAreErrors) {
  const TempFolder folder;
  const auto body = [&](int rank) {
    const World world = World::join({.timeout = std::chrono::seconds(2)});
    Training run(world);
    Checkpointer checkpoints(folder.path(), world);
    run.add_to(checkpoints);
    expect_error<MismatchError>([&] { checkpoints.save(rank); },
                                {"the step is 0 on rank 0 and 1 on rank 1", "at the same step"});
    checkpoints.save(5);
    expect_error<UsageError>([&] { checkpoints.save(-1); }, {"negative"});
    run.optimizer->zero_grad();
    run.model(at::randn({4, 4})).sum().backward();
    expect_error<UsageError>([&] { checkpoints.save(6); }, {"1 backwards of an accumulation"});
    run.model(at::randn({4, 4})).sum().backward();
    checkpoints.save(6);
    if (rank == 0) {
      const auto began = std::chrono::steady_clock::now();
      EXPECT_THROW(checkpoints.save(7), TimeoutError);
      EXPECT_LT(std::chrono::steady_clock::now() - began, std::chrono::seconds(20));
    } else {
      std::this_thread::sleep_for(std::chrono::seconds(4));
    }
  };
  EXPECT_TRUE(all_passed(run_ranks(2, body, {.variables = folder.variables()})));
  EXPECT_EQ(checkpoints_in(folder.path()), (std::vector<std::string>{"0-step-5", "1-step-6"}));
}

// Before the calls of parts that are collective: nobody waits for a call that does not come.
TEST(Checkpoint, PartsThatNotAllRanksHaveAreNamed) {
  const TempFolder folder;
  const auto body = [&](int rank) {
    const World world = World::join({.timeout = std::chrono::seconds(20)});
    Training run(world);
    {
      Checkpointer checkpoints(folder.path(), world);
      run.add_to(checkpoints);
      checkpoints.save(1);
    }
    const auto text = [] { return std::string("text"); };
    const auto nothing = [](const std::string&) {};
    for (const bool is_per_rank : {false, true}) {
      Checkpointer checkpoints(folder.path(), world);
      if (rank == 0 && is_per_rank) checkpoints.add_per_rank("simulator", text, nothing);
      if (rank == 0 && !is_per_rank) checkpoints.add("simulator", text, nothing);
      run.add_to(checkpoints);
      const std::vector<std::string> texts = {"Things that were added to the Checkpointer differ",
                                              "rank 0: simulator", "rank 1: model"};
      expect_error<MismatchError>([&] { checkpoints.save(2); }, texts);
      expect_error<MismatchError>([&] { checkpoints.load_latest(); }, texts);
    }
    Checkpointer checkpoints(folder.path(), world);
    if (rank == 1) checkpoints.add(*run.ddp);
    expect_error<MismatchError>([&] { checkpoints.save(2); },
                                {"rank 0: 0 wrapped models", "rank 1: 1 wrapped models"});
  };
  EXPECT_TRUE(all_passed(run_ranks(2, body, {.variables = folder.variables()})));
}

TEST(Checkpoint, TakesTheNewestThatIsWholeAndSaysWhatItSkipped) {
  const TempFolder folder;
  const auto body = [&](int rank) {
    const World world = World::join();
    Training run(world);
    Checkpointer checkpoints(folder.path(), world, {.keep_last = 0});
    run.add_to(checkpoints);
    for (int step = 1; step <= 4; ++step) {
      run.step();
      checkpoints.save(step);
    }
    if (rank == 0) {
      fs::resize_file(folder.path() + "/3-step-4/tensors-1-of-2.safetensors", 100);
      std::ofstream(folder.path() + "/2-step-3/state.json", std::ios::app) << " ";
      fs::create_directory(folder.path() + "/9-step-9");
    }
    world.barrier();
    const Loaded loaded = checkpoints.load_latest();
    EXPECT_EQ(loaded.step, 2);
    ASSERT_EQ(loaded.skipped.size(), 3U);
    EXPECT_NE(loaded.skipped[0].find("9-step-9 has no manifest.json"), std::string::npos);
    EXPECT_NE(loaded.skipped[1].find("has 100 bytes instead of"), std::string::npos);
    EXPECT_NE(loaded.skipped[2].find("state.json has"), std::string::npos);
    expect_error<UsageError>([&] { checkpoints.load(folder.path() + "/3-step-4"); },
                             {"is not whole: tensors-1-of-2.safetensors has 100 bytes"});
    expect_error<UsageError>([&] { checkpoints.load(folder.path() + "/nothing"); },
                             {"has no manifest.json"});
    EXPECT_EQ(checkpoints.load(folder.path() + "/0-step-1").step, 1);
    checkpoints.save(2);  // newer than those with larger steps
    EXPECT_EQ(checkpoints.load_latest().path, folder.path() + "/4-step-2");
    world.barrier();
    if (rank == 0) {
      for (const std::string& name : checkpoints_in(folder.path())) {
        fs::remove(folder.path() + "/" + name + "/state.json");
      }
    }
    world.barrier();
    expect_error<UsageError>([&] { checkpoints.load_latest(); },
                             {"None of the checkpoints is whole", "0-step-1", "4-step-2"});
  };
  EXPECT_TRUE(all_passed(run_ranks(2, body, {.variables = folder.variables()})));
}

TEST(Checkpoint, ListsAllThatDoesNotFitAndChangesNothing) {
  const TempFolder folder;
  const World world = World::join();
  {
    Training run(world);
    run.step();
    Checkpointer checkpoints(folder.path(), world);
    run.add_to(checkpoints);
    checkpoints.save(1);
  }
  struct OtherImpl : torch::nn::Module {
    OtherImpl() {
      first = register_module("first", torch::nn::Linear(4, 16));
      extra = register_module("extra", torch::nn::Linear(2, 2));
      last = register_module("last", torch::nn::Linear(16, 3));
    }
    torch::nn::Linear first{nullptr}, extra{nullptr}, last{nullptr};
  };
  const auto other = std::make_shared<OtherImpl>();
  const at::Tensor before = other->first->weight.detach().clone();
  std::string note;
  Checkpointer checkpoints(folder.path(), world);
  checkpoints.add(std::static_pointer_cast<torch::nn::Module>(other));
  checkpoints.add(
      "note", [] { return std::string("x"); }, [&](const std::string& text) { note = text; });
  expect_error<UsageError>(
      [&] { checkpoints.load_latest(); },
      {"missing: note", "unexpected: optimizer", "unexpected: sampler",
       "missing: model.extra.weight F32 [2, 2]", "unexpected: model.norm.weight F32 [16]",
       "model.last.weight: F32 [2, 16] in the file, F32 [3, 16] here", "nothing was changed"});
  EXPECT_TRUE(at::equal(before, other->first->weight));
  const Loaded loaded = checkpoints.load_latest({.strict = false});
  EXPECT_EQ(loaded.step, 1);
  EXPECT_GT(loaded.differences.size(), 5U);
  EXPECT_FALSE(at::equal(before, other->first->weight));

  torch::optim::LBFGS unknown(other->parameters());
  EXPECT_THROW(checkpoints.add(unknown), UsageError);
  EXPECT_THROW(checkpoints.add(
                   "note", [] { return ""; }, [](const std::string&) {}),
               UsageError);
  EXPECT_THROW(Checkpointer(folder.path(), world), UsageError) << "the folder is in use";
  EXPECT_THROW(Checkpointer("/proc/nowhere", world), SystemError);
  EXPECT_THROW(Checkpointer(folder.path() + "/x", world, {.keep_last = -1}), UsageError);
}

TEST(Checkpoint, AnOptimizerOfAnotherKindOrShapeIsNamed) {
  const TempFolder folder;
  const World world = World::join();
  const auto load_with = [&](const std::string& optimizer) {
    Training run(world, optimizer);
    Checkpointer checkpoints(folder.path(), world);
    run.add_to(checkpoints);
    checkpoints.load_latest();
  };
  {
    Training run(world);
    run.step();
    Checkpointer checkpoints(folder.path(), world);
    run.add_to(checkpoints);
    checkpoints.save(1);
  }
  expect_error<UsageError>([&] { load_with("SGD"); }, {"optimizer: AdamW in the file, SGD here"});
  load_with("AdamW");
}

// A head with more classes: what fits is loaded, and the optimizer has no state for the rest.
TEST(Checkpoint, StatesOfAnotherShapeAreLeftOut) {
  const TempFolder folder;
  const World world = World::join();
  const auto train = [](torch::nn::Linear& model, optim::AdamW& optimizer) {
    optimizer.zero_grad();
    model(at::ones({2, model->options.in_features()})).sum().backward();
    optimizer.step();
  };
  {
    torch::nn::Linear small(8, 2);
    optim::AdamW optimizer(small->parameters(), torch::optim::AdamWOptions(0.1));
    train(small, optimizer);
    Checkpointer checkpoints(folder.path(), world);
    checkpoints.add(small).add(optimizer);
    checkpoints.save(1);
  }
  torch::nn::Linear large(8, 4000);
  optim::AdamW optimizer(large->parameters(), torch::optim::AdamWOptions(0.2));
  Checkpointer checkpoints(folder.path(), world);
  checkpoints.add(large).add(optimizer);
  expect_error<UsageError>([&] { checkpoints.load_latest(); },
                           {"optimizer.0: a state of another shape", "model.weight: F32 [2, 8]"});
  checkpoints.load_latest({.strict = false});
  EXPECT_TRUE(optimizer.state().empty());
  train(large, optimizer);
}

TEST(Checkpoint, WhatCouldNotBeLoadedIsNotSaved) {
  const TempFolder folder;
  const World world = World::join();
  Checkpointer checkpoints(folder.path(), world);
  checkpoints.add({{"b.c", at::ones({2})}}, "a").add({{"c", at::ones({3})}}, "a.b");
  expect_error<UsageError>([&] { checkpoints.save(1); }, {"Two tensors have the name 'a.b.c'"});
  EXPECT_THROW(save_tensors(folder.path() + "/x", {{"w", at::ones({1})}, {"w", at::ones({1})}}),
               UsageError);
  Checkpointer bytes(folder.path() + "/bytes", world);
  bytes.add(
      "note", [] { return std::string("\xff"); }, [](const std::string&) {});
  expect_error<UsageError>([&] { bytes.save(1); }, {"The text of 'note' is not UTF-8"});
  Checkpointer large(folder.path() + "/large", world);
  // One that is too large by itself, or two together, which take longer to write down.
  for (const std::string name : {"first", "second"}) {
    large.add(
        name, [] { return std::string(soak(300, 200) << 20, 'x'); }, [](const std::string&) {});
  }
  expect_error<UsageError>([&] { large.save(1); }, {"What is not a tensor makes"});
  EXPECT_TRUE(checkpoints_in(folder.path() + "/large").empty());
}

TEST(Checkpoint, WhatFailsOnOneRankFailsOnAll) {
  const TempFolder folder;
  const auto body = [&](int rank) {
    const World world = World::join({.timeout = std::chrono::minutes(5)});
    Checkpointer checkpoints(folder.path(), world);
    bool is_bad = true;
    checkpoints.add(
        "note",
        [&]() -> std::string {
          if (rank == 1 && is_bad) throw std::runtime_error("no note today");
          return "a note";
        },
        [](const std::string&) {});
    expect_error<SystemError>([&] { checkpoints.save(1); }, {"no note today"});
    expect_error<SystemError>([&] { checkpoints.save_async(1); }, {"no note today"});
    is_bad = false;
    checkpoints.save(1);
    EXPECT_EQ(checkpoints.load_latest().step, 1);
  };
  EXPECT_TRUE(all_passed(run_ranks(2, body, {.variables = folder.variables()})));
  for (const auto& entry : fs::directory_iterator(folder.path())) {
    EXPECT_FALSE(entry.path().filename().string().starts_with(".unfinished")) << entry.path();
  }
}

TEST(Checkpoint, SignalsAreTheProgramsAgainAfterwards) {
  const TempFolder folder;
  const World world = World::join();
  static int times = 0;
  std::signal(SIGUSR1, [](int) { ++times; });
  {
    torch::nn::Linear model(2, 2);
    Checkpointer checkpoints(folder.path(), world);
    checkpoints.on_signal(SIGUSR1);
    DistributedDataParallel ddp(model, world);
    checkpoints.add(ddp);  // after on_signal()
    EXPECT_FALSE(checkpoints.must_stop());
    std::raise(SIGUSR1);
    EXPECT_TRUE(checkpoints.must_stop());
    EXPECT_THROW(checkpoints.on_signal(SIGKILL), UsageError);
    EXPECT_THROW(checkpoints.on_signal(1000), UsageError);
  }
  std::raise(SIGUSR1);
  EXPECT_EQ(times, 1);
  Checkpointer checkpoints(folder.path(), world);
  checkpoints.on_signal(SIGUSR1);
  EXPECT_FALSE(checkpoints.must_stop());
}

// Ranks that are out of data hear of it, too.
TEST(Checkpoint, ASignalReachesRanksInJoin) {
  const TempFolder folder;
  const auto body = [&](int rank) {
    const World world = World::join({.timeout = std::chrono::seconds(20)});
    torch::nn::Linear model(2, 2);
    DistributedDataParallel ddp(model, world);
    torch::optim::SGD optimizer(model->parameters(), 0.1);
    Checkpointer checkpoints(folder.path(), world);
    checkpoints.add(model).add(optimizer).add(ddp);
    checkpoints.on_signal(SIGUSR1);
    int steps = 0;
    const auto step = [&] {
      optimizer.step();
      ++steps;
    };
    if (rank == 0) {
      ddp.join(step);
    } else {
      while (!checkpoints.must_stop()) {
        if (steps == 3) std::raise(SIGUSR1);
        optimizer.zero_grad();
        model(at::ones({1, 2})).sum().backward();
        step();
      }
    }
    EXPECT_TRUE(checkpoints.must_stop());
    EXPECT_EQ(steps, 4);
    checkpoints.save(steps);
    ddp.check_replicas();
  };
  EXPECT_TRUE(all_passed(run_ranks(2, body, {.variables = folder.variables()})));
}

TEST(Checkpoint, KeepsTheLastAndEveryMth) {
  const TempFolder folder;
  const World world = World::join();
  Training run(world);
  Checkpointer checkpoints(folder.path(), world, {.keep_last = 2, .keep_every = 3});
  run.add_to(checkpoints);
  for (int step = 0; step < 8; ++step) {
    step % 2 == 0 ? checkpoints.save(step) : checkpoints.save_async(step);
  }
  checkpoints.wait();
  EXPECT_EQ(checkpoints_in(folder.path()),
            (std::vector<std::string>{"0-step-0", "3-step-3", "6-step-6", "7-step-7"}));
}

TEST(Weights, EveryTypeAndLayoutComesBack) {
  const TempFolder folder;
  const std::string path = folder.path() + "/all.safetensors";
  std::vector<NamedTensor> tensors;
  for (const at::ScalarType type :
       {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16, at::kLong, at::kInt, at::kShort,
        at::kChar, at::kByte, at::kBool, at::kComplexFloat, at::kComplexDouble, at::kUInt16,
        at::kUInt32, at::kUInt64, at::kFloat8_e4m3fn, at::kFloat8_e5m2}) {
    tensors.push_back({c10::toString(type), at::arange(12).reshape({3, 4}).to(type)});
  }
  tensors.push_back({"transposed", at::arange(6).reshape({2, 3}).t()});
  tensors.push_back({"scalar", at::scalar_tensor(2.5)});
  tensors.push_back({"empty", at::empty({0, 3})});
  tensors.push_back(
      {"channels", at::randn({2, 3, 4, 5}).contiguous(at::MemoryFormat::ChannelsLast)});
  tensors.push_back({"large", at::randn({300, 200, 100}).transpose(0, 2)});  // beyond the buffer
  save_tensors(path, tensors);
  const auto loaded = load_tensors(path);
  ASSERT_EQ(loaded.size(), tensors.size());
  for (const NamedTensor& one : tensors) {
    const auto found = std::ranges::find(loaded, one.name, &NamedTensor::name);
    ASSERT_NE(found, loaded.end());
    at::Tensor tensor = one.tensor.contiguous();
    if (tensor.scalar_type() == at::kComplexDouble) tensor = at::view_as_real(tensor);
    EXPECT_EQ(found->tensor.scalar_type(), tensor.scalar_type()) << one.name;
    EXPECT_EQ(found->tensor.sizes(), tensor.sizes()) << one.name;
    if (tensor.numel() == 0) continue;
    EXPECT_EQ(std::memcmp(found->tensor.const_data_ptr(), tensor.const_data_ptr(), tensor.nbytes()),
              0)
        << one.name;
  }
  EXPECT_THROW(save_tensors("/proc/x.safetensors", tensors), SystemError);
  EXPECT_THROW(save_tensors(path, {{"q", at::empty({2}, at::kComplexHalf)}}), UsageError);
  EXPECT_THROW(load_tensors(folder.path()), UsageError);
  EXPECT_THROW(load_tensors(folder.path() + "/none"), SystemError);
  std::ofstream(folder.path() + "/foreign") << "not such a file at all";
  EXPECT_THROW(load_tensors(folder.path() + "/foreign"), UsageError);
  EXPECT_EQ(checkpoints_in(folder.path()).size(), 2U) << "nothing half-written stays";
}

// Such tensors have no version counter, and the mode that they were made in has ended.
TEST(Weights, AreLoadedIntoInferenceTensors) {
  const TempFolder folder;
  const std::string path = folder.path() + "/w.safetensors";
  const torch::nn::Linear model(3, 2);
  save_weights(path, *model);
  torch::nn::Linear wide(3, 2);
  wide->to(at::kDouble);
  save_weights(path + ".wide", *wide);
  torch::nn::Linear served(nullptr);
  {
    const c10::InferenceMode mode;
    served = torch::nn::Linear(3, 2);
  }
  ASSERT_TRUE(served->weight.is_inference());
  load_weights(path, *served);
  EXPECT_TRUE(at::equal(served->weight, model->weight));
  load_weights(path + ".wide", *served, {.strict = false});
  EXPECT_TRUE(at::equal(served->weight, wide->weight.to(at::kFloat)));
}

TEST(Weights, NamesAreThoseOfTheModelAndOthersAreListed) {
  const TempFolder folder;
  const std::string path = folder.path() + "/w.safetensors";
  const DropNet model;
  save_weights(path, *model);
  std::set<std::string> names;
  for (const NamedTensor& one : load_tensors(path)) names.insert(one.name);
  EXPECT_EQ(names, (std::set<std::string>{"first.weight", "first.bias", "last.weight", "last.bias",
                                          "norm.weight", "norm.bias", "norm.running_mean",
                                          "norm.running_var", "norm.num_batches_tracked"}));
  torch::nn::Sequential other(torch::nn::Linear(4, 16));
  expect_error<UsageError>([&] { load_weights(path, *other); },
                           {"missing: 0.weight F32 [16, 4]", "unexpected: first.bias F32 [16]"});
  DropNet half;
  half->to(at::kBFloat16);
  expect_error<UsageError>([&] { load_weights(path, *half); }, {"F32 [16, 4] in the file, BF16"});
  load_weights(path, *half, {.strict = false});
  EXPECT_TRUE(at::allclose(half->first->weight.to(at::kFloat), model->first->weight, 0.01, 0.01));
}

}  // namespace
}  // namespace lockstep::test
