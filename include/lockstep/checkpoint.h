// Checkpoints: a run that stops, for whatever reason, goes on as if it never had.
//
//   lockstep::Checkpointer checkpoints("runs/a", world);
//   checkpoints.add(model).add(optimizer).add(schedule).add(loader).add(ddp);
//   checkpoints.on_signal(SIGTERM);
//   std::int64_t step = checkpoints.load_latest().step;     // 0 if there is none
//   ...
//     optimizer.step();
//     if (++step % 1000 == 0) checkpoints.save_async(step);
//     if (checkpoints.must_stop()) {
//       checkpoints.save(step);
//       return lockstep::kExitPreempted;
//     }
//
// Tensors are kept in safetensors files, the rest as JSON; a manifest with checksums makes a
// checkpoint whole. It appears by one rename, so what is interrupted leaves the older ones alone.
// States of all ranks' random generators are part of it. All calls that save or load are
// collective: every rank makes them, at the same step. Objects that were added must outlive the
// Checkpointer, and stay where they are. Tensors are the same on all ranks, as
// DistributedDataParallel keeps them, and are compared before they are written: ranks share the
// work. Of a module's buffers that differ rank 0's are saved.
#pragma once

#include <ATen/core/Tensor.h>
#include <lockstep/ddp.h>
#include <lockstep/error.h>
#include <lockstep/export.h>
#include <lockstep/sampler.h>
#include <lockstep/world.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace torch::optim {
class Optimizer;
}

namespace lockstep {

class GradScaler;
class HierarchicalAverager;
class LoaderBase;
class PeriodicAverager;
class WeightAverage;
namespace optim {
class Schedule;
}

enum class Writers {
  kEachRank,    // each writes a part, all at once
  kOnePerHost,  // one writes all; one in the whole world if all hosts see the same folder
};

struct CheckpointOptions {
  int keep_last = 3;   // checkpoints that stay; 0: all
  int keep_every = 0;  // also keep every n-th checkpoint for ever; 0: none
  Writers writers = Writers::kEachRank;
};

struct LoadOptions {
  // Names that are missing, not expected, or of another shape or type are an error that lists them
  // all. If false, what fits is loaded, also from another type, and the result lists the rest.
  bool strict = true;
};

struct Loaded {
  std::int64_t step = 0;
  std::string path = {};                      // of the checkpoint; empty: there was none
  std::vector<std::string> skipped = {};      // newer ones that are not whole, each with the reason
  std::vector<std::string> differences = {};  // in names, shapes and types, if not strict
};

class LOCKSTEP_API Checkpointer {
 public:
  // Makes the folder if it is not there, and removes what earlier runs have left unfinished.
  // Throws: UsageError if another run writes there, SystemError if this user may not.
  Checkpointer(const std::string& folder, World world, const CheckpointOptions& options = {});
  ~Checkpointer();  // waits for what is being saved
  Checkpointer(Checkpointer&&) noexcept;
  Checkpointer& operator=(Checkpointer&&) noexcept;

  // What is saved and loaded, and must be there when that happens. Give names where there are two
  // of a kind.
  Checkpointer& add(std::shared_ptr<torch::nn::Module> model, const std::string& name = "model");
  template <typename Contained>
  Checkpointer& add(const torch::nn::ModuleHolder<Contained>& model,
                    const std::string& name = "model") {
    return add(std::shared_ptr<torch::nn::Module>(model.ptr()), name);
  }
  Checkpointer& add(const std::vector<NamedTensor>& tensors, const std::string& name = "model");
  // AdamW, Adam, SGD, RMSprop and Adagrad, lockstep's or LibTorch's.
  Checkpointer& add(torch::optim::Optimizer& optimizer, const std::string& name = "optimizer");
  Checkpointer& add(optim::Schedule& schedule, const std::string& name = "schedule");
  Checkpointer& add(GradScaler& scaler, const std::string& name = "scaler");
  Checkpointer& add(WeightAverage& average, const std::string& name = "average");
  Checkpointer& add(PeriodicAverager& averager, const std::string& name = "averager");
  Checkpointer& add(HierarchicalAverager& averager, const std::string& name = "averager");
  // A sampler alone. Under a data loader that draws ahead, `used` says how many samples of this
  // epoch this rank has really used since the last reset; lockstep::Loader knows that by itself.
  Checkpointer& add(DistributedSampler& sampler, const std::string& name = "sampler",
                    std::function<std::size_t()> used = {});
  // A Loader, or a BasicLoader of any type.
  Checkpointer& add(LoaderBase& loader, const std::string& name = "sampler");
  // Anything else, as a text. Rank 0's is saved, all ranks load it.
  Checkpointer& add(const std::string& name, std::function<std::string()> save,
                    std::function<void(const std::string&)> load);
  // What each rank has of its own, as bytes: a simulator, its generator. All ranks' are saved, and
  // each loads its own. In a world of another size `load_others` gets all of them, in the order of
  // ranks, on every rank; without it that is an error (or left out, if not strict). All ranks'
  // together may be 256 MiB, each its share of that.
  Checkpointer& add_per_rank(
      const std::string& name, std::function<std::string()> save,
      std::function<void(const std::string& mine)> load,
      std::function<void(const std::vector<std::string>& all)> load_others = {});
  // Each wrapped model: what its comm hook keeps is saved (PowerSGD, top-k), saving in the middle
  // of an accumulation is refused, and on_signal() needs it.
  Checkpointer& add(DistributedDataParallel& ddp);

  // Returns when the checkpoint is on the disk. Throws on all ranks: SystemError (a rank could not
  // write; older checkpoints are as they were), MismatchError (ranks are at different steps, have
  // added different things, or have different parameters or optimizer states), what collectives
  // throw.
  void save(std::int64_t step);
  // Returns when ranks have compared their tensors and a copy is made; it is written while training
  // goes on. What goes wrong then is thrown by the next call of save(), save_async() or wait().
  void save_async(std::int64_t step);
  void wait();

  // The newest checkpoint that is whole. Throws: UsageError if there are some and none is whole, or
  // as LoadOptions says.
  Loaded load_latest(const LoadOptions& options = {});
  Loaded load(const std::string& path, const LoadOptions& options = {});

  // When this process gets the signal, must_stop() becomes true on all ranks, at the same step: the
  // wish travels with the gradients. Requires: add(ddp), or a world of one.
  void on_signal(int signal);
  bool must_stop() const;

 private:
  friend class Elastic;
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// A model's parameters and buffers as one .safetensors file, with the names that Python's
// state_dict() has. Not collective: call it on one rank. The file appears when it is whole.
LOCKSTEP_API void save_weights(const std::string& path, const torch::nn::Module& model);
// Into a model of this rank's own; not collective. Where the ranks of a host share it
// (DdpOptions::shard), one of them reads for all: all ranks of the host call it.
LOCKSTEP_API Loaded load_weights(const std::string& path, torch::nn::Module& model,
                                 const LoadOptions& options = {});
LOCKSTEP_API void save_tensors(const std::string& path, const std::vector<NamedTensor>& tensors);
LOCKSTEP_API std::vector<NamedTensor> load_tensors(const std::string& path);

}  // namespace lockstep
