#include "checkpoint/exchange.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <lockstep/error.h>

#include <thread>

#include "base/process.h"

namespace lockstep {
namespace {

constexpr auto kPoll = std::chrono::milliseconds(20);

}  // namespace

std::vector<std::string> exchange_by_store(const World& world, const std::string& key,
                                           const std::string& mine,
                                           const std::atomic<bool>& is_cancelled) {
  const auto deadline = std::chrono::steady_clock::now() + world.store()->getTimeout();
  const auto& store = world.store();  // nothing waits in it, so nobody else does
  const auto key_of = [&](int rank) { return fmt::format("{}/{}", key, rank); };
  store->set(key_of(world.rank()), mine);
  std::vector<std::string> all;
  for (int rank = 0; rank < world.size(); ++rank) {
    const Member& peer = world.members()[static_cast<std::size_t>(rank)];
    const bool is_here =
        peer.host_id == world.members()[static_cast<std::size_t>(world.rank())].host_id;
    const ProcessId process{.pid = peer.pid, .start_time = peer.start_time};
    // What it has told is there before it is seen to be dead.
    for (bool is_dead = false; !store->check({key_of(rank)});) {
      if (is_dead) {
        throw PeerLostError({.rank = world.rank(), .peer = rank, .operation = "save"},
                            fmt::format("Rank {} {} while the checkpoint was written.\nOlder "
                                        "checkpoints are as they were.",
                                        rank, describe_end(process)));
      }
      if (is_cancelled || std::chrono::steady_clock::now() > deadline) {
        throw TimeoutError({.rank = world.rank(), .peer = rank, .operation = "save"},
                           fmt::format("Rank {} has not written its part of the checkpoint{}.\n"
                                       "Older checkpoints are as they were.",
                                       rank, is_cancelled ? "" : " before the deadline"));
      }
      is_dead = is_here && !is_alive(process);
      if (!is_dead) std::this_thread::sleep_for(kPoll);
    }
    const auto bytes = store->get(key_of(rank));
    all.emplace_back(bytes.begin(), bytes.end());
  }
  return all;
}

std::string share_text(const World& world, const std::string& text, int root) {
  const std::int64_t mine = static_cast<std::int64_t>(text.size());
  const auto size = world.broadcast(at::scalar_tensor(mine, at::kLong), root).item<std::int64_t>();
  std::string shared =
      world.rank() == root ? text : std::string(static_cast<std::size_t>(size), ' ');
  if (size > 0) world.broadcast(at::from_blob(shared.data(), {size}, at::kByte), root);
  return shared;
}

}  // namespace lockstep
