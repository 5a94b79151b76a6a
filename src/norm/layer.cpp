#include "norm/layer.h"

#include <ATen/ATen.h>
#include <lockstep/error.h>

#include "base/text.h"

namespace lockstep {
namespace {

constexpr const char* kAdvice =
    "LibTorch refuses a batch with a single value for each channel on the rank that has it.\n"
    "Give every rank two rows or more, such as by drop_last, and the same number of batches.";

// How long a rank that gives up waits for the others, which may be elsewhere.
constexpr auto kPatience = std::chrono::seconds(2);

}  // namespace

Layer::Layer(std::shared_ptr<World> world, const std::shared_ptr<torch::nn::Module>& module,
             Names names, std::int64_t num_channels, at::Tensor num_batches)
    : world_(std::move(world)),
      module_(module),
      names_(std::move(names)),
      index_(names_->size() - 1),
      num_channels_(num_channels),
      num_batches_(std::move(num_batches)),
      num_batches_then_(num_batches_.defined() ? num_batches_.item<std::int64_t>() : 0) {}

bool Layer::is_training() const {
  const auto module = module_.lock();
  return module && module->is_training();
}

// Since the last one that came here. LibTorch counts a call before it refuses it.
std::int64_t Layer::num_calls() const {
  return num_batches_.defined() ? num_batches_.item<std::int64_t>() - num_batches_then_ : 1;
}

at::Tensor Layer::tell(double count, std::int64_t num_channels, const at::TensorOptions& options) {
  at::Tensor mine = at::zeros({kNumTold + 2 * num_channels}, options.dtype(at::kDouble));
  const std::int64_t calls = num_calls();
  mine[kCount] = count;
  mine[kIndex] = static_cast<std::int64_t>(index_);
  mine[kCalls] = calls;
  num_batches_then_ += calls;
  return mine;
}

void Layer::check(const at::Tensor& all) const {
  const at::Tensor numbers = all.narrow(1, 0, kNumTold).cpu();
  const auto told = [table = numbers.accessor<double, 2>()](int rank, Told what) {
    return static_cast<std::int64_t>(table[rank][what]);
  };
  const auto name = [&](int rank) {
    return (*names_)[static_cast<std::size_t>(told(rank, kIndex))];
  };
  const auto refuse = [&](int rank, const std::string& what) {
    throw UsageError({.rank = world_->rank(), .peer = rank, .operation = "SyncBatchNorm"},
                     text::format("{}\n{}", what, kAdvice));
  };
  for (int rank = 0; rank < world_->size(); ++rank) {
    if (told(rank, kCount) < 0) {
      refuse(rank, text::format("Rank {} could not call the layer {}.", rank, name(rank)));
    }
    if (told(rank, kIndex) != told(0, kIndex)) {
      refuse(rank, text::format("Rank 0 calls the layer {}, but rank {} calls {}.", name(0), rank,
                                name(rank)));
    }
    if (told(rank, kCalls) != told(0, kCalls)) {
      refuse(rank, text::format("The layer {} was called {} times on rank 0, but {} times on rank "
                                "{}, since the last time that all did.",
                                name(0), told(0, kCalls), told(rank, kCalls), rank));
    }
  }
}

void Layer::give_up() noexcept {
  try {
    if (!num_batches_.defined() || num_calls() != 1) return;
    at::Tensor mine = tell(-1, num_channels_, num_batches_.options());
    at::Tensor all = at::empty({world_->size() * mine.numel()}, mine.options());
    world_->backend()->_allgather_base(all, mine)->wait(kPatience);
  } catch (const std::exception&) {  // NOLINT: they are gone, or wait elsewhere
  }
}

}  // namespace lockstep
