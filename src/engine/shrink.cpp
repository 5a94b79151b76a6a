// c10d's shrink: an engine of the ranks that are left.

#include <lockstep/error.h>

#include <set>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "base/text.h"
#include "engine/engines.h"
#include "engine/tensor_engine.h"

namespace lockstep {

c10::intrusive_ptr<c10d::Backend> TensorEngine::shrink(
    const std::vector<int64_t>& ranks_to_exclude, int /*shrink_flags*/,
    const c10::intrusive_ptr<Options>& /*opts_override*/) {
  const std::set<int64_t> excluded(ranks_to_exclude.begin(), ranks_to_exclude.end());
  const ErrorPlace place{.rank = checks_.rank, .operation = "shrink"};
  const auto refuse = [&](const std::string& why) {
    throw UsageError(place, text::format("shrink was asked to leave out rank {} of {}: {}.\nGive "
                                         "ranks that are lost or not wanted, each once, and call "
                                         "it on the others.",
                                         text::join(ranks_to_exclude, ", "), getSize(), why));
  };
  if (!context_) {
    throw UsageError(place, text::format("The engine {} cannot leave out ranks.\nUse shm or "
                                         "hierarchical.",
                                         name_));
  }
  if (excluded.empty()) refuse("there is none");
  if (excluded.size() != ranks_to_exclude.size()) refuse("one is there twice");
  if (*excluded.begin() < 0 || *excluded.rbegin() >= getSize()) refuse("there is no such rank");
  if (excluded.contains(getRank())) refuse("this is one of them");
  EngineContext left = *context_;
  left.members.clear();
  for (int rank = 0; rank < getSize(); ++rank) {
    if (excluded.contains(rank)) continue;
    if (rank == getRank()) left.rank = static_cast<int>(left.members.size());
    left.members.push_back(context_->members[static_cast<std::size_t>(rank)]);
  }
  // Ranks that leave out others do not meet there, and run into the deadline.
  left.store = c10::make_intrusive<c10d::PrefixStore>(
      text::format("shrink{}/{}", num_shrunk_++, text::join(excluded, ",")), context_->store);
  left.connect_timeout = context_->timeout;
  left.channel.reset();
  left.has_ended = nullptr;  // it is known who is lost
  const std::string engine = left.size() == 1 ? "solo" : left.is_one_host() ? "shm" : name_;
  return make_engine(engine, left);
}

}  // namespace lockstep
