// Trainings with checkpoints, for the tests of DdpOptions::shard.
#pragma once

#include <gtest/gtest.h>
#include <lockstep/lockstep.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <set>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "multiprocess/sharded_model.h"

namespace lockstep::test {

inline std::string text_in(const std::filesystem::path& path) {
  std::ostringstream text;
  text << std::ifstream(path, std::ios::binary).rdbuf();
  return text.str();
}

// All of a checkpoint, byte by byte.
inline void expect_same_files(const std::filesystem::path& expected,
                              const std::filesystem::path& found) {
  std::set<std::string> names;
  for (const std::filesystem::path& folder : {expected, found}) {
    for (const auto& entry : std::filesystem::directory_iterator(folder))
      names.insert(entry.path().filename());
  }
  EXPECT_GE(names.size(), 3U);
  names.erase("manifest.json");  // it has the time
  for (const std::string& name : names) {
    EXPECT_TRUE(text_in(expected / name) == text_in(found / name)) << found / name;
  }
}

inline std::vector<at::Tensor> unique(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> all;
  for (const at::Tensor& one : tensors) {
    const auto is_it = [&](const at::Tensor& other) { return other.is_same(one); };
    if (std::ranges::none_of(all, is_it)) all.push_back(one);
  }
  return all;
}

// How a model is changed before it is wrapped, and which optimizer it gets.
struct Recipe {
  std::string name;
  std::function<void(WideNet&)> before = {};
  std::function<std::unique_ptr<torch::optim::Optimizer>(Shard, std::vector<at::Tensor>)> make;
  at::ScalarType type = at::kFloat;
};

template <typename T, typename Options>
auto maker(const Options& options, bool has_masters = false) {
  return [=](Shard shard, std::vector<at::Tensor> parameters) {
    auto made = make_optimizer<T>(shard, unique(parameters), options);
    if (has_masters) dynamic_cast<optim::MasterWeights&>(*made).use_master_weights();
    return made;
  };
}

// Tied parameters have two names, and a frozen one is given to the optimizer, too.
inline void tie_and_freeze(WideNet& model) {
  model->register_module("again", model->wide);
  model->first->bias.set_requires_grad(false);
}

inline std::vector<Recipe> recipes() {
  namespace to = torch::optim;
  return {{.name = "AdamW", .make = maker<optim::AdamW>(to::AdamWOptions(1e-2).amsgrad(true))},
          {.name = "TiedAndFrozen",
           .before = tie_and_freeze,
           .make = maker<to::SGD>(to::SGDOptions(1e-2).momentum(0.9))},
          {.name = "Masters",
           .before = [](WideNet& model) { model->to(at::kBFloat16); },
           .make = maker<optim::AdamW>(to::AdamWOptions(1e-3), true),
           .type = at::kBFloat16}};
}

inline const Recipe& recipe_of(const std::string& name) {
  static const std::vector<Recipe> all = recipes();
  return *std::ranges::find(all, name, &Recipe::name);
}

// A training with its checkpoints.
struct SavedTwin {
  SavedTwin(const World& its_world, Shard shard, const Recipe& its_recipe,
            const std::string& folder)
      : world(its_world),
        recipe(its_recipe),
        twin(
            world, shard,
            [&](std::vector<at::Tensor> parameters) {
              return recipe.make(shard, std::move(parameters));
            },
            {}, recipe.before),
        checkpoints(folder, world) {
    checkpoints.add(twin.model).add(*twin.optimizer).add(*twin.ddp);
  }

  at::Tensor loss(std::int64_t step) {
    const at::Tensor input = batch(world.rank(), static_cast<int>(step)).to(recipe.type);
    return loss_of(twin.model->forward(input, step % 3 != 2));
  }
  void run(std::int64_t from, std::int64_t to) {
    for (std::int64_t step = from; step < to; ++step) {
      twin.optimizer->zero_grad();
      loss(step).backward();
      twin.optimizer->step();
    }
  }
  void expect_same(SavedTwin& other) const {
    const auto expected = other.twin.model->named_parameters();
    for (const auto& one : twin.model->named_parameters()) {
      EXPECT_TRUE(one.value().equal(expected[one.key()]))
          << one.key() << ", " << name_of(twin.mode) << ", " << recipe.name;
    }
  }

  World world;
  Recipe recipe;
  Twin<> twin;
  Checkpointer checkpoints;
};

}  // namespace lockstep::test
