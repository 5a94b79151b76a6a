// Master weights: f32 copies of 16-bit parameters, kept by the parameter's address.

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <lockstep/error.h>
#include <lockstep/optim.h>

#include <algorithm>
#include <atomic>
#include <cstring>

#include "base/text.h"
#include "ddp/slices.h"

namespace lockstep::optim {
namespace {

bool is_16_bit(const at::Tensor& parameter) {
  return parameter.scalar_type() == at::kHalf || parameter.scalar_type() == at::kBFloat16;
}

// Whether the parameter is its copy, rounded: bit by bit, in pieces, so that what is rounded for it
// stays in a core's cache.
bool is_rounded(const at::Tensor& parameter, const at::Tensor& master) {
  if (!parameter.is_non_overlapping_and_dense() || parameter.strides() != master.strides()) {
    return master.to(parameter.scalar_type()).equal(parameter.detach());
  }
  constexpr std::int64_t kPiece = 1 << 14;
  const at::Tensor wide = master.detach().as_strided({master.numel()}, {1});
  const auto* const bytes = static_cast<const std::byte*>(parameter.const_data_ptr());
  const std::size_t width = parameter.element_size();
  std::atomic<bool> is_same = true;
  at::parallel_for(0, wide.numel(), kPiece, [&](std::int64_t begin, std::int64_t end) {
    const at::NoGradGuard no_grad;
    const at::Tensor rounded = at::empty({kPiece}, parameter.options());
    for (std::int64_t at = begin; at < end && is_same; at += kPiece) {
      const std::int64_t count = std::min(kPiece, end - at);
      rounded.narrow(0, 0, count).copy_(wide.narrow(0, at, count));
      const auto from = static_cast<std::size_t>(at) * width;
      if (std::memcmp(rounded.const_data_ptr(), bytes + from,
                      static_cast<std::size_t>(count) * width) != 0) {
        is_same = false;
      }
    }
  });
  return is_same;
}

}  // namespace

at::Tensor MasterWeights::master_of(const at::Tensor& parameter) const {
  const auto found = masters_.find(parameter.unsafeGetTensorImpl());
  const bool is_there = found != masters_.end() && is_current(parameter, found->second);
  return is_there ? found->second.tensor : at::Tensor();
}

at::Tensor MasterWeights::master_since_write(const at::Tensor& parameter) const {
  const auto found = masters_.find(parameter.unsafeGetTensorImpl());
  const bool is_there = found != masters_.end() && found->second.version == parameter._version();
  return is_there ? found->second.tensor : at::Tensor();
}

void MasterWeights::set_master(const at::Tensor& parameter, const at::Tensor& master) {
  const bool fits = master.sizes() == parameter.sizes() || Slices::is_slice(master);
  if (!is_16_bit(parameter) || master.scalar_type() != at::kFloat || !fits) {
    throw UsageError(
        {.operation = "set_master"},
        text::format("The parameter is {} {}, the master weights are {} {}.\nGive f32 "
                     "ones of the same sizes, for a parameter of 16 bits.",
                     c10::toString(parameter.scalar_type()), c10::str(parameter.sizes()),
                     c10::toString(master.scalar_type()), c10::str(master.sizes())));
  }
  masters_[parameter.unsafeGetTensorImpl()] = {master, parameter._version()};
}

// A device would have to be waited for: there the version counter alone tells. It counts on the
// CPU, too: all ranks must come to the same result, also the one whose weights others were given.
bool MasterWeights::is_current(const at::Tensor& parameter, const Master& master) {
  return master.version == parameter._version() &&
         (!parameter.is_cpu() || is_rounded(parameter, master.tensor));
}

at::Tensor MasterWeights::master_for(const at::Tensor& parameter) {
  if (!is_used_ || !is_16_bit(parameter)) return {};
  if (const at::Tensor master = master_of(parameter); master.defined()) return master;
  set_master(parameter, parameter.detach().to(at::kFloat));
  return masters_.at(parameter.unsafeGetTensorImpl()).tensor;
}

void MasterWeights::round_to_parameters(const std::vector<at::Tensor>& parameters) {
  if (masters_.empty()) return;
  for (const at::Tensor& parameter : parameters) {
    const auto found = masters_.find(parameter.unsafeGetTensorImpl());
    if (found == masters_.end() || !parameter.grad().defined()) continue;
    parameter.detach().copy_(found->second.tensor);
    found->second.version = parameter._version();
  }
}

}  // namespace lockstep::optim
