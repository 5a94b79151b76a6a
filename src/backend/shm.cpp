// The shared-memory engine: a c10d::Backend over shm::Group, for all ranks of one host.
//
// Work moves on in isCompleted() and wait(), on the caller's thread (shm_work.h): nothing runs
// behind the caller's back.
// Threading: any thread may call; the group has its own lock.

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <lockstep/error.h>

#include <atomic>
#include <functional>
#include <memory>

#include "backend/engines.h"
#include "backend/shm_work.h"
#include "shm/group.h"

namespace lockstep {
namespace {

using Tensors = std::vector<at::Tensor>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;
using shm::DataType;
using shm::Kind;
using shm::Operation;
using shm::Parts;
using shm::Reduction;

[[noreturn]] void refuse(int rank, const char* operation, const std::string& message) {
  throw UsageError({.rank = rank, .operation = operation}, message);
}

// kBytes for what cannot be reduced (8-bit floats and the like) but can be moved.
DataType type_of(at::ScalarType type) {
  switch (type) {
    case at::kFloat:
      return DataType::kF32;
    case at::kDouble:
      return DataType::kF64;
    case at::kHalf:
      return DataType::kF16;
    case at::kBFloat16:
      return DataType::kBF16;
    case at::kChar:
      return DataType::kI8;
    case at::kShort:
      return DataType::kI16;
    case at::kInt:
      return DataType::kI32;
    case at::kLong:
      return DataType::kI64;
    case at::kByte:
      return DataType::kU8;
    case at::kUInt16:
      return DataType::kU16;
    case at::kUInt32:
      return DataType::kU32;
    case at::kUInt64:
      return DataType::kU64;
    case at::kBool:
      return DataType::kBool;
    case at::kComplexFloat:
      return DataType::kC64;
    case at::kComplexDouble:
      return DataType::kC128;
    default:
      return DataType::kBytes;
  }
}

Reduction reduction_of(const c10d::ReduceOp& op) {
  switch (op.op_) {
    case c10d::ReduceOp::SUM:
      return Reduction::kSum;
    case c10d::ReduceOp::AVG:
      return Reduction::kAverage;
    case c10d::ReduceOp::PRODUCT:
      return Reduction::kProduct;
    case c10d::ReduceOp::MIN:
      return Reduction::kMin;
    case c10d::ReduceOp::MAX:
      return Reduction::kMax;
    case c10d::ReduceOp::BAND:
      return Reduction::kAnd;
    case c10d::ReduceOp::BOR:
      return Reduction::kOr;
    case c10d::ReduceOp::BXOR:
      return Reduction::kXor;
    case c10d::ReduceOp::PREMUL_SUM:
      return Reduction::kScaledSum;
    default:
      return Reduction::kNone;
  }
}

double factor_of(const c10d::ReduceOp& op) {
  if (op.op_ != c10d::ReduceOp::PREMUL_SUM) return 1;
  const auto* given = static_cast<const c10d::PreMulSumSupplement*>(op.supplement_.get());
  return given->tensor_factor.defined() ? given->tensor_factor.item<double>()
                                        : given->double_factor;
}

std::byte* data_of(const at::Tensor& tensor) { return static_cast<std::byte*>(tensor.data_ptr()); }

class Shm : public c10d::Backend {
 public:
  explicit Shm(std::shared_ptr<shm::Group> group)
      : c10d::Backend(group->rank(), group->size()), group_(std::move(group)) {}

  const std::string getBackendName() const override { return "shm"; }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return sequence_; }
  bool supportsTensorAlloc(c10::DeviceIndex) override { return true; }

  at::Tensor allocateTensor(long size, at::TensorOptions options) override {
    if (!options.device().is_cpu()) {
      refuse(rank_, "allocateTensor",
             "Shared memory holds tensors on the CPU only.\nUse device cpu.");
    }
    const std::size_t bytes = static_cast<std::size_t>(size) * options.dtype().itemsize();
    std::byte* memory = group_->allocate(bytes);
    // The memory outlives the engine if the tensor does.
    return at::from_blob(
        memory, {size}, [group = group_, memory](void*) { group->release(memory); }, options);
  }

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    check_reduction("all_reduce", options.reduceOp, tensors);
    Builder builder(*this, c10d::OpType::ALLREDUCE, tensors);
    for (const at::Tensor& tensor : tensors) {
      const at::Tensor dense = builder.read_and_write(tensor);
      Operation operation = of(Kind::kAllReduce, dense, options.reduceOp);
      operation.input.base = operation.output.base = data_of(dense);
      builder.start(std::move(operation));
    }
    return builder.work();
  }
  WorkPtr allreduce_coalesced(Tensors& tensors,
                              const c10d::AllreduceCoalescedOptions& options) override {
    return allreduce(tensors, options);
  }

  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    check_reduction("reduce", options.reduceOp, tensors);
    Builder builder(*this, c10d::OpType::REDUCE, tensors);
    for (const at::Tensor& tensor : tensors) {
      const bool is_root = rank_ == options.rootRank;
      const at::Tensor dense = is_root ? builder.read_and_write(tensor) : builder.read(tensor);
      Operation operation = of(Kind::kReduce, dense, options.reduceOp);
      operation.root = static_cast<int>(options.rootRank);
      operation.input.base = data_of(dense);
      if (is_root) operation.output.base = data_of(dense);
      builder.start(std::move(operation));
    }
    return builder.work();
  }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    Builder builder(*this, c10d::OpType::BROADCAST, tensors);
    for (const at::Tensor& tensor : tensors) {
      const bool is_root = rank_ == options.rootRank;
      const at::Tensor dense = is_root ? builder.read(tensor) : builder.read_and_write(tensor);
      Operation operation = of(Kind::kBroadcast, dense);
      operation.root = static_cast<int>(options.rootRank);
      (is_root ? operation.input : operation.output).base = data_of(dense);
      builder.start(std::move(operation));
    }
    return builder.work();
  }

  WorkPtr barrier(const c10d::BarrierOptions&) override {
    Builder builder(*this, c10d::OpType::BARRIER, {});
    builder.start({});
    return builder.work();
  }

  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                    const c10d::AllgatherOptions&) override {
    check_lists("all_gather", outputs, inputs);
    Builder builder(*this, c10d::OpType::ALLGATHER, flatten(outputs));
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      Operation operation = of(Kind::kAllGather, inputs[i]);
      operation.input.base = data_of(builder.read(inputs[i]));
      operation.output = builder.write(outputs[i]);
      builder.start(std::move(operation));
    }
    return builder.work();
  }
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input,
                          const c10d::AllgatherOptions& options) override {
    Tensors outputs = {output};
    Tensors inputs = {input};
    return allgather_into_tensor_coalesced(outputs, inputs, options);
  }
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions&) override {
    Builder builder(*this, c10d::OpType::_ALLGATHER_BASE, outputs);
    check_pairs("all_gather", outputs, inputs);
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      check_same("all_gather", outputs[i], inputs[i], size_, 1);
      Operation operation = of(Kind::kAllGather, inputs[i]);
      operation.input.base = data_of(builder.read(inputs[i]));
      operation.output = {.base = data_of(builder.read_and_write(outputs[i])),
                          .stride = inputs[i].nbytes()};
      builder.start(std::move(operation));
    }
    return builder.work();
  }

  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs,
                 const c10d::GatherOptions& options) override {
    const bool is_root = rank_ == options.rootRank;
    if (is_root) {
      check_lists("gather", outputs, inputs);
    } else if (!outputs.empty()) {
      refuse(rank_, "gather",
             "gather was given outputs on a rank that is not the root.\nGive none.");
    }
    Builder builder(*this, c10d::OpType::GATHER, flatten(outputs));
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      Operation operation = of(Kind::kGather, inputs[i]);
      operation.root = static_cast<int>(options.rootRank);
      operation.input.base = data_of(builder.read(inputs[i]));
      if (is_root) operation.output = builder.write(outputs[i]);
      builder.start(std::move(operation));
    }
    return builder.work();
  }

  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                  const c10d::ScatterOptions& options) override {
    const bool is_root = rank_ == options.rootRank;
    if (is_root) {
      check_lists("scatter", inputs, outputs);
    } else if (!inputs.empty()) {
      refuse(rank_, "scatter",
             "scatter was given inputs on a rank that is not the root.\nGive none.");
    }
    Builder builder(*this, c10d::OpType::SCATTER, outputs);
    for (std::size_t i = 0; i < outputs.size(); ++i) {
      Operation operation = of(Kind::kScatter, outputs[i]);
      operation.root = static_cast<int>(options.rootRank);
      if (is_root) operation.input = builder.read(inputs[i]);
      operation.output.base = data_of(builder.read_and_write(outputs[i]));
      builder.start(std::move(operation));
    }
    return builder.work();
  }

  WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                         const c10d::ReduceScatterOptions& options) override {
    check_lists("reduce_scatter", inputs, outputs);
    check_reduction("reduce_scatter", options.reduceOp, outputs);
    Builder builder(*this, c10d::OpType::REDUCE_SCATTER, outputs);
    for (std::size_t i = 0; i < outputs.size(); ++i) {
      Operation operation = of(Kind::kReduceScatter, outputs[i], options.reduceOp);
      operation.input = builder.read(inputs[i]);
      operation.output.base = data_of(builder.read_and_write(outputs[i]));
      builder.start(std::move(operation));
    }
    return builder.work();
  }
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& options) override {
    Tensors outputs = {output};
    Tensors inputs = {input};
    return reduce_scatter_tensor_coalesced(outputs, inputs, options);
  }
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& options) override {
    check_reduction("reduce_scatter", options.reduceOp, outputs);
    check_pairs("reduce_scatter", outputs, inputs);
    Builder builder(*this, c10d::OpType::_REDUCE_SCATTER_BASE, outputs);
    for (std::size_t i = 0; i < outputs.size(); ++i) {
      check_same("reduce_scatter", outputs[i], inputs[i], 1, size_);
      Operation operation = of(Kind::kReduceScatter, outputs[i], options.reduceOp);
      operation.input = {.base = data_of(builder.read(inputs[i])), .stride = outputs[i].nbytes()};
      operation.output.base = data_of(builder.read_and_write(outputs[i]));
      builder.start(std::move(operation));
    }
    return builder.work();
  }

  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions&) override {
    check_count("all_to_all", outputs.size());
    check_count("all_to_all", inputs.size());
    Builder builder(*this, c10d::OpType::ALLTOALL, outputs);
    start_all_to_all(builder, inputs, outputs);
    return builder.work();
  }
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                        std::vector<int64_t>& input_splits, const c10d::AllToAllOptions&) override {
    Builder builder(*this, c10d::OpType::ALLTOALL_BASE, {output});
    start_all_to_all(builder, split_parts(builder.read(input), input_splits),
                     split_parts(builder.read_and_write(output), output_splits));
    return builder.work();
  }

  WorkPtr send(Tensors& tensors, int peer, int tag) override {
    Builder builder(*this, c10d::OpType::SEND, tensors);
    const at::Tensor dense = builder.read(only_one("send", tensors));
    builder.add(group_->send(data_of(dense), dense.nbytes(), peer, tag));
    return builder.work();
  }
  WorkPtr recv(Tensors& tensors, int peer, int tag) override { return receive(tensors, peer, tag); }
  WorkPtr recvAnysource(Tensors& tensors, int tag) override {
    return receive(tensors, shm::kAnyRank, tag);
  }

 private:
  // Collects the operations of one call, and what must happen to tensors that are not dense:
  // they are read from a dense copy, and written back from one at the end.
  class Builder {
   public:
    Builder(Shm& engine, c10d::OpType type, Tensors results)
        : engine_(engine), type_(type), results_(std::move(results)) {}

    at::Tensor read(const at::Tensor& tensor) {
      check(tensor);
      const at::NoGradGuard no_grad;
      kept_.push_back(tensor.contiguous());
      return kept_.back();
    }
    at::Tensor read_and_write(const at::Tensor& tensor) {
      const at::Tensor dense = read(tensor);
      if (dense.data_ptr() != tensor.data_ptr()) copies_.emplace_back(tensor, dense);
      return dense;
    }
    Parts read(const Tensors& tensors) {
      Parts parts;
      for (const at::Tensor& tensor : tensors) parts.list.push_back(data_of(read(tensor)));
      return parts;
    }
    Parts write(const Tensors& tensors) {
      Parts parts;
      for (const at::Tensor& tensor : tensors)
        parts.list.push_back(data_of(read_and_write(tensor)));
      return parts;
    }

    void start(Operation operation) {
      add(engine_.group_->start(std::move(operation)));
      ++engine_.sequence_;
    }
    void add(std::shared_ptr<shm::Request> request) { requests_.push_back(std::move(request)); }

    WorkPtr work() {
      std::function<void()> after;
      if (!copies_.empty() || !kept_.empty()) {
        after = [copies = std::move(copies_), kept = std::move(kept_)] {
          const at::NoGradGuard no_grad;
          for (const auto& [tensor, dense] : copies) tensor.copy_(dense);
        };
      }
      return c10::make_intrusive<ShmWork>(engine_.group_, engine_.driver_, type_, engine_.rank_,
                                          std::move(results_), std::move(requests_),
                                          std::move(after));
    }

   private:
    void check(const at::Tensor& tensor) const {
      if (tensor.defined() && tensor.layout() == at::kStrided && tensor.device().is_cpu()) return;
      refuse(engine_.rank_, c10d::opTypeToString(type_).c_str(),
             "The engine \"shm\" takes dense tensors on the CPU.\nMove the tensor there, or choose "
             "another engine.");
    }

    Shm& engine_;
    c10d::OpType type_;
    Tensors results_;
    Tensors kept_;
    std::vector<std::pair<at::Tensor, at::Tensor>> copies_;
    std::vector<std::shared_ptr<shm::Request>> requests_;
  };

  WorkPtr receive(const Tensors& tensors, int peer, int tag) {
    Builder builder(*this, c10d::OpType::RECV, tensors);
    const at::Tensor dense = builder.read_and_write(only_one("recv", tensors));
    builder.add(group_->receive(data_of(dense), dense.nbytes(), peer, tag));
    return builder.work();
  }

  static Operation of(Kind kind, const at::Tensor& part,
                      const std::optional<c10d::ReduceOp>& op = std::nullopt) {
    Operation operation;
    operation.kind = kind;
    operation.type = type_of(part.scalar_type());
    operation.count =
        operation.type == DataType::kBytes ? part.nbytes() : static_cast<std::size_t>(part.numel());
    if (op) {
      operation.reduction = reduction_of(*op);
      operation.factor = factor_of(*op);
    }
    return operation;
  }

  static Tensors flatten(const std::vector<Tensors>& lists) {
    Tensors flat;
    for (const Tensors& list : lists) flat.insert(flat.end(), list.begin(), list.end());
    return flat;
  }

  void check_reduction(const char* operation, const c10d::ReduceOp& op,
                       const Tensors& tensors) const {
    for (const at::Tensor& tensor : tensors) {
      if (!shm::can_reduce(type_of(tensor.scalar_type()), reduction_of(op))) {
        refuse(rank_, operation,
               fmt::format("{} was given {} elements and a reduction that they do not have ({}).\n"
                           "Use another type or reduction.",
                           operation, c10::toString(tensor.scalar_type()),
                           shm::name_of(reduction_of(op))));
      }
    }
  }
  void check_count(const char* operation, std::size_t count) const {
    if (count == static_cast<std::size_t>(size_)) return;
    refuse(rank_, operation,
           fmt::format("{} was given a list of {} tensors for {} ranks.\n"
                       "Give one for each rank.",
                       operation, count, size_));
  }
  void check_pairs(const char* operation, const Tensors& outputs, const Tensors& inputs) const {
    if (outputs.size() == inputs.size()) return;
    refuse(rank_, operation,
           fmt::format("{} was given {} outputs for {} inputs.\nGive one each.", operation,
                       outputs.size(), inputs.size()));
  }
  void check_same(const char* operation, const at::Tensor& a, const at::Tensor& b, int64_t a_parts,
                  int64_t b_parts) const {
    if (a.scalar_type() == b.scalar_type() && a.numel() * b_parts == b.numel() * a_parts) return;
    refuse(rank_, operation,
           fmt::format("{}: {} elements of {} do not match {} elements of {} over {} ranks.\n"
                       "Use the same type, and one part per rank.",
                       operation, a.numel(), c10::toString(a.scalar_type()), b.numel(),
                       c10::toString(b.scalar_type()), size_));
  }
  // Each list has a part per rank, like the one tensor it belongs to.
  void check_lists(const char* operation, const std::vector<Tensors>& lists,
                   const Tensors& singles) const {
    if (lists.size() != singles.size()) {
      refuse(rank_, operation,
             fmt::format("{} was given {} lists for {} tensors.\nGive one each.", operation,
                         lists.size(), singles.size()));
    }
    for (std::size_t i = 0; i < lists.size(); ++i) {
      check_count(operation, lists[i].size());
      for (const at::Tensor& part : lists[i]) check_same(operation, part, singles[i], 1, 1);
    }
  }
  const at::Tensor& only_one(const char* operation, const Tensors& tensors) const {
    if (tensors.size() == 1) return tensors.front();
    refuse(rank_, operation,
           fmt::format("{} was given {} tensors.\nGive one.", operation, tensors.size()));
  }

  // The parts of a tensor along its first dimension, by the given splits or in equal parts.
  Tensors split_parts(const at::Tensor& tensor, const std::vector<int64_t>& splits) const {
    if (splits.empty()) {
      if (tensor.dim() == 0 || tensor.size(0) % size_ != 0) {
        refuse(rank_, "all_to_all",
               fmt::format("A first dimension of {} cannot be split over {} ranks.\n"
                           "Give the sizes of the parts.",
                           tensor.dim() == 0 ? 0 : tensor.size(0), size_));
      }
      return tensor.split(std::max<int64_t>(tensor.size(0) / size_, 1)).size() ==
                     static_cast<std::size_t>(size_)
                 ? Tensors(tensor.split(std::max<int64_t>(tensor.size(0) / size_, 1)))
                 : Tensors(static_cast<std::size_t>(size_), tensor);  // all are empty
    }
    check_count("all_to_all", splits.size());
    return tensor.split_with_sizes(splits);
  }

  // Parts may differ in size: ranks first tell each other how much they send to whom, and then all
  // count in the largest part.
  void start_all_to_all(Builder& builder, const Tensors& inputs, const Tensors& outputs) {
    std::vector<int64_t> counts;
    for (const at::Tensor& input : inputs) counts.push_back(input.numel());
    std::vector<int64_t> all(counts.size() * counts.size());
    Operation tell;
    tell.kind = Kind::kAllGather;
    tell.type = DataType::kI64;
    tell.count = counts.size();
    tell.input.base = reinterpret_cast<std::byte*>(counts.data());
    tell.output = {.base = reinterpret_cast<std::byte*>(all.data()), .stride = counts.size() * 8};
    group_->wait(*group_->start(std::move(tell)));

    Operation operation = of(Kind::kAllToAll, inputs.front());
    const std::size_t unit = operation.type == DataType::kBytes ? inputs.front().element_size() : 1;
    operation.count = 0;
    for (const int64_t count : all) {
      operation.count = std::max(operation.count, static_cast<std::size_t>(count) * unit);
    }
    operation.input = builder.read(inputs);
    operation.output = builder.write(outputs);
    for (std::size_t peer = 0; peer < outputs.size(); ++peer) {
      const int64_t sent = all[peer * counts.size() + static_cast<std::size_t>(rank_)];
      if (sent != outputs[peer].numel() || outputs[peer].scalar_type() != inputs[0].scalar_type()) {
        throw MismatchError(
            {.rank = rank_, .peer = static_cast<int>(peer), .operation = "all_to_all"},
            fmt::format("Rank {} sends {} elements, but rank {} has room for {}.\n"
                        "Make the splits of both sides equal.",
                        peer, sent, rank_, outputs[peer].numel()));
      }
      operation.input.counts.push_back(static_cast<std::size_t>(counts[peer]) * unit);
      operation.output.counts.push_back(static_cast<std::size_t>(sent) * unit);
    }
    builder.start(std::move(operation));
  }

  const std::shared_ptr<shm::Group> group_;
  const std::shared_ptr<FutureDriver> driver_ = std::make_shared<FutureDriver>();
  std::atomic<uint64_t> sequence_{0};
};

}  // namespace

Backend make_shm(const EngineContext& context) {
  int round = 0;
  const shm::Exchange exchange = [&](const std::string& mine) {
    const std::string prefix = fmt::format("shm/{}/", round++);
    context.store->set(prefix + std::to_string(context.rank), mine);
    std::vector<std::string> keys;
    std::vector<std::string> all;
    for (int peer = 0; peer < context.size(); ++peer) keys.push_back(prefix + std::to_string(peer));
    context.store->wait(keys, context.connect_timeout);
    for (const std::string& key : keys) all.push_back(context.store->get_to_str(key));
    return all;
  };
  auto group = std::make_shared<shm::Group>(
      shm::GroupOptions{.rank = context.rank, .size = context.size(), .timeout = context.timeout},
      exchange);
  return c10::make_intrusive<Shm>(std::move(group));
}

}  // namespace lockstep
