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

// A counter on a device is not read: the host would wait for it.
Layer::Counter Layer::look() const {
  if (!num_batches_.defined() || num_batches_.is_inference()) return {};
  const auto version = static_cast<std::int64_t>(num_batches_._version());
  return {num_batches_.is_cpu() ? num_batches_.item<std::int64_t>() : version, version};
}

// Since the last one that came here. LibTorch counts a call before it refuses it. Others write the
// counter, too, such as with a checkpoint's: calls alone would raise it by one with each write. If
// they have not, it tells nothing. Of one that is not read, on a device, only the writes are known:
// these count, except before the first call, where a rank may have loaded weights; check() looks
// closer.
std::int64_t Layer::num_calls(const Counter& now) const {
  if (!num_batches_.defined()) return 1;
  const std::int64_t raised = now.batches - then_.batches;
  if (is_on_device()) return has_called_ && raised > 0 ? raised : 1;
  return raised > 0 && raised == now.version - then_.version ? raised : 1;
}

at::Tensor Layer::tell(double count) {
  at::Tensor mine = at::zeros({kNumTold}, at::kDouble);
  const Counter now = look();
  mine[kCount] = count;
  mine[kIndex] = static_cast<std::int64_t>(index_);
  mine[kCalls] = num_calls(now);
  mine[kBatches] = is_on_device() ? 0 : now.batches;
  then_ = now;
  has_called_ = true;
  return mine;
}

void Layer::check(const at::Tensor& all) const {
  const auto told = [table = all.accessor<double, 2>()](int rank, Told what) {
    return static_cast<std::int64_t>(table[rank][what]);
  };
  const auto name = [&](int rank) {
    return (*names_)[static_cast<std::size_t>(told(rank, kIndex))];
  };
  const auto global = [&](int rank) { return world_->global_rank(rank); };
  const auto refuse = [&](int rank, const std::string& what) {
    throw UsageError(
        {.rank = world_->global_rank(), .peer = global(rank), .operation = "SyncBatchNorm"},
        text::format("{}\n{}", what, kAdvice));
  };
  for (int rank = 0; rank < world_->size(); ++rank) {
    if (told(rank, kCount) < 0) {
      refuse(rank, text::format("Rank {} could not call the layer {}.", global(rank), name(rank)));
    }
    if (told(rank, kIndex) != told(0, kIndex)) {
      refuse(rank, text::format("Rank {} calls the layer {}, but rank {} calls {}.", global(0),
                                name(0), global(rank), name(rank)));
    }
  }
  int other = 1;
  while (other < world_->size() && told(other, kCalls) == told(0, kCalls)) ++other;
  if (other == world_->size()) return;
  // Counters that are equal were made so: one may have been written by that. All ranks are here, so
  // those on a device are read now.
  const at::Tensor batches =
      is_on_device()
          ? world_->all_gather(at::scalar_tensor(num_batches_.item<std::int64_t>(), at::kDouble))
                .view(-1)
          : all.select(1, kBatches);
  for (int rank = other; rank < world_->size(); ++rank) {
    if (told(rank, kCalls) == told(0, kCalls) || batches[rank].equal(batches[0])) continue;
    refuse(rank,
           text::format("The layer {} was called {} times on rank {}, but {} times on rank {}, "
                        "since the last time that all did.",
                        name(0), told(0, kCalls), global(0), told(rank, kCalls), global(rank)));
  }
}

void Layer::give_up() noexcept {
  try {
    const Counter now = look();
    if (now.batches != then_.batches + 1 || now.version != then_.version + 1) return;
    at::Tensor mine = tell(-1);
    if (num_batches_.is_cpu()) mine = at::cat({mine, at::zeros({2 * num_channels_}, at::kDouble)});
    at::Tensor all = at::empty({world_->size() * mine.numel()}, mine.options());
    world_->backend()->_allgather_base(all, mine)->wait(kPatience);
  } catch (const std::exception&) {  // NOLINT: they are gone, or wait elsewhere
  }
}

}  // namespace lockstep
