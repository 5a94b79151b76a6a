// Which of two engines a call goes to. Tensors of the meta device stand for a GPU's.

#include "engine/by_device.h"

#include <gtest/gtest.h>
#include <lockstep/error.h>

#include "engine/reduce_once.h"

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
  bool supportsTensorAlloc(c10::DeviceIndex) override { return true; }
  at::Tensor allocateTensor(long size, at::TensorOptions options) override {
    calls.push_back("allocate");
    return at::empty({size}, options);
  }
  void setTimeout(std::chrono::milliseconds timeout) override { its_timeout = timeout; }
  void abort() override { calls.push_back("abort"); }
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
  ByDevice engine{"nccl", 5, make_engine("solo", alone()), gpu};

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
  try {
    two.engine.allreduce(mixed, {});
    ADD_FAILURE();
  } catch (const UsageError& error) {
    EXPECT_EQ(error.rank(), 5);
  }
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

TEST(ByDevice, MemoryIsOfTheEngineOfItsDevice) {
  TwoEngines two;
  EXPECT_FALSE(two.engine.supportsTensorAlloc(-1));  // main memory: of the engine for one rank
  ASSERT_TRUE(two.engine.supportsTensorAlloc(0));
  EXPECT_EQ(two.engine.allocateTensor(3, kGpu).numel(), 3);
  EXPECT_EQ(two.gpu->take(), (std::vector<std::string>{"allocate"}));
}

TEST(ByDevice, ReduceOnceIsOfTheEngineForMainMemory) {
  TwoEngines two;
  const auto input = at::ones({3});
  const auto output = at::zeros({3});
  ASSERT_TRUE(can_reduce_once(two.engine));
  start_reduce_once(two.engine, input, output, c10d::makePreMulSum(0.5))->wait();
  EXPECT_TRUE(at::equal(output, at::full({3}, 0.5)));
  ByDevice without("nccl", 5, two.gpu, two.gpu);
  EXPECT_FALSE(can_reduce_once(without));
  EXPECT_THROW(start_reduce_once(without, input, output, c10d::ReduceOp::SUM), UsageError);
  EXPECT_TRUE(two.gpu->calls.empty());
}

// Main memory is to notice first.
TEST(ByDevice, BothHaveTheTimeoutAndTheGpusMore) {
  TwoEngines two;
  two.engine.setTimeout(std::chrono::milliseconds(1234));
  EXPECT_EQ(two.gpu->its_timeout.count(), 2 * 1234);
}

TEST(ByDevice, AbortIsForTheGpu) {
  TwoEngines two;
  two.engine.abort();
  EXPECT_EQ(two.gpu->take(), std::vector<std::string>{"abort"});
}

}  // namespace
}  // namespace lockstep
