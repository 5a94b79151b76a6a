#include "world/exchange.h"

#include <ATen/ATen.h>
#include <lockstep/error.h>

#include <algorithm>
#include <thread>

#include "base/cause.h"
#include "base/process.h"
#include "base/text.h"
#include "engine/hosts.h"

namespace lockstep {
namespace {

constexpr auto kPoll = std::chrono::milliseconds(20);

}  // namespace

std::vector<std::string> exchange_texts(const World& world, const std::string& mine) {
  const at::Tensor sizes = world.all_gather(
      at::tensor(static_cast<std::int64_t>(mine.size()), at::TensorOptions(at::kLong)));
  const auto longest = sizes.max().item<std::int64_t>();
  at::Tensor padded = at::zeros({longest}, at::kByte);
  std::ranges::copy(mine, static_cast<char*>(padded.mutable_data_ptr()));
  const at::Tensor all = world.all_gather(padded);
  std::vector<std::string> texts;
  for (int rank = 0; rank < world.size(); ++rank) {
    const at::Tensor row = all[rank];
    texts.emplace_back(static_cast<const char*>(row.const_data_ptr()),
                       static_cast<std::size_t>(sizes[rank].item<std::int64_t>()));
  }
  return texts;
}

std::vector<std::string> exchange_by_store(const World& world, const std::string& key,
                                           const std::string& mine,
                                           const std::atomic<bool>& is_cancelled) {
  const auto deadline = std::chrono::steady_clock::now() + world.store()->getTimeout();
  const auto& store = world.store();  // nothing waits in it, so nobody else does
  const auto key_of = [&](int rank) { return text::format("{}/{}", key, rank); };
  store->set(key_of(world.rank()), mine);
  std::vector<std::string> all;
  for (int rank = 0; rank < world.size(); ++rank) {
    const Member& peer = world.members()[static_cast<std::size_t>(rank)];
    const Member& self = world.members()[static_cast<std::size_t>(world.rank())];
    const ProcessId process{.pid = peer.pid, .start_time = peer.start_time};
    // What it has told is there before it is seen to be dead.
    for (bool is_dead = false; !store->check({key_of(rank)});) {
      if (is_dead) {
        throw PeerLostError({.rank = world.rank(), .peer = rank, .operation = "save"},
                            text::format("Rank {} {} while the checkpoint was written.\nOlder "
                                         "checkpoints are as they were.",
                                         rank, describe_end(process)));
      }
      if (is_cancelled || std::chrono::steady_clock::now() > deadline) {
        throw TimeoutError({.rank = world.rank(), .peer = rank, .operation = "save"},
                           text::format("Rank {} has not written its part of the checkpoint{}.\n"
                                        "Older checkpoints are as they were.",
                                        rank, is_cancelled ? "" : " before the deadline"));
      }
      is_dead = !seems_alive(peer, self);
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

void throw_first_cause(const World& world, const std::vector<std::string>& causes,
                       const ErrorPlace& place) {
  for (int rank = 0; rank < world.size(); ++rank) {
    const std::string& text = causes[static_cast<std::size_t>(rank)];
    if (text.empty()) continue;
    ErrorPlace here = place;
    here.peer = rank;
    throw_cause(cause_from(text), here);
  }
}

}  // namespace lockstep
