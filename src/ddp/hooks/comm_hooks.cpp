// HookComm, and the hooks that send gradients in 16 bits.
//
// A hook's result must have the same bits on all ranks. Here that follows from the engine's sum,
// which has them, and from what is done to it afterwards: one rounded operation per element.

#include "ddp/hooks/comm_hooks.h"

#include <ATen/ATen.h>
#include <lockstep/error.h>

#include <utility>

#include "base/text.h"

namespace lockstep {
namespace {

void check_contiguous(const at::Tensor& tensor, int rank, const char* operation) {
  if (tensor.defined() && tensor.layout() == at::kStrided && tensor.is_contiguous()) return;
  throw UsageError(
      {.rank = rank, .operation = operation},
      text::format("A communication hook gave {} {}.\nGive it a contiguous tensor.", operation,
                   !tensor.defined() ? "an undefined tensor"
                   : tensor.layout() != at::kStrided
                       ? "a sparse tensor"
                       : "a tensor with gaps or in another order of dimensions"));
}

class CastHook : public CommHook {
 public:
  CastHook(std::string name, at::ScalarType type) : name_(std::move(name)), type_(type) {}

  std::string text() const override { return name_; }

  std::function<void()> start(GradBucket bucket, HookComm& comm) override {
    const at::NoGradGuard no_grad;
    const at::Tensor flat = std::move(bucket.flat);
    const bool gets_smaller = flat.scalar_type() == at::kFloat || flat.scalar_type() == at::kDouble;
    if (!gets_smaller || flat.numel() == 0) return start_mean(flat, comm);
    // fp16 ends at 65504, which a sum may pass where the mean does not: divided first. bf16 reaches
    // as far as f32; there the division comes last, in the bucket's own precision.
    const bool divides_first = type_ == at::kHalf;
    const int size = comm.size();
    if (divides_first) flat.div_(size);
    const at::Tensor sent = flat.to(type_);
    auto work = comm.all_reduce(sent);
    return [flat, sent, work, size, divides_first] {
      const at::NoGradGuard no_grad_later;
      work->wait();
      flat.copy_(sent);
      if (!divides_first) flat.div_(size);
    };
  }

 private:
  const std::string name_;
  const at::ScalarType type_;
};

}  // namespace

c10::intrusive_ptr<c10d::Work> HookComm::all_reduce(const at::Tensor& tensor) {
  check_contiguous(tensor, world_.global_rank(), "all_reduce");
  std::vector<at::Tensor> tensors = {tensor};
  bytes_sent_ += static_cast<std::int64_t>(tensor.nbytes());
  return started(world_.backend()->allreduce(tensors, {}), tensor);
}

c10::intrusive_ptr<c10d::Work> HookComm::all_gather(const at::Tensor& tensor, at::Tensor& result) {
  check_contiguous(tensor, world_.global_rank(), "all_gather");
  const at::NoGradGuard no_grad;
  at::Tensor input = tensor.view(-1);  // flat, both: engines differ about shapes
  at::Tensor output = at::empty({size() * input.numel()}, input.options());
  result = output.view({size(), input.numel()});
  bytes_sent_ += static_cast<std::int64_t>(tensor.nbytes());
  return started(world_.backend()->_allgather_base(output, input), tensor);
}

HookComm::Work HookComm::started(Work work, const at::Tensor& tensor) {
  if (!tensor.is_cpu()) return works_of_devices_.emplace_back(std::move(work));
  poll();  // and forget what is done
  return works_.emplace_back(std::move(work));
}

// What fails is thrown where it is waited for. A device needs nobody to poll.
void HookComm::poll() {
  while (!works_.empty() && works_.front()->isCompleted()) works_.pop_front();
}

void HookComm::end_step() {
  works_.clear();
  works_of_devices_.clear();
}

std::vector<HookComm::Work> HookComm::take_works_of_devices() {
  return std::exchange(works_of_devices_, {});
}

void HookComm::order_after_started(bool is_on_cpu) {
  if (is_on_cpu) {
    for (const Work& work : works_) work->wait();
    return;
  }
  for (const Work& work : works_of_devices_) {
    try {
      work->wait();
    } catch (const std::exception&) {  // NOLINT: the step has failed already
    }
  }
}

std::function<void()> start_mean(const at::Tensor& tensor, HookComm& comm) {
  if (tensor.numel() == 0) return [] {};
  const at::NoGradGuard no_grad;
  // Not every engine knows complex numbers.
  const at::Tensor real = tensor.is_complex() ? at::view_as_real(tensor) : tensor;
  const bool divides_first = real.scalar_type() == at::kHalf;  // see CastHook
  const int size = comm.size();
  if (divides_first) real.div_(size);
  auto work = comm.all_reduce(real);
  return [real, work, size, divides_first] {
    const at::NoGradGuard no_grad_later;
    work->wait();
    if (!divides_first) real.div_(size);
  };
}

std::shared_ptr<CommHook> bf16_hook() { return std::make_shared<CastHook>("bf16", at::kBFloat16); }

std::shared_ptr<CommHook> fp16_hook() { return std::make_shared<CastHook>("fp16", at::kHalf); }

}  // namespace lockstep
