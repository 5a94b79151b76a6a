// Data over ranks: what concerns all is said by all, and loaders of any type are checkpointed.

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <lockstep/checkpoint.h>
#include <lockstep/data.h>
#include <lockstep/ddp.h>
#include <torch/nn.h>
#include <torch/optim.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>
#include <fstream>

#include "support/has.h"
#include "support/run_ranks.h"

namespace lockstep::test {
namespace {

namespace fs = std::filesystem;
using Texts = std::vector<std::string>;

class Data : public testing::Test {
 protected:
  Data() {
    std::string name = testing::TempDir() + "lockstep-ranks-XXXXXX";
    folder_ = ::mkdtemp(name.data());
    for (int shard = 0; shard < 4; ++shard) {
      paths_.push_back(folder_ + "/part" + std::to_string(shard));
      std::ofstream file(paths_.back());
      for (int line = 0; line < 10; ++line) file << shard << "." << line << "\n";
    }
  }
  ~Data() override { fs::remove_all(folder_); }

  void write_uneven() const {
    const std::vector<int> sizes = {7, 2, 9, 1};
    for (std::size_t shard = 0; shard < 4; ++shard) {
      std::ofstream file(paths_[shard]);
      for (int line = 0; line < sizes[shard]; ++line) file << shard << "." << line << "\n";
    }
  }
  BasicLoader<Texts> shard_loader(const World& world, std::size_t shuffle) const {
    return {std::make_shared<RecordFiles>(paths_, world),
            StreamSampler(world, {.by = ShardBy::kShard, .shuffle = shuffle}),
            [](Texts records) { return records; },
            {.batch_size = 2}};
  }

  std::string folder_;
  Texts paths_;
};

TEST_F(Data, AFileThatIsMissingOnOneRankIsAnErrorOnAll) {
  EXPECT_TRUE(all_passed(run_ranks(3, [&](int rank) {
    const World world = World::join();
    Texts paths = paths_;
    if (rank == 1) paths[2] = folder_ + "/none";
    try {
      const RecordFiles files(paths, world);
      ADD_FAILURE() << "a missing file was not noticed";
    } catch (const SystemError& error) {
      EXPECT_TRUE(has(error.what(), folder_ + "/none")) << error.what();
      EXPECT_TRUE(rank == 1 || has(error.what(), "rank 1")) << error.what();
    }
    EXPECT_EQ(RecordFiles(paths_, world).num_shards(), 4U);  // all ranks can go on
  })));
}

TEST_F(Data, FilesThatDifferBetweenRanksAreAnErrorOnAll) {
  EXPECT_TRUE(all_passed(run_ranks(2, [&](int rank) {
    const World world = World::join({.timeout = std::chrono::seconds(20)});
    const auto message = [&](const Texts& paths, RecordFormat format) -> std::string {
      try {
        const RecordFiles files(paths, world, format);
      } catch (const MismatchError& error) {
        return error.what();
      }
      return "nothing";
    };
    Texts paths = paths_;
    if (rank == 1) std::swap(paths[1], paths[2]);
    const std::string order = message(paths, RecordFormat::kLines);
    EXPECT_TRUE(has(order, "rank 0: part1") && has(order, "rank 1: part2")) << order;
    paths = paths_;
    if (rank == 0) paths.pop_back();
    const std::string number = message(paths, RecordFormat::kLines);
    EXPECT_TRUE(has(number, "rank 0: 3 files") && has(number, "rank 1: 4 files")) << number;
    const auto format = rank == 0 ? RecordFormat::kLines : RecordFormat::kSized;
    EXPECT_TRUE(has(message(paths_, format), "rank 1: 4 files of sizes"));
    // Folders are a host's own.
    paths = paths_;
    if (rank == 1) {
      fs::create_directory(folder_ + "/copy");
      for (std::string& path : paths) {
        const std::string copy = folder_ + "/copy/" + fs::path(path).filename().string();
        fs::copy_file(path, copy);
        path = copy;
      }
    }
    EXPECT_EQ(message(paths, RecordFormat::kLines), "nothing");
  })));
}

TEST_F(Data, LoadersOfAnyTypeGoOnFromACheckpoint) {
  EXPECT_TRUE(all_passed(run_ranks(2, [&](int) {
    const World world = World::join();
    const auto as_is = [](Texts records) { return records; };
    const auto files = std::make_shared<RecordFiles>(paths_, world);
    const auto make = [&](ShardBy by) {
      return BasicLoader<Texts>(files, StreamSampler(world, {.by = by, .shuffle = 9}), as_is,
                                {.batch_size = 3});
    };
    auto by_record = make(ShardBy::kRecord);
    auto by_shard = make(ShardBy::kShard);
    for (int i = 0; i < 9; ++i) {  // into the second epoch
      by_record.next();
      by_shard.next();
    }
    Checkpointer checkpoints(folder_ + "/run", world);
    checkpoints.add(by_record, "record").add(by_shard, "shard");
    checkpoints.save(1);
    std::vector<std::optional<Texts>> expected;
    for (int i = 0; i < 5; ++i) {
      expected.push_back(by_record.next());
      expected.push_back(by_shard.next());
    }
    EXPECT_EQ(checkpoints.load_latest().step, 1);
    std::vector<std::optional<Texts>> got;
    for (int i = 0; i < 5; ++i) {
      got.push_back(by_record.next());
      got.push_back(by_shard.next());
    }
    EXPECT_EQ(got, expected);
    EXPECT_EQ(by_shard.state().num_ranks, 2);
  })));
}

// Ranks are at different places of their epochs, and one that is out of data waits for the others.
TEST_F(Data, RanksWithShardsOfDifferentSizesGoOnFromAnyCheckpoint) {
  write_uneven();
  const std::string run = folder_ + "/run";
  const auto make = [&](const World& world) { return shard_loader(world, 3); };
  const auto path_of = [&](int step) {
    return run + "/" + std::to_string(step) + "-step-" + std::to_string(step);
  };
  constexpr int kSteps = 24;
  EXPECT_TRUE(all_passed(run_ranks(2, [&](int) {
    const World world = World::join({.timeout = std::chrono::seconds(20)});
    auto loader = make(world);
    bool is_out = false;
    // As with ddp.join(): nobody begins an epoch before all have ended theirs.
    const auto step = [&] {
      Texts got;
      if (!is_out) {
        if (const auto batch = loader.next()) {
          got = *batch;
        } else {
          is_out = true;
        }
      }
      if (world.sum(is_out ? 1.0 : 0.0) == world.size()) is_out = false;
      return got;
    };
    Checkpointer checkpoints(run, world, {.keep_last = 0});
    checkpoints.add(loader, "loader");
    std::vector<Texts> whole;
    for (int i = 0; i < kSteps; ++i) {
      checkpoints.save(i);
      whole.push_back(step());
    }
    EXPECT_GE(loader.state().epoch, 2);
    for (int from = 0; from < kSteps; ++from) {
      EXPECT_EQ(checkpoints.load(path_of(from)).step, from);
      is_out = false;
      for (int i = from; i < kSteps; ++i) {
        EXPECT_EQ(step(), whole[static_cast<std::size_t>(i)]) << from << " " << i;
      }
    }
  })));
  int apart = -1;
  int num_apart = 0;
  for (int step = 0; step < kSteps; ++step) {
    std::ifstream file(path_of(step) + "/state.json");
    const std::string state((std::istreambuf_iterator<char>(file)), {});
    if (!has(state, "\"ranks\"")) continue;
    apart = step;
    ++num_apart;
  }
  ASSERT_GE(num_apart, 5);
  EXPECT_LT(num_apart, kSteps - 3) << "between epochs there is one place for any number of ranks";
  EXPECT_TRUE(all_passed(run_ranks(3, [&](int) {
    const World world = World::join({.timeout = std::chrono::seconds(20)});
    auto loader = make(world);
    Checkpointer checkpoints(folder_ + "/other", world);
    checkpoints.add(loader, "loader");
    try {
      checkpoints.load(path_of(apart));
      ADD_FAILURE() << "places of two ranks were given to three";
    } catch (const UsageError& error) {
      EXPECT_TRUE(has(error.what(), "loader: saved by 2 ranks, which were at different places"))
          << error.what();
    }
  })));
}

// Also if all ranks were at the same place: what fits is loaded if that is asked for.
TEST_F(Data, AStateThatDoesNotFitIsLeftOutIfNotStrict) {
  EXPECT_TRUE(all_passed(run_ranks(2, [&](int) {
    const World world = World::join({.timeout = std::chrono::seconds(20)});
    auto loader = shard_loader(world, 3);
    loader.next();
    Checkpointer checkpoints(folder_ + "/run", world);
    checkpoints.add(loader, "loader").add({{"w", at::ones({2})}});
    checkpoints.save(1);
  })));
  EXPECT_TRUE(all_passed(run_ranks(3, [&](int) {
    const World world = World::join({.timeout = std::chrono::seconds(20)});
    const auto check = [&](LoaderBase& loader, const std::string& what) {
      const at::Tensor weight = at::zeros({2});
      Checkpointer checkpoints(folder_ + "/other", world);
      checkpoints.add(loader, "loader").add({{"w", weight}});
      const std::string path = folder_ + "/run/0-step-1";
      EXPECT_THROW(checkpoints.load(path), UsageError);
      EXPECT_EQ(weight.sum().item<double>(), 0);
      const SamplerState before = loader.state();
      const auto loaded = checkpoints.load(path, {.strict = false});
      ASSERT_EQ(loaded.differences.size(), 1U);
      EXPECT_TRUE(has(loaded.differences[0], "loader: ") && has(loaded.differences[0], what))
          << loaded.differences[0];
      EXPECT_EQ(weight.sum().item<double>(), 2);
      EXPECT_EQ(loader.state(), before);
    };
    auto of_three = shard_loader(world, 3);
    check(of_three, "reads each shard on one of 2 ranks, this loader reads each shard on one of 3");
    const auto data = std::make_shared<TensorDataset>(at::ones({60, 1}), at::ones({60}));
    Loader samples(data, DistributedSampler(60, world), {.batch_size = 2});
    check(samples, "a loader which reads shards in order");
  })));
}

// Rank 1 has 3 records of 19, and is in join() when rank 0 is told to stop.
TEST_F(Data, AStopWhileARankIsOutOfDataGoesOnExactly) {
  write_uneven();
  EXPECT_TRUE(all_passed(run_ranks(2, [&](int rank) {
    const World world = World::join({.timeout = std::chrono::seconds(20)});
    const auto train = [&](const std::string& run, int stop_at) {
      torch::nn::Linear model(1, 1);
      torch::nn::init::constant_(model->weight, 0.5);
      torch::nn::init::constant_(model->bias, 0.1);
      DistributedDataParallel ddp(model, world);
      torch::optim::SGD optimizer(model->parameters(),
                                  torch::optim::SGDOptions(0.01).momentum(0.9));
      auto loader = shard_loader(world, 0);
      Checkpointer checkpoints(folder_ + run, world);
      checkpoints.add(model).add(optimizer).add(loader).add(ddp);
      checkpoints.on_signal(SIGUSR1);
      auto steps = checkpoints.load_latest().step;
      const auto step = [&] {
        optimizer.step();
        ++steps;
      };
      while (loader.state().epoch < 3 && !checkpoints.must_stop()) {
        for (const Texts& batch : loader) {
          if (rank == 0 && steps == stop_at) std::raise(SIGUSR1);
          std::vector<double> numbers;
          for (const std::string& one : batch) numbers.push_back(std::stod(one));
          optimizer.zero_grad();
          model(at::tensor(numbers).to(at::kFloat).unsqueeze(1)).pow(2).mean().backward();
          step();
          if (checkpoints.must_stop()) break;
        }
        if (!checkpoints.must_stop()) ddp.join(step);
      }
      if (checkpoints.must_stop()) checkpoints.save(steps);
      EXPECT_EQ(checkpoints.must_stop(), stop_at >= 0);
      return std::pair(model->weight.detach().clone(), steps);
    };
    const auto [whole, num_steps] = train("/whole", -1);
    EXPECT_EQ(num_steps, 3 * 8);
    for (const int stop_at : {3, 12}) {
      const std::string run = "/stopped" + std::to_string(stop_at);
      EXPECT_EQ(train(run, stop_at).second, stop_at + 1);
      const auto [resumed, its_steps] = train(run, -1);
      EXPECT_EQ(its_steps, num_steps);
      EXPECT_TRUE(at::equal(resumed, whole)) << resumed << whole;
    }
  })));
}

}  // namespace
}  // namespace lockstep::test
