#include "ddp/hooks/low_rank_device.h"

#include <ATen/ATen.h>

#include <limits>

namespace lockstep {
namespace {

double noise_of(at::ScalarType type) {
  return 100 * (type == at::kDouble ? std::numeric_limits<double>::epsilon()
                                    : double{std::numeric_limits<float>::epsilon()});
}

at::Tensor norm_of(const at::Tensor& vector) { return vector.pow(2).sum().sqrt(); }

}  // namespace

void make_orthonormal_on_device(const at::Tensor& vectors) {
  const at::Tensor is_finite = at::isfinite(vectors).all();
  const double noise = noise_of(vectors.scalar_type());
  const auto options = vectors.options().dtype(at::kDouble);
  std::vector<at::Tensor> done;
  for (std::int64_t k = 0; k < vectors.size(0); ++k) {
    const auto subtract_earlier = [&](at::Tensor rest) {
      for (int pass = 0; pass < 2; ++pass) {
        for (const at::Tensor& earlier : done) rest = rest - (rest * earlier).sum() * earlier;
      }
      return rest;
    };
    const at::Tensor vector = vectors[k].to(at::kDouble);
    const at::Tensor rest = subtract_earlier(vector);
    // One that adds nothing is replaced by another, always the same.
    const at::Tensor another = subtract_earlier(
        at::arange(1, vectors.size(1) + 1, options).mul(static_cast<double>(k) + 1).sin());
    const at::Tensor used = at::where(norm_of(rest).gt(norm_of(vector) * noise), rest, another);
    done.push_back(used / norm_of(used));
  }
  const at::Tensor all = at::stack(done);
  vectors.copy_(
      at::where(is_finite, all, at::full_like(all, std::numeric_limits<double>::quiet_NaN())));
}

at::Tensor multiply_on_device(const at::Tensor& left, const at::Tensor& right) {
  at::Tensor result = left[0].unsqueeze(1) * right[0];
  for (std::int64_t k = 1; k < left.size(0); ++k) {
    result.addcmul_(left[k].unsqueeze(1), right[k]);
  }
  return result;
}

}  // namespace lockstep
