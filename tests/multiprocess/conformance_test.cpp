// Conformance: what every engine must do, over sizes 1 to 4, all types, and odd lengths.
//
// Inputs are small whole numbers, so every order of summation gives the same result and results
// are compared to the bit. An engine's row says what it does not offer; that must throw on all
// ranks, never give a wrong value, and leave the engine usable for the next operation.

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <lockstep/lockstep.h>

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <iostream>
#include <map>
#include <random>
#include <set>

#include "engine/reduce_once.h"
#include "support/run_ranks.h"
#include "support/shared_arena.h"

namespace lockstep {
namespace {

using at::ScalarType;
using Tensors = std::vector<at::Tensor>;
using OpType = c10d::ReduceOp::RedOpType;

const std::vector<ScalarType> kTypes = {
    at::kByte,     at::kChar,   at::kShort,  at::kInt,          at::kLong,
    at::kUInt16,   at::kUInt32, at::kUInt64, at::kBool,         at::kHalf,
    at::kBFloat16, at::kFloat,  at::kDouble, at::kComplexFloat, at::kComplexDouble};
const std::vector<std::int64_t> kLengths = {0, 1, 2, 3, 7, 17, 64, 65, 1000, 4099};
const std::vector<OpType> kOps = {c10d::ReduceOp::SUM, c10d::ReduceOp::AVG, c10d::ReduceOp::PRODUCT,
                                  c10d::ReduceOp::MIN, c10d::ReduceOp::MAX, c10d::ReduceOp::BAND,
                                  c10d::ReduceOp::BOR, c10d::ReduceOp::BXOR};

struct EngineRow {
  std::string name;
  std::vector<int> sizes;
  // Types that a check must see refused; "" is for all checks that are not named.
  std::map<std::string, std::set<ScalarType>> refused;
  bool sends_to_itself;
  bool takes_gaps;                        // tensors that are not dense
  std::vector<std::string> layouts = {};  // on several hosts: a letter per rank names its host

  bool refuses(const std::string& check, ScalarType type) const {
    const auto found = refused.find(refused.contains(check) ? check : "");
    return found != refused.end() && found->second.contains(type);
  }
};

// Gloo moves and adds the types it has templates for; only sending is bytes to it.
const std::set<ScalarType> kNotGloo = {at::kShort, at::kUInt16, at::kUInt32, at::kUInt64};
const std::set<ScalarType> kNotGlooMoved = {at::kShort,  at::kUInt16,       at::kUInt32,
                                            at::kUInt64, at::kComplexFloat, at::kComplexDouble};

const std::vector<EngineRow> kEngines = {
    {"solo", {1}, {}, true, true},
    {"shm", {1, 2, 3, 4, 8}, {}, true, true},
    {"gloo",
     {1, 2, 3, 4},
     {{"", kNotGloo},
      {"all_gather", kNotGlooMoved},
      {"gather", kNotGlooMoved},
      {"scatter", kNotGlooMoved},
      {"all_to_all", kNotGlooMoved},
      {"send_and_receive", {}}},
     false,
     false},
    {"mpi", {1, 2, 3, 4}, {}, true, true},
    {"hierarchical", {}, {}, true, true, {"ab", "abb", "aabb", "aaab", "abab", "abba", "abcd"}},
    {"hierarchical:mpi", {}, {}, true, true, {"ab", "abb", "aabb", "abab"}},
};

bool is_bitwise(OpType op) { return op >= c10d::ReduceOp::BAND && op <= c10d::ReduceOp::BXOR; }
bool is_float(ScalarType type) { return at::isFloatingType(type) || at::isComplexType(type); }

// Whether the combination means anything at all.
bool makes_sense(ScalarType type, OpType op) {
  if (op == c10d::ReduceOp::AVG) return is_float(type);
  if (is_bitwise(op)) return !is_float(type);
  if (at::isComplexType(type)) return op == c10d::ReduceOp::SUM;
  if (type == at::kBool) return op == c10d::ReduceOp::MIN || op == c10d::ReduceOp::MAX;
  return true;
}

// The values of a rank: whole numbers from 0 to 3, different for every rank and place.
at::Tensor values(int rank, std::int64_t length, ScalarType type, std::int64_t salt = 0) {
  auto numbers = at::arange(length, at::kLong).add_(rank * 7 + salt * 3).remainder_(4);
  if (type == at::kBool) numbers = numbers.remainder(2);
  return numbers.to(type);
}

// One rank at work: what a check needs.
struct Bench {
  const World& world;
  const EngineRow& row;
  std::string check;
  c10d::Backend& engine;
  int rank;
  int size;

  std::vector<at::Tensor> values_of_all(std::int64_t length, ScalarType type,
                                        std::int64_t salt = 0) const {
    Tensors all;
    for (int peer = 0; peer < size; ++peer) all.push_back(values(peer, length, type, salt));
    return all;
  }

  bool takes(ScalarType type) const { return !row.refuses(check, type); }
};

at::Tensor reference(const Tensors& all, OpType op, ScalarType type) {
  const ScalarType wide = at::isComplexType(type) ? at::kComplexDouble
                          : is_float(type)        ? at::kDouble
                                                  : at::kLong;
  auto result = all[0].to(wide);
  for (std::size_t i = 1; i < all.size(); ++i) {
    const auto next = all[i].to(wide);
    switch (op) {
      case c10d::ReduceOp::PRODUCT:
        result = result * next;
        break;
      case c10d::ReduceOp::MIN:
        result = at::minimum(result, next);
        break;
      case c10d::ReduceOp::MAX:
        result = at::maximum(result, next);
        break;
      case c10d::ReduceOp::BAND:
        result = at::bitwise_and(result, next);
        break;
      case c10d::ReduceOp::BOR:
        result = at::bitwise_or(result, next);
        break;
      case c10d::ReduceOp::BXOR:
        result = at::bitwise_xor(result, next);
        break;
      default:
        result = result + next;
    }
  }
  if (op == c10d::ReduceOp::AVG) result = result / static_cast<double>(all.size());
  return result.to(type);
}

void expect_same(const at::Tensor& actual, const at::Tensor& expected, const std::string& what) {
  ASSERT_EQ(actual.scalar_type(), expected.scalar_type()) << what;
  ASSERT_EQ(actual.sizes(), expected.sizes()) << what;
  const auto bytes = [](const at::Tensor& tensor) {
    const auto dense = tensor.contiguous();
    return std::string(static_cast<const char*>(dense.const_data_ptr()), dense.nbytes());
  };
  ASSERT_EQ(bytes(actual), bytes(expected)) << what << "\n" << actual << "\n" << expected;
}

std::string label(ScalarType type, std::int64_t length, int op_or_root = -1) {
  return std::string(c10::toString(type)) + "[" + std::to_string(length) + "] " +
         std::to_string(op_or_root);
}

void for_each_type_and_length(const Bench& bench,
                              const std::function<void(ScalarType, std::int64_t)>& f) {
  for (const ScalarType type : kTypes) {
    if (!bench.takes(type)) {
      EXPECT_ANY_THROW(f(type, 7)) << c10::toString(type);
      continue;
    }
    for (const std::int64_t length : kLengths) f(type, length);
  }
}

// Runs `run` for every type, operation and length and compares what it returns with the reference;
// a type that the engine does not take must throw. An average over three ranks is not a whole
// number, so there it must only be close (engines may multiply by 1/3 or divide by 3).
void check_reductions(const Bench& bench,
                      const std::function<at::Tensor(at::Tensor, c10d::ReduceOp)>& run) {
  for (const ScalarType type : kTypes) {
    for (const OpType op : kOps) {
      if (!makes_sense(type, op)) continue;
      if (!bench.takes(type)) {
        EXPECT_ANY_THROW(run(values(bench.rank, 7, type), op)) << label(type, 7, op);
        continue;
      }
      for (const std::int64_t length : kLengths) {
        const auto expected = reference(bench.values_of_all(length, type), op, type);
        const auto actual = run(values(bench.rank, length, type), op);
        if (!actual.defined()) continue;  // not this rank's
        if (op == c10d::ReduceOp::AVG && bench.size == 3) {
          EXPECT_TRUE(at::allclose(actual, expected, 1e-2)) << label(type, length, op);
        } else {
          expect_same(actual, expected, label(type, length, op));
        }
      }
    }
  }
}

void all_reduce(const Bench& bench) {
  check_reductions(bench, [&](at::Tensor tensor, c10d::ReduceOp op) {
    Tensors tensors = {std::move(tensor)};
    c10d::AllreduceOptions options;
    options.reduceOp = op;
    EXPECT_TRUE(bench.engine.allreduce(tensors, options)->wait());
    return tensors[0];
  });
}

void all_reduce_coalesced(const Bench& bench) {
  Tensors tensors;
  for (const std::int64_t length : kLengths)
    tensors.push_back(values(bench.rank, length, at::kFloat));
  bench.engine.allreduce_coalesced(tensors)->wait();
  for (std::size_t i = 0; i < kLengths.size(); ++i) {
    expect_same(
        tensors[i],
        reference(bench.values_of_all(kLengths[i], at::kFloat), c10d::ReduceOp::SUM, at::kFloat),
        std::to_string(i));
  }
}

void reduce(const Bench& bench) {
  for (int root = 0; root < bench.size; ++root) {
    check_reductions(bench, [&](at::Tensor tensor, c10d::ReduceOp op) {
      Tensors tensors = {std::move(tensor)};
      c10d::ReduceOptions options;
      options.rootRank = root;
      options.reduceOp = op;
      bench.engine.reduce(tensors, options)->wait();
      return bench.rank == root ? tensors[0] : at::Tensor();  // the others' is not specified
    });
  }
}

// Where there is none, it is refused.
void reduce_once(const Bench& bench) {
  const bool is_there = bench.row.name == "shm" || bench.row.name == "solo";
  ASSERT_EQ(can_reduce_once(bench.engine), is_there);
  if (!is_there) {
    const auto tensor = at::zeros({7});
    EXPECT_THROW(start_reduce_once(bench.engine, tensor, at::zeros({7}), c10d::ReduceOp::SUM),
                 UsageError);
    return;
  }
  const test::SharedArena arena(bench.world, 16 * static_cast<std::size_t>(kLengths.back()));
  check_reductions(bench, [&](const at::Tensor& tensor, const c10d::ReduceOp& op) {
    const at::Tensor output = arena.tensor(tensor.numel(), tensor.scalar_type());
    start_reduce_once(bench.engine, tensor, output, op)->wait();
    return output.clone();
  });
}

void broadcast(const Bench& bench) {
  for_each_type_and_length(bench, [&](ScalarType type, std::int64_t length) {
    for (int root = 0; root < bench.size; ++root) {
      Tensors tensors = {values(bench.rank, length, type)};
      c10d::BroadcastOptions options;
      options.rootRank = root;
      bench.engine.broadcast(tensors, options)->wait();
      expect_same(tensors[0], values(root, length, type), label(type, length, root));
    }
  });
}

void all_gather(const Bench& bench) {
  for_each_type_and_length(bench, [&](ScalarType type, std::int64_t length) {
    const Tensors expected = bench.values_of_all(length, type);
    Tensors inputs = {values(bench.rank, length, type)};
    std::vector<Tensors> outputs(1);
    for (int peer = 0; peer < bench.size; ++peer) {
      outputs[0].push_back(at::empty({length}, inputs[0].options()));
    }
    bench.engine.allgather(outputs, inputs)->wait();
    for (int peer = 0; peer < bench.size; ++peer) {
      expect_same(outputs[0][peer], expected[peer], label(type, length, peer));
    }
    auto flat = at::empty({length * bench.size}, inputs[0].options());
    bench.engine._allgather_base(flat, inputs[0])->wait();
    expect_same(flat, at::cat(expected), label(type, length));
    Tensors flats = {at::zeros_like(flat)};
    bench.engine.allgather_into_tensor_coalesced(flats, inputs)->wait();
    expect_same(flats[0], at::cat(expected), label(type, length));
  });
}

void all_gather_coalesced(const Bench& bench) {
  Tensors inputs;
  for (const std::int64_t length : kLengths) {
    inputs.push_back(values(bench.rank, length, at::kFloat));
  }
  std::vector<Tensors> outputs(static_cast<std::size_t>(bench.size));
  for (Tensors& of_rank : outputs) {
    for (const at::Tensor& input : inputs) of_rank.push_back(at::zeros_like(input));
  }
  bench.engine.allgather_coalesced(outputs, inputs)->wait();
  for (int peer = 0; peer < bench.size; ++peer) {
    for (std::size_t i = 0; i < kLengths.size(); ++i) {
      expect_same(outputs[peer][i], values(peer, kLengths[i], at::kFloat), std::to_string(i));
    }
  }
}

void gather(const Bench& bench) {
  for_each_type_and_length(bench, [&](ScalarType type, std::int64_t length) {
    for (int root = 0; root < bench.size; ++root) {
      Tensors inputs = {values(bench.rank, length, type)};
      std::vector<Tensors> outputs;
      if (bench.rank == root) {
        outputs.resize(1);
        for (int peer = 0; peer < bench.size; ++peer) {
          outputs[0].push_back(at::empty({length}, inputs[0].options()));
        }
      }
      c10d::GatherOptions options;
      options.rootRank = root;
      bench.engine.gather(outputs, inputs, options)->wait();
      if (bench.rank != root) continue;
      for (int peer = 0; peer < bench.size; ++peer) {
        expect_same(outputs[0][peer], values(peer, length, type), label(type, length, root));
      }
    }
  });
}

void scatter(const Bench& bench) {
  for_each_type_and_length(bench, [&](ScalarType type, std::int64_t length) {
    for (int root = 0; root < bench.size; ++root) {
      Tensors outputs = {at::zeros({length}, type)};
      std::vector<Tensors> inputs;
      if (bench.rank == root) inputs.push_back(bench.values_of_all(length, type, root));
      c10d::ScatterOptions options;
      options.rootRank = root;
      bench.engine.scatter(outputs, inputs, options)->wait();
      expect_same(outputs[0], values(bench.rank, length, type, root), label(type, length, root));
    }
  });
}

// Each rank gives `size` parts that differ only by the salt; part r of all ranks ends at rank r.
void reduce_scatter(const Bench& bench) {
  for (const ScalarType type : kTypes) {
    if (type == at::kBool || !bench.takes(type) || at::isComplexType(type)) continue;
    for (const std::int64_t length : kLengths) {
      const auto expected =
          reference(bench.values_of_all(length, type, bench.rank), c10d::ReduceOp::SUM, type);
      std::vector<Tensors> inputs(1);
      for (int part = 0; part < bench.size; ++part) {
        inputs[0].push_back(values(bench.rank, length, type, part));
      }
      Tensors outputs = {at::zeros({length}, type)};
      bench.engine.reduce_scatter(outputs, inputs)->wait();
      expect_same(outputs[0], expected, label(type, length));
      auto flat = at::cat(inputs[0]);
      auto output = at::zeros({length}, type);
      bench.engine._reduce_scatter_base(output, flat)->wait();
      expect_same(output, expected, label(type, length));
      Tensors flats = {at::cat(inputs[0])};
      Tensors outs = {at::zeros({length}, type)};
      bench.engine.reduce_scatter_tensor_coalesced(outs, flats)->wait();
      expect_same(outs[0], expected, label(type, length));
    }
  }
}

void all_to_all(const Bench& bench) {
  for_each_type_and_length(bench, [&](ScalarType type, std::int64_t length) {
    Tensors inputs;
    Tensors outputs;
    Tensors expected;
    for (int peer = 0; peer < bench.size; ++peer) {
      inputs.push_back(values(bench.rank, length, type, peer));
      outputs.push_back(at::zeros({length}, type));
      expected.push_back(values(peer, length, type, bench.rank));
    }
    auto flat_in = at::cat(inputs);
    auto flat_out = at::zeros_like(flat_in);
    std::vector<std::int64_t> even;
    bench.engine.alltoall_base(flat_out, flat_in, even, even)->wait();
    expect_same(flat_out, at::cat(expected), label(type, length));
    bench.engine.alltoall(outputs, inputs)->wait();
    for (int peer = 0; peer < bench.size; ++peer) {
      expect_same(outputs[peer], expected[peer], label(type, length, peer));
    }
  });
  // Uneven: rank r sends r + p elements to rank p.
  std::vector<std::int64_t> in_splits;
  std::vector<std::int64_t> out_splits;
  Tensors in_parts;
  Tensors expected;
  for (int peer = 0; peer < bench.size; ++peer) {
    in_splits.push_back(bench.rank + peer);
    out_splits.push_back(bench.rank + peer);
    in_parts.push_back(values(bench.rank, bench.rank + peer, at::kInt, peer));
    expected.push_back(values(peer, bench.rank + peer, at::kInt, bench.rank));
  }
  auto in = at::cat(in_parts);
  auto out = at::zeros_like(in);
  bench.engine.alltoall_base(out, in, out_splits, in_splits)->wait();
  expect_same(out, at::cat(expected), "uneven");
}

void send_and_receive(const Bench& bench) {
  if (bench.size == 1 && !bench.row.sends_to_itself) return;
  const int next = (bench.rank + 1) % bench.size;
  const int previous = (bench.rank + bench.size - 1) % bench.size;
  for_each_type_and_length(bench, [&](ScalarType type, std::int64_t length) {
    Tensors out = {values(bench.rank, length, type)};
    Tensors in = {at::zeros({length}, type)};
    const auto sent = bench.engine.send(out, next, 5);
    bench.engine.recv(in, previous, 5)->wait();
    sent->wait();
    expect_same(in[0], values(previous, length, type), label(type, length));
  });
  // Two tags cross; then from anyone.
  Tensors first = {at::full({3}, bench.rank)};
  Tensors second = {at::full({3}, bench.rank + 100)};
  Tensors in_first = {at::zeros({3}, at::kLong)};
  Tensors in_second = {at::zeros({3}, at::kLong)};
  const auto sent_first = bench.engine.send(first, next, 1);
  const auto sent_second = bench.engine.send(second, next, 2);
  bench.engine.recv(in_second, previous, 2)->wait();
  bench.engine.recv(in_first, previous, 1)->wait();
  sent_first->wait();
  sent_second->wait();
  expect_same(in_first[0], at::full({3}, previous), "tag 1");
  expect_same(in_second[0], at::full({3}, previous + 100), "tag 2");
  const auto sent = bench.engine.send(first, next, 3);
  const auto received = bench.engine.recvAnysource(in_first, 3);
  received->wait();
  sent->wait();
  EXPECT_EQ(received->sourceRank(), previous);
}

void barrier(const Bench& bench) {
  for (int i = 0; i < 20; ++i) {
    bench.world.store()->add("arrived", 1);
    bench.engine.barrier()->wait();
    EXPECT_GE(bench.world.store()->add("arrived", 0), (i + 1) * bench.size);
  }
}

void many_in_flight(const Bench& bench) {
  constexpr int kCount = 64;
  std::vector<Tensors> tensors;
  std::vector<c10::intrusive_ptr<c10d::Work>> works;
  for (int i = 0; i < kCount; ++i) {
    tensors.push_back({values(bench.rank, 1 + i * 97, at::kFloat, i)});
    if (i % 3 == 2) {
      c10d::BroadcastOptions options;
      options.rootRank = i % bench.size;
      works.push_back(bench.engine.broadcast(tensors.back(), options));
    } else {
      works.push_back(bench.engine.allreduce(tensors.back()));
    }
  }
  for (int i = kCount - 1; i >= 0; --i) {  // waited for in another order than posted
    works[i]->wait();
    EXPECT_TRUE(works[i]->isCompleted());
    EXPECT_TRUE(works[i]->isSuccess());
    const std::int64_t length = 1 + i * 97;
    const auto expected = i % 3 == 2 ? values(i % bench.size, length, at::kFloat, i)
                                     : reference(bench.values_of_all(length, at::kFloat, i),
                                                 c10d::ReduceOp::SUM, at::kFloat);
    expect_same(tensors[i][0], expected, std::to_string(i));
  }
}

// The engine may refuse other strides (World makes tensors dense), but not take them for dense.
void strides_are_kept_or_refused(const Bench& bench) {
  const auto expect = [&](const at::Tensor& whole, const at::Tensor& part, const char* what) {
    Tensors tensors = {part};
    const auto before = whole.clone();
    try {
      bench.engine.allreduce(tensors)->wait();
    } catch (const std::exception&) {
      return;
    }
    expect_same(part, at::full_like(part, bench.size), what);
    EXPECT_EQ(whole.sum().item<double>(), before.sum().item<double>() + part.sum().item<double>() -
                                              static_cast<double>(part.numel()))
        << what << ": wrote beside the tensor";
  };
  const auto transposed = at::ones({4, 6});
  expect(transposed, transposed.t(), "transposed");
  if (!bench.row.takes_gaps) return;
  const auto gaps = at::ones({4, 6});
  expect(gaps, gaps.slice(1, 0, 6, 2), "every second column");
}

// Many operations of any kind and size, in an order that all ranks draw from the same seed.
void random_operations(const Bench& bench) {
  std::mt19937 random(7);  // NOLINT: the same on all ranks
  std::vector<std::function<void()>> checks;
  const int count = test::soak(200, 10000);
  for (int i = 0; i < count; ++i) {
    const auto length = static_cast<std::int64_t>(random() % (i % 16 == 0 ? 300000 : 3000));
    const int root = static_cast<int>(random() % static_cast<unsigned>(bench.size));
    auto tensor = std::make_shared<Tensors>(Tensors{values(bench.rank, length, at::kFloat, i)});
    auto output = std::make_shared<at::Tensor>();
    c10::intrusive_ptr<c10d::Work> work;
    at::Tensor expected;
    switch (random() % 4) {
      case 0:
        work = bench.engine.allreduce(*tensor);
        expected =
            reference(bench.values_of_all(length, at::kFloat, i), c10d::ReduceOp::SUM, at::kFloat);
        break;
      case 1: {
        c10d::BroadcastOptions options;
        options.rootRank = root;
        work = bench.engine.broadcast(*tensor, options);
        expected = values(root, length, at::kFloat, i);
        break;
      }
      case 2:
        *output = at::zeros({length * bench.size});
        work = bench.engine._allgather_base(*output, (*tensor)[0]);
        expected = at::cat(bench.values_of_all(length, at::kFloat, i));
        break;
      default:
        work = bench.engine.barrier();
        break;
    }
    checks.push_back([=] {
      work->wait();
      if (expected.defined()) {
        expect_same(output->defined() ? *output : (*tensor)[0], expected, std::to_string(i));
      }
    });
    if (random() % 8 == 0) {  // let up to a few dozen pile up
      for (const auto& check : checks) check();
      checks.clear();
    }
  }
  for (const auto& check : checks) check();
}

void works_have_futures_and_results(const Bench& bench) {
  Tensors tensors = {values(bench.rank, 10, at::kFloat)};
  const auto work = bench.engine.allreduce(tensors);
  const auto future = work->getFuture();
  ASSERT_NE(future, nullptr);
  work->wait();
  future->wait();
  expect_same(future->value().toTensorVector()[0], tensors[0], "future");
  expect_same(work->result()[0], tensors[0], "result");
}

void bad_calls_throw_and_leave_the_engine_usable(const Bench& bench) {
  Tensors tensors = {at::zeros({3})};
  c10d::BroadcastOptions bad_root;
  bad_root.rootRank = bench.size;
  EXPECT_ANY_THROW(bench.engine.broadcast(tensors, bad_root)->wait());
  auto input = at::zeros({3});
  auto wrong_type = at::zeros({3 * bench.size}, at::kInt);
  EXPECT_ANY_THROW(bench.engine._allgather_base(wrong_type, input)->wait());
  auto wrong_length = at::zeros({3 * bench.size + 1});
  EXPECT_ANY_THROW(bench.engine._allgather_base(wrong_length, input)->wait());
  std::vector<Tensors> too_many = {Tensors(bench.size + 1, at::zeros({3}))};
  EXPECT_ANY_THROW(bench.engine.allgather(too_many, tensors)->wait());
  bench.engine.allreduce(tensors)->wait();
}

struct Check {
  std::string name;
  void (*run)(const Bench&);
};

const std::vector<Check> kChecks = {
    {"all_reduce", all_reduce},
    {"all_reduce_coalesced", all_reduce_coalesced},
    {"reduce", reduce},
    {"reduce_once", reduce_once},
    {"broadcast", broadcast},
    {"all_gather", all_gather},
    {"all_gather_coalesced", all_gather_coalesced},
    {"gather", gather},
    {"scatter", scatter},
    {"reduce_scatter", reduce_scatter},
    {"all_to_all", all_to_all},
    {"send_and_receive", send_and_receive},
    {"barrier", barrier},
    {"many_in_flight", many_in_flight},
    {"strides", strides_are_kept_or_refused},
    {"random_operations", random_operations},
    {"works_have_futures_and_results", works_have_futures_and_results},
    {"bad_calls", bad_calls_throw_and_leave_the_engine_usable},
};

// The ranks of one engine and size, or of several hosts that ranks of this one pretend to be: a
// letter for each rank names its host. They run all checks, because starting them takes longer.
struct Ranks {
  const EngineRow* row;
  std::string layout;

  std::string name() const {
    const bool is_one_host = layout.find_first_not_of('a') == std::string::npos;
    std::string text = row->name + "_" + (is_one_host ? std::to_string(layout.size()) : layout);
    std::ranges::replace(text, ':', '_');
    return text;
  }
};

// On a rank: runs the checks, and says of each that it holds. What comes after one that fails is
// not run: ranks may be at different places.
void run_checks(const Ranks& ranks, int rank) {
  const auto host = ranks.layout.substr(static_cast<std::size_t>(rank), 1);
  // Here, because mpirun gives all ranks the same variables.
  if (!ranks.row->layouts.empty()) ::setenv("LOCKSTEP_HOST_ID", host.c_str(), 1);
  const World world = World::join({.engine = ranks.row->name, .timeout = std::chrono::seconds(60)});
  for (const Check& check : kChecks) {
    SCOPED_TRACE(check.name);
    check.run({world, *ranks.row, check.name, *world.backend(), rank, world.size()});
    // Nobody goes on while another is still at it. Not barrier(): Gloo's throws once more what
    // an operation before it has thrown, if its thread has not yet let go of that one.
    world.all_reduce(at::zeros({1}));
    ASSERT_FALSE(testing::Test::HasFailure());
    std::cout << "holds: " << check.name << std::endl;
  }
}

test::RankResults run(const Ranks& ranks) {
  const auto size = static_cast<int>(ranks.layout.size());
  const bool is_mpi = ranks.row->name.ends_with("mpi");
  test::RankOptions options = is_mpi ? test::mpirun(size) : test::RankOptions{};
  options.deadline = std::chrono::seconds(280);  // of all checks, on a busy machine
  return test::run_ranks(
      size, [&](int rank) { run_checks(ranks, rank); }, options);
}

// One test for each check, all of them from one run of the ranks.
class Conformance : public testing::Test {
 public:
  Conformance(const Ranks& ranks, const Check& check) : ranks_(ranks), check_(check) {}

  void TestBody() override {
    static std::map<std::string, test::RankResults> runs;
    const auto [found, is_new] = runs.try_emplace(ranks_.name());
    if (is_new) found->second = run(ranks_);
    const std::string line = std::string("holds: ") + check_.name + "\n";
    // mpirun is one process for all ranks.
    const auto num_ranks = static_cast<std::ptrdiff_t>(ranks_.layout.size());
    std::ptrdiff_t num_holds = 0;
    for (const test::RankResult& result : found->second) {
      for (std::size_t at = 0; (at = result.output.find(line, at)) != std::string::npos; ++at) {
        ++num_holds;
      }
    }
    EXPECT_EQ(num_holds, num_ranks) << test::show(found->second);
    if (&check_ == &kChecks.back()) {
      EXPECT_TRUE(test::all_passed(found->second));
    }
  }

 private:
  const Ranks ranks_;
  const Check& check_;
};

// Conformance_shm_2.all_reduce, and so on.
const bool is_registered = [] {
  for (const EngineRow& row : kEngines) {
    std::vector<std::string> layouts = row.layouts;
    for (const int size : row.sizes) layouts.emplace_back(static_cast<std::size_t>(size), 'a');
    for (const std::string& layout : layouts) {
      const Ranks ranks{&row, layout};
      for (const Check& check : kChecks) {
        testing::RegisterTest(("Conformance_" + ranks.name()).c_str(), check.name.c_str(), nullptr,
                              nullptr, __FILE__, __LINE__,
                              [=, &check] { return new Conformance(ranks, check); });
      }
    }
  }
  return true;
}();

// Every engine of this build has a row here: a new one cannot escape.
TEST(ConformanceTable, HasEveryEngine) {
  for (const EngineInfo& info : engines()) {
    if (info.name == "nccl") continue;             // no machine of ours has a GPU
    EXPECT_EQ(info.unavailable, "") << info.name;  // this machine's build has all others
    const bool has_row = std::any_of(kEngines.begin(), kEngines.end(),
                                     [&](const EngineRow& row) { return row.name == info.name; });
    EXPECT_TRUE(has_row) << info.name;
  }
}

}  // namespace
}  // namespace lockstep
