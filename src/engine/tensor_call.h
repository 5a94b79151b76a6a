// TensorCall: one call of an engine on its way to operations on raw memory.
//
// Tensors that are not dense are read from a dense copy, and written back from one at the end.
// Operations are collected and started together: if a call throws, no other rank has heard of it.
#pragma once

#include <ATen/MemoryOverlap.h>
#include <c10/util/SmallVector.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "collective/runner.h"
#include "engine/runner_work.h"
#include "engine/tensor_checks.h"

namespace lockstep {

class TensorCall {
 public:
  TensorCall(std::shared_ptr<collective::Runner> runner, std::weak_ptr<FutureDriver> driver,
             std::atomic<std::uint64_t>& sequence, c10d::OpType type, Tensors results,
             std::chrono::milliseconds timeout)
      : runner_(std::move(runner)),
        driver_(std::move(driver)),
        sequence_(sequence),
        type_(type),
        timeout_(timeout),
        results_(std::move(results)) {}

  at::Tensor read(const at::Tensor& tensor) {
    check(tensor);
    const at::NoGradGuard no_grad;
    // A pending conjugation or negation is not in the memory yet.
    const bool is_pending = tensor.is_conj() || tensor.is_neg();
    kept_->push_back(is_pending ? tensor.resolve_conj().resolve_neg().contiguous()
                                : tensor.contiguous());
    return kept_->back();
  }
  at::Tensor read_and_write(const at::Tensor& tensor) {
    const at::Tensor dense = read(tensor);
    if (dense.data_ptr() == tensor.data_ptr()) return dense;
    if (at::has_internal_overlap(tensor) == at::MemOverlap::Yes) {
      refuse("A tensor to be written is expanded: its elements share memory.\nClone it first.");
    }
    copies_.emplace_back(tensor, dense);
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

  void add(collective::Operation operation) { operations_.push_back(std::move(operation)); }
  void add(collective::Message message) { message_ = std::move(message); }

  std::chrono::milliseconds timeout() const { return timeout_; }

  // Starts what was added.
  c10::intrusive_ptr<c10d::Work> work() {
    for (collective::Operation& operation : operations_) {
      operation.owner = kept_;
      operation.timeout = timeout_;
      requests_.push_back(runner_->start(std::move(operation)));
      ++sequence_;
    }
    if (message_) {
      message_->owner = kept_;
      message_->timeout = timeout_;
      requests_.push_back(runner_->start(std::move(*message_)));
    }
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
    refuse(
        "This engine takes dense tensors on the CPU.\nMove the tensor there, or choose another.");
  }
  [[noreturn]] void refuse(const std::string& message) const {
    TensorChecks{runner_->global_rank(runner_->rank()), runner_->size()}.refuse(
        c10d::opTypeToString(type_).c_str(), message);
  }

  const std::shared_ptr<collective::Runner> runner_;
  const std::weak_ptr<FutureDriver> driver_;
  std::atomic<std::uint64_t>& sequence_;  // counts operations
  const c10d::OpType type_;
  const std::chrono::milliseconds timeout_;  // 0: the runner's
  Tensors results_;
  std::shared_ptr<Tensors> kept_ = std::make_shared<Tensors>();
  std::vector<std::pair<at::Tensor, at::Tensor>> copies_;
  c10::SmallVector<collective::Operation, 1> operations_;
  std::optional<collective::Message> message_;
  std::vector<std::shared_ptr<collective::Request>> requests_;
};

}  // namespace lockstep
