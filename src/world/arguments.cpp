#include "world/arguments.h"

#include <ATen/ATen.h>
#include <ATen/MemoryOverlap.h>
#include <lockstep/error.h>

#include <algorithm>
#include <cstring>

#include "base/cause.h"
#include "base/text.h"
#include "engine/engines.h"
#include "world/pending.h"
#include "world/translate.h"

namespace lockstep {
namespace {

// What a rank tells the others of its call, as it lies in memory. 512 bytes, so that the leaders of
// hosts with one rank or two exchange it in one way (docs/architecture.md).
struct CallRecord {
  std::int64_t number = 0;
  char has_problem = 0;
  char text[503] = {};  // of the call, or of the problem
};
static_assert(sizeof(CallRecord) == 512);

CallRecord record_of(const std::function<void()>& check, const std::function<std::string()>& call,
                     std::int64_t number) {
  CallRecord record;
  record.number = number;
  std::string text;
  try {
    check();
    text = call();
  } catch (const Error& error) {
    record.has_problem = 1;
    text = error.message();
  } catch (const std::exception& error) {  // LibTorch's: the others wait for this record, too
    record.has_problem = 1;
    text = first_line(error.what());
  }
  text.copy(record.text, sizeof record.text - 1);
  return record;
}

// Before the engine refuses it: then other ranks may have heard of half of the call.
void check_device(const World& world, const char* operation, const at::Tensor& tensor) {
  if (tensor.is_cpu() || traits_of(*world.backend()).takes_devices) return;
  throw UsageError(
      {.rank = world.global_rank(), .operation = operation},
      text::format("{} was given a tensor on {}, and the engine '{}' takes those on "
                   "the CPU.\nMove it there, or join with another engine.",
                   operation, tensor.device().str(), world.backend()->getBackendName()));
}

}  // namespace

void check_dense(const World& world, const char* operation, const at::Tensor& tensor, Use use) {
  const bool is_dense = tensor.defined() && tensor.layout() == at::kStrided;
  const bool is_overlapping =
      is_dense && use == Use::kWritten && at::has_internal_overlap(tensor) == at::MemOverlap::Yes;
  if (is_dense && !is_overlapping) return check_device(world, operation, tensor);
  throw UsageError(
      {.rank = world.global_rank(), .operation = operation},
      text::format("{} was given {}.\nGive it a dense tensor of its own memory.", operation,
                   !tensor.defined() ? "an undefined tensor"
                   : is_overlapping  ? "an expanded tensor, whose elements share memory"
                                     : "a sparse tensor"));
}

void check_root(const World& world, const char* operation, int root) {
  if (root >= 0 && root < world.size()) return;
  throw UsageError({.rank = world.global_rank(), .operation = operation},
                   text::format("{} was given root {} in a world of {}.\n"
                                "Give a rank from 0 to {}.",
                                operation, root, world.size(), world.size() - 1));
}

void check_parts(const World& world, const char* operation, const at::Tensor& tensor) {
  if (tensor.dim() > 0 && tensor.size(0) == world.size()) return;
  throw UsageError({.rank = world.global_rank(), .operation = operation},
                   text::format("{} was given {}, whose first dimension is not the {} ranks of "
                                "this world.\nGive one part per rank.",
                                operation, describe_tensor(tensor), world.size()));
}

at::Tensor make_dense(const at::Tensor& tensor) {
  const at::NoGradGuard no_grad;
  return tensor.detach().resolve_conj().resolve_neg().contiguous();
}

std::function<at::Tensor()> write_back(const at::Tensor& tensor, const at::Tensor& dense) {
  return [tensor, dense] {
    if (dense.data_ptr() != tensor.data_ptr()) tensor.copy_(dense.view(tensor.sizes()));
    return tensor;
  };
}

std::vector<std::int64_t> stacked(const World& world, const at::Tensor& tensor) {
  std::vector<std::int64_t> sizes = tensor.sizes().vec();
  sizes.insert(sizes.begin(), world.size());
  return sizes;
}

std::string describe_shape(const at::Tensor& tensor) {
  return describe_shape(tensor, tensor.sizes());
}

std::string describe_shape(const at::Tensor& tensor, at::IntArrayRef sizes) {
  return text::format(
      "{}[{}]{}", c10::toString(tensor.scalar_type()), text::join(sizes, ", "),
      tensor.is_cpu() ? std::string() : " on " + c10::DeviceTypeName(tensor.device().type(), true));
}

std::vector<std::int64_t> agree_on_call(const World& world, const char* operation,
                                        const std::function<void()>& check,
                                        const std::function<std::string()>& call,
                                        std::int64_t number) {
  CallRecord mine = record_of(check, call, number);
  std::vector<CallRecord> records(static_cast<std::size_t>(world.size()), mine);
  if (world.size() > 1) {
    const at::Tensor all = world.all_gather(at::from_blob(&mine, {sizeof(CallRecord)}, at::kByte));
    std::memcpy(records.data(), all.const_data_ptr(), all.nbytes());
  }
  const auto global = [&](const CallRecord& record) {
    return world.global_rank(static_cast<int>(&record - records.data()));
  };
  const ErrorPlace place{.rank = world.global_rank(), .operation = operation};
  for (const CallRecord& record : records) {
    if (record.has_problem == 0) continue;
    throw_cause({.kind = ErrorKind::kUsage,
                 .rank = global(record),
                 .peer = global(record) == place.rank ? -1 : global(record),
                 .operation = operation,
                 .message = record.text},
                place);
  }
  std::vector<std::int64_t> numbers;
  for (const CallRecord& record : records) {
    numbers.push_back(record.number);
    if (std::strcmp(record.text, records[0].text) == 0) continue;
    ErrorPlace here = place;
    here.peer = global(record) == place.rank ? global(records[0]) : global(record);
    throw MismatchError(
        here,
        text::format("{} was given {} on rank {}, but {} on rank {}.\nGive tensors of the "
                     "same sizes and type, and the same options, on all ranks.",
                     operation, records[0].text, global(records[0]), record.text, global(record)));
  }
  return numbers;
}

}  // namespace lockstep
