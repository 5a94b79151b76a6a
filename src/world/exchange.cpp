#include "world/exchange.h"

#include <ATen/ATen.h>
#include <lockstep/error.h>

#include <algorithm>
#include <exception>
#include <thread>

#include "base/cause.h"
#include "base/hash.h"
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
        throw PeerLostError({.rank = self.rank, .peer = peer.rank, .operation = "save"},
                            text::format("Rank {} {} while the checkpoint was written.\nOlder "
                                         "checkpoints are as they were.",
                                         peer.rank, describe_end(process)));
      }
      if (is_cancelled || std::chrono::steady_clock::now() > deadline) {
        throw TimeoutError({.rank = self.rank, .peer = peer.rank, .operation = "save"},
                           text::format("Rank {} has not written its part of the checkpoint{}.\n"
                                        "Older checkpoints are as they were.",
                                        peer.rank, is_cancelled ? "" : " before the deadline"));
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

bool is_same_everywhere(const World& world, std::uint64_t value) {
  const at::Tensor all =
      world.all_gather(at::tensor(static_cast<std::int64_t>(value), at::TensorOptions(at::kLong)));
  return all.eq(static_cast<std::int64_t>(value)).all().item<bool>();
}

void check_same_lines(const World& world, const std::vector<std::string>& lines,
                      const std::string& operation, const std::string& what,
                      const std::string& advice) {
  const std::string mine = text::format("{}", text::join(lines, "\n"));
  // All ranks answer alike: if one's hash differs from another's, nobody sees all equal.
  if (is_same_everywhere(world, hash_bytes(mine.data(), mine.size()))) return;
  std::vector<std::vector<std::string>> all;
  for (const std::string& text : exchange_texts(world, mine)) {
    auto& of_rank = all.emplace_back();
    for (std::size_t at = 0; at <= text.size();) {
      const std::size_t end = std::min(text.find('\n', at), text.size());
      of_rank.push_back(text.substr(at, end - at));
      at = end + 1;
    }
  }
  int other = 0;
  while (all[static_cast<std::size_t>(other)] == all[0]) ++other;
  const auto& theirs = all[static_cast<std::size_t>(other)];
  const auto line = [](const std::vector<std::string>& of_rank, std::size_t index) {
    return index < of_rank.size() ? of_rank[index] : std::string("nothing more");
  };
  std::size_t first = 0;
  while (line(all[0], first) == line(theirs, first)) ++first;
  throw MismatchError({.rank = world.global_rank(),
                       .peer = world.global_rank(world.rank() == other ? 0 : other),
                       .operation = operation},
                      text::format("{} differ between ranks. The first difference is\n"
                                   "  rank {}: {}\n  rank {}: {}\n{}",
                                   what, world.global_rank(0), line(all[0], first),
                                   world.global_rank(other), line(theirs, first), advice));
}

void do_together(const World& world, const std::string& operation,
                 const std::function<void()>& work) {
  std::string mine;
  try {
    work();
  } catch (...) {
    mine = to_text(cause_of(std::current_exception(), world.global_rank()));
  }
  throw_first_cause(world, exchange_texts(world, mine),
                    {.rank = world.global_rank(), .operation = operation});
}

void throw_first_cause(const World& world, const std::vector<std::string>& causes,
                       const ErrorPlace& place) {
  for (int rank = 0; rank < world.size(); ++rank) {
    const std::string& text = causes[static_cast<std::size_t>(rank)];
    if (text.empty()) continue;
    ErrorPlace here = place;
    here.peer = world.global_rank(rank);
    throw_cause(cause_from(text), here);
  }
}

}  // namespace lockstep
