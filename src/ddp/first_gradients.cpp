#include "ddp/first_gradients.h"

#include <ATen/ATen.h>

#include "base/log.h"

namespace lockstep {

void FirstGradients::keep(const at::Tensor& flat) {
  if (flat.numel() != 0) own_ = flat.clone();
}

void FirstGradients::compare(const at::Tensor& mean, std::int64_t step, const StepNumbers& numbers,
                             const World& world) {
  if (own_.defined()) {
    const auto largest = mean.abs().max().item<double>();
    const auto difference = (own_ - mean).abs().max().item<double>();
    differ_ = !(largest > 0 && difference <= 1e-6 * largest);
    own_.reset();
  } else if (step == 1 && !numbers.any(StepNumbers::kDiffers) && world.rank() == 0) {
    Log(world.global_rank())
        .warning(
            "All ranks had the same gradients in the first step: they seem to read the same data, "
            "and do the same work {} times. Give each its own part, with DistributedSampler.",
            world.size());
  }
}

}  // namespace lockstep
