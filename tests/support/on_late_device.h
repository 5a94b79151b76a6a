// Tests over the late device: ranks whose models and data are there, and whose engine is `late`.
#pragma once

#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <lockstep/world.h>

#include <cstdlib>
#include <string>

#include "multiprocess/ddp_model.h"
#include "support/late_device.h"
#include "support/late_engine.h"
#include "support/run_ranks.h"

namespace lockstep::test::late {

// While it lives, ddp_model.h makes models and data on the device, and there is the engine.
class Scope {
 public:
  explicit Scope(const Delays& delays = {}) {
    add_engine();
    set_delays(delays);
    place() = device();
  }
  ~Scope() { place() = at::kCPU; }
  Scope(const Scope&) = delete;
  Scope& operator=(const Scope&) = delete;
};

inline JoinOptions join_options() { return {.engine = "late"}; }

// Of this thread; another; and what `then` does from now on is after what `first` has so far.
inline c10::Stream stream() {
  return c10::impl::VirtualGuardImpl(at::kPrivateUse1).getStream(device());
}
inline c10::Stream new_stream() {
  return c10::impl::VirtualGuardImpl(at::kPrivateUse1).getStreamFromGlobalPool(device());
}
inline void order(const c10::Stream& first, const c10::Stream& then) {
  c10::Event event(at::kPrivateUse1);
  event.record(first);
  event.block(then);
}

// What f() makes in the stream `side`, behind and before what this thread's stream has.
template <typename F>
at::Tensor in_stream(const c10::Stream& side, const F& f) {
  const c10::Stream here = stream();
  order(here, side);
  at::Tensor result;
  {
    const c10::StreamGuard guard(side);
    result = f();
  }
  order(side, here);
  result.record_stream(here);
  return result;
}

// A model on the CPU with the same parameters: the other side of a comparison.
template <typename Make>
auto on_cpu(const Make& make) {
  const at::Device before = std::exchange(place(), at::kCPU);
  auto result = make();
  place() = before;
  return result;
}

inline void expect_close(const torch::nn::Module& model, const torch::nn::Module& other,
                         double tolerance = 1e-5) {
  const auto theirs = other.named_parameters();
  for (const auto& one : model.named_parameters()) {
    EXPECT_TRUE(at::allclose(one.value().cpu(), theirs[one.key()], tolerance, tolerance))
        << one.key();
    const at::Tensor& gradient = one.value().grad();
    ASSERT_EQ(gradient.defined(), theirs[one.key()].grad().defined()) << one.key();
    if (!gradient.defined()) continue;
    EXPECT_TRUE(at::allclose(gradient.cpu(), theirs[one.key()].grad(), tolerance, tolerance))
        << one.key() << ".grad";
  }
}

using WorldBody = std::function<void(const World& world)>;

// Each process has a device of its own: says so as a scheduler would.
inline void show_own_device(int rank) {
  ::setenv("CUDA_VISIBLE_DEVICES", std::to_string(rank).c_str(), 1);
}

inline RankResults run(int size, const WorldBody& body, const Delays& delays = {}) {
  const Scope scope(delays);
  return run_ranks(size, [&](int rank) {
    show_own_device(rank);
    body(World::join(join_options()));
    synchronize_all();
  });
}

}  // namespace lockstep::test::late
