// The hierarchical engine: the same bits as on one host and in every run, and large operations of
// every kind. Ranks pretend to be on several hosts.

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <lockstep/lockstep.h>

#include <chrono>
#include <thread>

#include "shm/group.h"
#include "support/run_ranks.h"

namespace lockstep::test {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using Tensors = std::vector<at::Tensor>;

// Numbers whose sums depend on the order of addition; every rank can make those of all.
at::Tensor values(int rank, std::int64_t count, at::ScalarType type, int salt = 0) {
  at::manual_seed(static_cast<std::uint64_t>(1000 * salt + rank));
  return at::isFloatingType(type) ? at::randn({count}, at::kFloat).to(type)
                                  : at::randint(-1000, 1000, {count}, type);
}

bool has_same_bits(const at::Tensor& a, const at::Tensor& b) {
  return a.scalar_type() == b.scalar_type() && a.sizes() == b.sizes() &&
         std::memcmp(a.const_data_ptr(), b.const_data_ptr(), a.nbytes()) == 0;
}

TEST(Hierarchical, IsTheDefaultOnSeveralHostsAndSaysWhy) {
  const auto results = run_ranks(
      3,
      [](int) {
        const World world = World::join();
        EXPECT_EQ(world.backend()->getBackendName(), "hierarchical:gloo");
        EXPECT_EQ(world.duplicate().backend()->getBackendName(), "hierarchical:gloo");
        world.barrier();
      },
      on_hosts("aba"));
  EXPECT_TRUE(all_passed(results));
  EXPECT_NE(results[0].output.find("3 ranks on 2 hosts, started by lockstep; engine: "
                                   "hierarchical:gloo (several hosts, with Gloo between them)"),
            std::string::npos)
      << results[0].output;
}

TEST(Hierarchical, ConnectsRanksOfOneHostToo) {
  EXPECT_TRUE(all_passed(run_ranks(2, [](int rank) {
    const World world = World::join({.engine = "hierarchical"});
    EXPECT_EQ(world.all_reduce(at::full({500000}, rank + 1))[499999].item<int>(), 3);
    EXPECT_EQ(world.broadcast(at::full({500000}, rank), 1)[0].item<int>(), 1);
    EXPECT_EQ(world.all_gather(at::full({3}, rank))[1][0].item<int>(), 1);
  })));
}

// The shared-memory engine over all ranks, whatever host they pretend to be on.
void all_reduce_flat(const World& world, at::Tensor& tensor, collective::DataType type,
                     collective::Reduction reduction) {
  int round = 0;
  shm::Group group({.rank = world.rank(), .size = world.size()}, [&](const std::string& mine) {
    const std::string prefix =
        std::string("flat") + c10::toString(tensor.scalar_type()) + std::to_string(tensor.numel()) +
        std::to_string(static_cast<int>(reduction)) + "/" + std::to_string(round++) + "/";
    world.store()->set(prefix + std::to_string(world.rank()), mine);
    std::vector<std::string> all;
    for (int peer = 0; peer < world.size(); ++peer) {
      all.push_back(world.store()->get_to_str(prefix + std::to_string(peer)));
    }
    return all;
  });
  collective::Operation operation;
  operation.kind = collective::Kind::kAllReduce;
  operation.type = type;
  operation.reduction = reduction;
  operation.count = static_cast<std::size_t>(tensor.numel());
  operation.input.base = operation.output.base = static_cast<std::byte*>(tensor.data_ptr());
  group.wait(*group.start(operation));
}

TEST(Hierarchical, EqualsFlatToTheBitOnEqualHosts) {
  EXPECT_TRUE(all_passed(run_ranks(
      4,
      [](int rank) {
        const World world = World::join({.engine = "hierarchical"});
        struct Row {
          at::ScalarType type;
          collective::DataType raw_type;
          ReduceOp::RedOpType op;
          collective::Reduction reduction;
        };
        for (const Row& row : {
                 Row{at::kFloat, collective::DataType::kF32, ReduceOp::SUM,
                     collective::Reduction::kSum},
                 Row{at::kFloat, collective::DataType::kF32, ReduceOp::AVG,
                     collective::Reduction::kAverage},
                 Row{at::kFloat, collective::DataType::kF32, ReduceOp::PRODUCT,
                     collective::Reduction::kProduct},
                 Row{at::kDouble, collective::DataType::kF64, ReduceOp::AVG,
                     collective::Reduction::kAverage},
                 Row{at::kInt, collective::DataType::kI32, ReduceOp::SUM,
                     collective::Reduction::kSum},
                 Row{at::kLong, collective::DataType::kI64, ReduceOp::MAX,
                     collective::Reduction::kMax},
             }) {
          for (const std::int64_t count : {1, 1001, 70001, 1500001}) {
            at::Tensor flat = values(rank, count, row.type);
            all_reduce_flat(world, flat, row.raw_type, row.reduction);
            const at::Tensor actual = world.all_reduce(values(rank, count, row.type), row.op);
            ASSERT_TRUE(has_same_bits(actual, flat)) << c10::toString(row.type) << " " << count;
          }
        }
      },
      on_hosts("aabb"))));
}

TEST(Hierarchical, GivesTheSameBitsInEveryRunAndOnEveryRank) {
  EXPECT_TRUE(all_passed(run_ranks(
      4,
      [](int rank) {
        const World world = World::join({.engine = "hierarchical"});
        for (const auto type : {at::kFloat, at::kHalf, at::kBFloat16}) {
          for (const std::int64_t count : {1001, 700001}) {
            at::Tensor first;
            for (int run = 0; run < 20; ++run) {
              // Any rank may be late, and memory may be the engine's or not.
              if (run % 4 == rank) std::this_thread::sleep_for(milliseconds(2));
              at::Tensor tensor = values(rank, count, type);
              if ((run + rank) % 3 == 0) {
                tensor = world.backend()->allocateTensor(count, type).copy_(tensor);
              }
              world.all_reduce(tensor, ReduceOp::AVG);
              if (run == 0) first = tensor.clone();
              ASSERT_TRUE(has_same_bits(tensor, first)) << c10::toString(type) << " run " << run;
            }
            const at::Tensor all = world.all_gather(first);
            for (int peer = 0; peer < world.size(); ++peer) {
              ASSERT_TRUE(has_same_bits(all[peer].contiguous(), first)) << "rank " << peer;
            }
          }
        }
      },
      on_hosts("abca"))));
}

// The sum of a host leaves the range of f16, the average does not.
TEST(Hierarchical, AveragesInTheRangeOfF16) {
  for (const std::string hosts : {"aabb", "abb"}) {
    EXPECT_TRUE(all_passed(run_ranks(
        static_cast<int>(hosts.size()),
        [](int rank) {
          const World world = World::join({.engine = "hierarchical", .timeout = seconds(30)});
          for (const std::int64_t count : {10, 1300003}) {
            const auto tensor = at::full({count}, rank == 0 ? 40000 : 50000, at::kHalf);
            const double wanted = 50000 - 10000.0 / world.size();
            const auto mean = world.all_reduce(tensor, ReduceOp::AVG).to(at::kDouble);
            EXPECT_LE((mean - wanted).abs().max().item<double>(), 32) << mean[0];  // a step of f16
          }
        },
        on_hosts(hosts))));
  }
}

class LargeOperations : public testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(Layouts, LargeOperations, testing::Values("aabb", "abaab", "abcb"),
                         [](const auto& test) { return test.param; });

// Several chunks of each kind; whole numbers, so that every order gives the same sum.
TEST_P(LargeOperations, AreRight) {
  const auto size = static_cast<int>(GetParam().size());
  EXPECT_TRUE(all_passed(run_ranks(
      size,
      [&](int rank) {
        const World world = World::join({.engine = "hierarchical", .timeout = seconds(30)});
        c10d::Backend& engine = *world.backend();
        const std::int64_t count = 1300003;
        Tensors all;
        for (int peer = 0; peer < size; ++peer) all.push_back(values(peer, count, at::kInt));
        at::Tensor sum = at::zeros({count}, at::kInt);
        for (const at::Tensor& one : all) sum += one;
        ASSERT_TRUE(has_same_bits(world.all_reduce(all[rank].clone()), sum));
        ASSERT_TRUE(has_same_bits(world.all_gather(all[rank]), at::stack(all)));
        for (const int root : {0, size - 1}) {
          ASSERT_TRUE(has_same_bits(world.broadcast(all[rank].clone(), root), all[root]));
          Tensors tensors = {all[rank].clone()};
          c10d::ReduceOptions reduce;
          reduce.rootRank = root;
          engine.reduce(tensors, reduce)->wait();
          ASSERT_TRUE(has_same_bits(tensors[0], rank == root ? sum : all[rank]));
          c10d::GatherOptions gather;
          gather.rootRank = root;
          std::vector<Tensors> outputs(rank == root ? 1 : 0);
          for (int peer = 0; peer < size && rank == root; ++peer) {
            outputs[0].push_back(at::zeros_like(all[peer]));
          }
          tensors = {all[rank]};
          engine.gather(outputs, tensors, gather)->wait();
          for (int peer = 0; peer < size && rank == root; ++peer) {
            ASSERT_TRUE(has_same_bits(outputs[0][peer], all[peer]));
          }
          c10d::ScatterOptions scatter;
          scatter.rootRank = root;
          tensors = {at::zeros({count}, at::kInt)};
          std::vector<Tensors> inputs;
          if (rank == root) inputs.push_back(all);
          engine.scatter(tensors, inputs, scatter)->wait();
          ASSERT_TRUE(has_same_bits(tensors[0], all[rank]));
        }
        // Part p of rank r is r's values plus p.
        Tensors parts;
        Tensors received;
        for (int peer = 0; peer < size; ++peer) parts.push_back(all[rank] + peer);
        for (int peer = 0; peer < size; ++peer) received.push_back(at::zeros_like(all[0]));
        ASSERT_TRUE(has_same_bits(world.reduce_scatter(at::stack(parts)), sum + size * rank));
        engine.alltoall(received, parts)->wait();
        for (int peer = 0; peer < size; ++peer) {
          ASSERT_TRUE(has_same_bits(received[peer], all[peer] + rank));
        }
        const auto scaled = at::ones({400000});
        world.all_reduce(scaled, c10d::makePreMulSum(rank == 0 ? 2.0 : 0.5));
        ASSERT_TRUE(has_same_bits(scaled, at::full({400000}, 2 + 0.5 * (size - 1))));
        world.barrier();
      },
      on_hosts(GetParam()))));
}

}  // namespace
}  // namespace lockstep::test
