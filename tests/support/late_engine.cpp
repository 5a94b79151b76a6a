#include "support/late_engine.h"

#include <ATen/ATen.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <lockstep/error.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <atomic>
#include <csignal>
#include <thread>

#include "engine/by_device.h"
#include "engine/engines.h"
#include "support/late_device.h"
#include "support/late_memory.h"

namespace lockstep::test::late {
namespace {

using Tensors = ByDevice::Tensors;
using Work = c10::intrusive_ptr<c10d::Work>;
using Engine = ByDevice::Engine;

std::atomic<LostPeer> lost_peer = LostPeer::kFails;
std::atomic<bool> fails_next = false;
std::atomic<AfterFailure> after_failure = AfterFailure::kGoesOn;
std::atomic<bool> is_broken = false;
std::atomic<bool> dies_in_wait = false;
std::atomic<std::int64_t> allocated = 0;

// What a work and the task in the engine's stream share.
struct Outcome {
  std::mutex mutex;
  std::exception_ptr exception;  // guarded by mutex

  std::exception_ptr get() {
    const std::lock_guard lock(mutex);
    return exception;
  }
};

class LateWork : public c10d::Work {
 public:
  LateWork(std::shared_ptr<Outcome> outcome, std::shared_ptr<const Mark> end)
      : outcome_(std::move(outcome)), end_(std::move(end)) {}

  bool isCompleted() override { return end_->is_reached(); }
  bool isSuccess() const override { return end_->is_reached() && !outcome_->get(); }
  std::exception_ptr exception() const override { return outcome_->get(); }
  void synchronize() override { block(current_stream(), end_); }

  bool wait(std::chrono::milliseconds timeout) override {
    if (dies_in_wait) std::raise(SIGKILL);
    if (const auto error = outcome_->get()) std::rethrow_exception(error);
    synchronize();
    if (timeout == kNoTimeout) return true;
    TORCH_CHECK(synchronize_until(*end_, Clock::now() + timeout),
                "A collective of the late device timed out.");
    if (const auto error = outcome_->get()) std::rethrow_exception(error);
    return true;
  }

 private:
  const std::shared_ptr<Outcome> outcome_;
  const std::shared_ptr<const Mark> end_;
};

// In the thread of a stream, until the others come or the engine is aborted.
void wait_for(c10d::Work& work, const std::atomic<bool>& is_gone, Clock::time_point deadline) {
  while (true) {
    try {
      work.wait(std::chrono::milliseconds(20));
      return;
    } catch (const TimeoutError&) {
      if (is_gone || Clock::now() > deadline) throw;
    }
  }
}

class LateEngine : public c10d::Backend {
 public:
  LateEngine(Engine below, std::chrono::milliseconds timeout)
      : c10d::Backend(below->getRank(), below->getSize()),
        below_(std::move(below)),
        timeout_(timeout) {}
  ~LateEngine() override { *is_gone_ = true; }

  const std::string getBackendName() const override { return "late"; }
  void setTimeout(std::chrono::milliseconds timeout) override {
    timeout_ = timeout;
    below_->setTimeout(timeout);
  }
  void abort() override { *is_gone_ = true; }  // what never ends does
  bool supportsTensorAlloc(c10::DeviceIndex) override { return true; }
  at::Tensor allocateTensor(long size, at::TensorOptions options) override {
    ++allocated;
    return at::empty({size}, options);
  }

  Work allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    return run({tensors.at(0)}, [options](c10d::Backend& below, Tensors& given) {
      return below.allreduce(given, options);
    });
  }
  Work broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    return run({tensors.at(0)}, [options](c10d::Backend& below, Tensors& given) {
      return below.broadcast(given, options);
    });
  }
  Work _allgather_base(at::Tensor& output, at::Tensor& input,
                       const c10d::AllgatherOptions& options) override {
    return run({output, input}, [options](c10d::Backend& below, Tensors& given) {
      return below._allgather_base(given[0], given[1], options);
    });
  }
  Work gather(std::vector<Tensors>& outputs, Tensors& inputs,
              const c10d::GatherOptions& options) override {
    Tensors all = outputs.empty() ? Tensors{} : outputs.at(0);
    all.push_back(inputs.at(0));
    return run(all, [options](c10d::Backend& below, Tensors& given) {
      Tensors input = {given.back()};
      given.pop_back();
      std::vector<Tensors> lists;
      if (!given.empty()) lists.push_back(given);
      return below.gather(lists, input, options);
    });
  }
  Work scatter(Tensors& outputs, std::vector<Tensors>& inputs,
               const c10d::ScatterOptions& options) override {
    Tensors all = inputs.empty() ? Tensors{} : inputs.at(0);
    all.push_back(outputs.at(0));
    return run(all, [options](c10d::Backend& below, Tensors& given) {
      Tensors output = {given.back()};
      given.pop_back();
      std::vector<Tensors> lists;
      if (!given.empty()) lists.push_back(given);
      return below.scatter(output, lists, options);
    });
  }
  Work alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                     std::vector<int64_t>& input_splits,
                     const c10d::AllToAllOptions& options) override {
    return run({output, input}, [output_splits, input_splits, options](c10d::Backend& below,
                                                                       Tensors& given) mutable {
      return below.alltoall_base(given[0], given[1], output_splits, input_splits, options);
    });
  }
  // As NCCL's, they have no tags: they are received in the order sent.
  Work send(Tensors& tensors, int peer, int) override {
    return run({tensors.at(0)},
               [peer](c10d::Backend& below, Tensors& given) { return below.send(given, peer, 0); });
  }
  Work recv(Tensors& tensors, int peer, int) override {
    return run({tensors.at(0)},
               [peer](c10d::Backend& below, Tensors& given) { return below.recv(given, peer, 0); });
  }
  Work _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                            const c10d::ReduceScatterOptions& options) override {
    return run({output, input}, [options](c10d::Backend& below, Tensors& given) {
      return below._reduce_scatter_base(given[0], given[1], options);
    });
  }

 private:
  using Call = std::function<Work(c10d::Backend&, Tensors&)>;

  Work run(const Tensors& tensors, Call call) {
    TORCH_CHECK(!is_broken, "The engine of the late device has failed before.");
    Tensors shadows;
    for (const at::Tensor& tensor : tensors) {
      TORCH_CHECK(tensor.is_non_overlapping_and_dense(),
                  "Tensors must be contiguous");  // as NCCL asks
      record_stream(tensor.storage().data_ptr(), stream_);
      shadows.push_back(shadow_of(tensor));
    }
    block(stream_, mark(current_stream()));
    const auto outcome = std::make_shared<Outcome>();
    enqueue(stream_, [outcome, shadows, call = std::move(call), below = below_, timeout = timeout_,
                      is_gone = is_gone_]() mutable {
      try {
        wait_for(*call(*below, shadows), *is_gone, Clock::now() + timeout);
        TORCH_CHECK(!fails_next.exchange(false), "A test has asked for this failure.");
      } catch (...) {
        while (lost_peer == LostPeer::kHangs && !*is_gone)
          std::this_thread::sleep_for(std::chrono::milliseconds(1));
        const std::lock_guard lock(outcome->mutex);
        outcome->exception = std::current_exception();
      }
    });
    const auto end = mark(stream_);
    enqueue(
        stream_,
        [outcome] {
          if (outcome->get() && after_failure == AfterFailure::kRefusesAll) is_broken = true;
        },
        When::kAtOnce);
    return c10::make_intrusive<LateWork>(outcome, end);
  }

  const Engine below_;
  std::chrono::milliseconds timeout_;
  const c10::StreamId stream_ = stream_from_pool();
  const std::shared_ptr<std::atomic<bool>> is_gone_ = std::make_shared<std::atomic<bool>>(false);
};

Engine make_late(const EngineContext& context) {
  EngineContext for_cpu = context;
  for_cpu.store = c10::make_intrusive<c10d::PrefixStore>("cpu", context.store);
  EngineContext for_late = context;
  for_late.store = c10::make_intrusive<c10d::PrefixStore>("late", context.store);
  for_late.channel.reset();  // as NCCL: nobody else knows of its waits
  for_late.timeout = ByDevice::kGpuPatience * context.timeout;
  Engine cpu = make_engine("auto", for_cpu);
  Engine late = c10::make_intrusive<LateEngine>(make_engine("auto", for_late), for_late.timeout);
  return c10::make_intrusive<ByDevice>("late", context.global_rank(), std::move(cpu),
                                       std::move(late));
}

}  // namespace

void add_engine() { add_engine_for_tests("late", make_late); }
void set_lost_peer(LostPeer what) { lost_peer = what; }
void fail_next(AfterFailure then) {
  after_failure = then;
  fails_next = true;
}
void die_in_wait() { dies_in_wait = true; }
std::int64_t num_allocated() { return allocated; }

}  // namespace lockstep::test::late
