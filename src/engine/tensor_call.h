// TensorCall: one call of an engine on its way to operations on raw memory.
//
// Tensors that are not dense are read from a dense copy, and written back from one at the end.
#pragma once

#include <atomic>
#include <memory>
#include <utility>
#include <vector>

#include "collective/runner.h"
#include "engine/runner_work.h"
#include "engine/tensor_checks.h"

namespace lockstep {

class TensorCall {
 public:
  TensorCall(std::shared_ptr<collective::Runner> runner, std::weak_ptr<FutureDriver> driver,
             std::atomic<std::uint64_t>& sequence, c10d::OpType type, Tensors results)
      : runner_(std::move(runner)),
        driver_(std::move(driver)),
        sequence_(sequence),
        type_(type),
        results_(std::move(results)) {}

  at::Tensor read(const at::Tensor& tensor) {
    check(tensor);
    const at::NoGradGuard no_grad;
    kept_->push_back(tensor.contiguous());
    return kept_->back();
  }
  at::Tensor read_and_write(const at::Tensor& tensor) {
    const at::Tensor dense = read(tensor);
    if (dense.data_ptr() != tensor.data_ptr()) copies_.emplace_back(tensor, dense);
    return dense;
  }
  collective::Parts read(const Tensors& tensors) {
    collective::Parts parts;
    for (const at::Tensor& tensor : tensors) parts.list.push_back(data_of(read(tensor)));
    return parts;
  }
  collective::Parts write(const Tensors& tensors) {
    collective::Parts parts;
    for (const at::Tensor& tensor : tensors) parts.list.push_back(data_of(read_and_write(tensor)));
    return parts;
  }

  void start(collective::Operation operation) {
    operation.owner = kept_;
    requests_.push_back(runner_->start(std::move(operation)));
    ++sequence_;
  }
  void start(collective::Message message) {
    message.owner = kept_;
    requests_.push_back(runner_->start(std::move(message)));
  }

  c10::intrusive_ptr<c10d::Work> work() {
    const auto after = [copies = std::move(copies_), kept = std::move(kept_)] {
      const at::NoGradGuard no_grad;
      for (const auto& [tensor, dense] : copies) tensor.copy_(dense);
    };
    return c10::make_intrusive<RunnerWork>(runner_, driver_, type_, runner_->rank(),
                                           std::move(results_), std::move(requests_), after);
  }

 private:
  void check(const at::Tensor& tensor) const {
    if (tensor.defined() && tensor.layout() == at::kStrided && tensor.device().is_cpu()) return;
    TensorChecks{runner_->rank(), runner_->size()}.refuse(
        c10d::opTypeToString(type_).c_str(),
        "This engine takes dense tensors on the CPU.\nMove the tensor there, or choose another.");
  }

  const std::shared_ptr<collective::Runner> runner_;
  const std::weak_ptr<FutureDriver> driver_;
  std::atomic<std::uint64_t>& sequence_;  // counts operations
  const c10d::OpType type_;
  Tensors results_;
  std::shared_ptr<Tensors> kept_ = std::make_shared<Tensors>();
  std::vector<std::pair<at::Tensor, at::Tensor>> copies_;
  std::vector<std::shared_ptr<collective::Request>> requests_;
};

}  // namespace lockstep
