// Purpose: what the caller asked for, if that takes several operations, such as save(). It travels
// with each of them, so that errors on all ranks name it.
//
// Threading: a thread has its own.
#pragma once

#include <cstdint>

namespace lockstep {

enum class Purpose : std::uint8_t {
  kNone,  // the operation itself
  kDuplicate,
  kWrap,
  kSyncBatchNorm,
  kOnRank0,
  kCheckpointer,
  kSave,
  kLoad,
  kSplit,
  kGather,
  kScatter,
  kAllToAll,
  kAllGatherUneven,
  kMoments,
  kWithGradients,
  kBackward,
};
const char* name_of(Purpose purpose);

// Of this thread.
Purpose current_purpose() noexcept;

// Sets it as long as this lives. The outermost counts: that is what the caller called.
class PurposeScope {
 public:
  explicit PurposeScope(Purpose purpose) noexcept;
  ~PurposeScope();
  PurposeScope(const PurposeScope&) = delete;
  PurposeScope& operator=(const PurposeScope&) = delete;

 private:
  const Purpose before_;
};

}  // namespace lockstep
