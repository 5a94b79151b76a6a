#include "backend/mpi_news.h"

#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "base/cause.h"
#include "base/process.h"

namespace lockstep {
namespace {

using Json = nlohmann::json;

constexpr const char* kAny = "mpi/news";  // there once any rank has put down something
std::string key_of(int rank) { return fmt::format("mpi/news/{}", rank); }

}  // namespace

MpiNews::MpiNews(const EngineContext& context)
    : rank_(context.rank), members_(context.members), store_(context.store->clone()) {}

void MpiNews::tell(const std::string& text) noexcept {
  try {
    if (members_.size() == 1) return;
    store_->set(key_of(rank_), text);
    store_->set(kAny, "yes");
  } catch (...) {  // NOLINT: whoever served the store is gone, and the others see that
  }
}

void MpiNews::tell_failure(const std::exception_ptr& error) noexcept {
  const Cause cause = cause_of(error, name(rank_));
  tell(Json{{"kind", cause.kind}, {"peer", cause.peer}, {"message", cause.message}}.dump());
}

void MpiNews::tell_farewell(std::uint64_t num_done) noexcept {
  tell(Json{{"done", num_done}}.dump());
}

std::optional<std::string> MpiNews::read(const std::string& key) noexcept {
  try {
    if (store_->check({key})) return store_->get_to_str(key);
  } catch (...) {  // NOLINT: no news
  }
  return std::nullopt;
}

ErrorPlace MpiNews::place(int peer, const std::string& what) const {
  return {.rank = name(rank_), .peer = name(peer), .operation = what.substr(0, what.find(' '))};
}

void MpiNews::check_processes(const std::vector<int>& peers, const std::string& what) const {
  for (const int peer : peers) {
    const ProcessId process{.pid = member(peer).pid, .start_time = member(peer).start_time};
    if (member(peer).host_id != member(rank_).host_id || is_alive(process)) continue;
    throw PeerLostError(
        place(peer, what),
        fmt::format("{} lost rank {} (pid {}), which {}.\nLook at the last lines of rank {}, mend "
                    "the cause, and start the job again.",
                    what, name(peer), process.pid, describe_end(process), name(peer)));
  }
}

void MpiNews::check_store(const std::vector<int>& peers, std::uint64_t number,
                          const std::string& what) {
  if (!read(kAny)) return;
  for (const int peer : peers) {
    const auto text = read(key_of(peer));
    if (!text) continue;
    const Json news = Json::parse(*text);
    if (news.contains("message")) {
      throw_because(fmt::format("rank {}", name(peer)),
                    {news.at("kind"), news.at("peer"), news.at("message")}, place(peer, what));
    }
    if (news.at("done").get<std::uint64_t>() < number) {
      throw PeerLostError(place(peer, what),
                          fmt::format("{} waits for rank {} (host {}, pid {}), which has left this "
                                      "world.\nMake the same calls on all ranks before the world "
                                      "ends.",
                                      what, name(peer), member(peer).host, member(peer).pid));
    }
  }
}

}  // namespace lockstep
