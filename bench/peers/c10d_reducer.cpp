#include "peers/c10d_reducer.h"

#include <limits>
#include <torch/csrc/distributed/c10d/reducer.hpp>

namespace lockstep::bench {

// As DistributedDataParallel.__init__ does: all parameters in one bucket at first; after the first
// step the reducer itself makes buckets of 1 MiB and then 25 MiB in the order of gradients.
C10dReducer::C10dReducer(const World& gloo, const std::vector<at::Tensor>& parameters,
                         bool gradient_as_bucket_view) {
  for (const at::Tensor& parameter : parameters) gloo.broadcast(parameter);
  auto group = c10::make_intrusive<c10d::ProcessGroup>(gloo.store(), gloo.rank(), gloo.size());
  group->setBackend(c10::DeviceType::CPU, c10d::ProcessGroup::GLOO, gloo.backend());
  group->setDefaultBackend(c10d::ProcessGroup::GLOO);
  const std::vector<bool> is_sparse(parameters.size(), false);
  auto buckets = std::get<0>(c10d::compute_bucket_assignment_by_size(
      parameters, {std::numeric_limits<std::size_t>::max()}, is_sparse));
  reducer_ = std::make_unique<c10d::Reducer>(
      parameters, std::vector(buckets.rbegin(), buckets.rend()), group, is_sparse,
      c10d::kDefaultBucketBytesCap, /*find_unused_parameters=*/false, gradient_as_bucket_view,
      /*param_names=*/std::unordered_map<std::size_t, std::string>{},
      c10d::kDefaultFirstBucketBytes, /*skip_all_reduce_unused_params=*/false,
      /*use_python_reducer=*/false, /*bucket_bytes_cap_list=*/std::vector<std::int64_t>{});
}

C10dReducer::~C10dReducer() = default;

void C10dReducer::before_forward() {
  reducer_->prepare_for_forward();
  reducer_->rebuild_buckets();
}

void C10dReducer::before_backward() { reducer_->prepare_for_backward({}); }

}  // namespace lockstep::bench
