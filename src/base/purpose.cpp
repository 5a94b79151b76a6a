#include "base/purpose.h"

#include <cstddef>

namespace lockstep {
namespace {

thread_local Purpose purpose_of_thread = Purpose::kNone;

}  // namespace

const char* name_of(Purpose purpose) {
  static constexpr const char* kNames[] = {"",
                                           "duplicate",
                                           "DistributedDataParallel",
                                           "SyncBatchNorm",
                                           "on_rank0",
                                           "Checkpointer",
                                           "save",
                                           "load",
                                           "split",
                                           "gather",
                                           "scatter",
                                           "all_to_all",
                                           "all_gather_uneven",
                                           "moments",
                                           "collective with gradients",
                                           "backward of a collective"};
  const auto index = static_cast<std::size_t>(purpose);
  return index < sizeof kNames / sizeof *kNames ? kNames[index] : "unknown call";
}

Purpose current_purpose() noexcept { return purpose_of_thread; }

PurposeScope::PurposeScope(Purpose purpose) noexcept : before_(purpose_of_thread) {
  if (before_ == Purpose::kNone) purpose_of_thread = purpose;
}

PurposeScope::~PurposeScope() { purpose_of_thread = before_; }

}  // namespace lockstep
