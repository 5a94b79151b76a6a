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
      then_(look()) {}

bool Layer::is_training() const {
  const auto module = module_.lock();
  return module && module->is_training();
}

Layer::Counter Layer::look() const {
  if (!num_batches_.defined() || num_batches_.is_inference()) return {};
  return {num_batches_.item<std::int64_t>(), static_cast<std::int64_t>(num_batches_._version())};
}

// Since the last one that came here. LibTorch counts a call before it refuses it. Others write the
// counter, too, such as with a checkpoint's: calls alone would raise it by one with each write. If
// they have not, it tells nothing.
std::int64_t Layer::num_calls(const Counter& now) const {
  const std::int64_t raised = now.batches - then_.batches;
  return raised > 0 && raised == now.version - then_.version ? raised : 1;
}

at::Tensor Layer::tell(double count, std::int64_t num_channels, const at::TensorOptions& options) {
  at::Tensor mine = at::zeros({kNumTold + 2 * num_channels}, options.dtype(at::kDouble));
  const Counter now = look();
  mine[kCount] = count;
  mine[kIndex] = static_cast<std::int64_t>(index_);
  mine[kCalls] = num_calls(now);
  mine[kBatches] = now.batches;
  then_ = now;
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
    // Counters that are equal were made so: one may have been raised by that.
    if (told(rank, kCalls) != told(0, kCalls) && told(rank, kBatches) != told(0, kBatches)) {
      refuse(rank, text::format("The layer {} was called {} times on rank 0, but {} times on rank "
                                "{}, since the last time that all did.",
                                name(0), told(0, kCalls), told(rank, kCalls), rank));
    }
  }
}

void Layer::give_up() noexcept {
  try {
    const Counter now = look();
    if (now.batches != then_.batches + 1 || now.version != then_.version + 1) return;
    at::Tensor mine = tell(-1, num_channels_, num_batches_.options());
    at::Tensor all = at::empty({world_->size() * mine.numel()}, mine.options());
    world_->backend()->_allgather_base(all, mine)->wait(kPatience);
  } catch (const std::exception&) {  // NOLINT: they are gone, or wait elsewhere
  }
}

}  // namespace lockstep
