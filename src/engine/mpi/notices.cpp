#include "engine/mpi/notices.h"
#include "base/text.h"

#include "base/cause.h"
#include "base/process.h"
#include "engine/hosts.h"

namespace lockstep {
namespace {

// A notice is a Cause as a text, or this and the number of operations that the rank has done.
constexpr std::string_view kLeft = "left ";

constexpr const char* kAny = "mpi/notice";  // there once any rank has put down a notice
std::string key_of(int rank) { return text::format("{}/{}", kAny, rank); }

}  // namespace

MpiNotices::MpiNotices(const EngineContext& context)
    : rank_(context.rank), members_(context.members), store_(context.store->clone()) {}

void MpiNotices::tell(const std::string& text) noexcept {
  try {
    if (members_.size() == 1) return;
    store_->set(key_of(rank_), text);
    store_->set(kAny, "yes");
  } catch (...) {  // NOLINT: whoever served the store is gone, and the others see that
  }
}

void MpiNotices::tell_failure(const std::exception_ptr& error) noexcept {
  tell(to_text(cause_of(error, global_rank(rank_))));
}

void MpiNotices::tell_leaving(std::uint64_t num_done) noexcept {
  tell(text::format("{}{}", kLeft, num_done));
}

std::optional<std::string> MpiNotices::read(const std::string& key) noexcept {
  try {
    if (store_->check({key})) return store_->get_to_str(key);
  } catch (...) {  // NOLINT: then there is no notice
  }
  return std::nullopt;
}

ErrorPlace MpiNotices::place(int peer, const Activity& activity) const {
  return {.rank = global_rank(rank_), .peer = global_rank(peer), .operation = activity.operation};
}

void MpiNotices::check_processes(const std::vector<int>& peers, const Activity& activity) const {
  for (const int peer : peers) {
    if (seems_alive(member(peer), member(rank_))) continue;
    const ProcessId process{.pid = member(peer).pid, .start_time = member(peer).start_time};
    throw PeerLostError(
        place(peer, activity),
        text::format("{} lost rank {} (pid {}), which {}.\nLook at the last lines of rank {}, fix "
                     "the cause and restart the job.",
                     activity.text, global_rank(peer), process.pid, describe_end(process),
                     global_rank(peer)));
  }
}

void MpiNotices::check_store(const std::vector<int>& peers, std::uint64_t number,
                             const Activity& activity) {
  if (!read(kAny)) return;
  for (const int peer : peers) {
    const auto text = read(key_of(peer));
    if (!text) continue;
    if (!text->starts_with(kLeft)) {
      throw_cause(cause_from(*text), {.rank = global_rank(rank_), .operation = activity.operation});
    }
    if (std::stoull(text->substr(kLeft.size())) < number) {
      throw PeerLostError(place(peer, activity),
                          text::format("{} waits for {}, which has left this world.\nMake the same "
                                       "calls on all ranks before the world ends.",
                                       activity.text, describe(member(peer))));
    }
  }
}

}  // namespace lockstep
