// Which of two engines a call goes to. Tensors of the meta device stand for a GPU's.

#include "engine/by_device.h"

#include <gtest/gtest.h>
#include <lockstep/error.h>

namespace lockstep {
namespace {

using Tensors = ByDevice::Tensors;
using Work = ByDevice::Work;

const at::TensorOptions kGpu = at::device(at::kMeta);

// Remembers what it was called for.
class Recorder : public c10d::Backend {
 public:
  Recorder() : c10d::Backend(0, 1) {}
  const std::string getBackendName() const override { return "recorder"; }
  bool supportsCoalescing() const override { return true; }
  void setTimeout(std::chrono::milliseconds timeout) override { its_timeout = timeout; }
  void startCoalescing() override { calls.push_back("start"); }
  Work endCoalescing() override { return record("end"); }
  Work allreduce(Tensors&, const c10d::AllreduceOptions&) override { return record("allreduce"); }
  Work allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                 const c10d::AllgatherOptions&) override {
    EXPECT_EQ(outputs.at(0).at(0).numel(), inputs.at(0).numel());
    return record("allgather");
  }
  Work allgather_into_tensor_coalesced(Tensors&, Tensors&, const c10d::AllgatherOptions&) override {
    return record("allgather_into_tensor_coalesced");
  }
  Work reduce_scatter_tensor_coalesced(Tensors&, Tensors&,
                                       const c10d::ReduceScatterOptions&) override {
    return record("reduce_scatter_tensor_coalesced");
  }
  Work alltoall(Tensors&, Tensors&, const c10d::AllToAllOptions&) override {
    return record("alltoall");
  }
  Work recvAnysource(Tensors&, int) override { return record("recvAnysource"); }

  std::vector<std::string> take() { return std::exchange(calls, {}); }

  std::vector<std::string> calls;
  std::chrono::milliseconds its_timeout{0};

 private:
  Work record(const char* call) {
    calls.emplace_back(call);
    return c10::make_intrusive<c10d::Work>();
  }
};

struct TwoEngines {
  c10::intrusive_ptr<Recorder> gpu = c10::make_intrusive<Recorder>();
  ByDevice engine{"nccl", make_engine("solo", alone()), gpu};

  static EngineContext alone() {
    EngineContext context;
    context.members = {{.rank = 0}};
    return context;
  }
};

TEST(ByDevice, EveryCallGoesToTheEngineOfItsTensors) {
  TwoEngines two;
  using Calls = std::vector<std::string>;
  for (const bool is_gpu : {false, true}) {
    const auto tensor = [&] { return at::ones({3}, is_gpu ? kGpu : at::TensorOptions()); };
    Tensors in = {tensor(), tensor()};
    Tensors out = {tensor(), tensor()};
    Tensors one = {tensor()};
    Tensors other = {tensor()};
    std::vector<Tensors> lists = {out};
    EXPECT_NE(two.engine.allreduce(one, {}), nullptr);
    EXPECT_NE(two.engine.allgather_into_tensor_coalesced(out, in, {}), nullptr);
    EXPECT_NE(two.engine.reduce_scatter_tensor_coalesced(out, in, {}), nullptr);
    EXPECT_NE(two.engine.alltoall(other, one, {}), nullptr);
    EXPECT_NE(two.engine.allgather_coalesced(lists, in, {}), nullptr);
    if (is_gpu) two.engine.recvAnysource(one, 0);  // there is nothing to receive alone
    EXPECT_EQ(two.gpu->take(), is_gpu ? (Calls{"allreduce", "allgather_into_tensor_coalesced",
                                               "reduce_scatter_tensor_coalesced", "alltoall",
                                               "allgather", "allgather", "recvAnysource"})
                                      : Calls{});
  }
}

TEST(ByDevice, ListsOfBothAreRefusedBeforeEitherHearsOfThem) {
  TwoEngines two;
  Tensors mixed = {at::ones({3}), at::ones({3}, kGpu)};
  Tensors here = {at::ones({3}), at::ones({3})};
  EXPECT_THROW(two.engine.allreduce(mixed, {}), UsageError);
  EXPECT_THROW(two.engine.allgather_into_tensor_coalesced(mixed, here, {}), UsageError);
  std::vector<Tensors> lists = {here};
  EXPECT_THROW(two.engine.allgather_coalesced(lists, mixed, {}), UsageError);
  EXPECT_TRUE(two.gpu->calls.empty());
}

TEST(ByDevice, CoalescedCallsAreTheGpusAlone) {
  TwoEngines two;
  ASSERT_TRUE(two.engine.supportsCoalescing());
  Tensors there = {at::ones({3}, kGpu)};
  Tensors here = {at::ones({3})};
  two.engine.startCoalescing();
  two.engine.allreduce(there, {});
  EXPECT_THROW(two.engine.allreduce(here, {}), UsageError);
  EXPECT_THROW(two.engine.barrier({}), UsageError);
  EXPECT_NE(two.engine.endCoalescing(), nullptr);
  EXPECT_EQ(two.gpu->take(), (std::vector<std::string>{"start", "allreduce", "end"}));
  EXPECT_NE(two.engine.allreduce(here, {}), nullptr);
}

TEST(ByDevice, BothHaveTheTimeout) {
  TwoEngines two;
  two.engine.setTimeout(std::chrono::milliseconds(1234));
  EXPECT_EQ(two.gpu->its_timeout.count(), 1234);
}

}  // namespace
}  // namespace lockstep
