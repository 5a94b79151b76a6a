// MpiNotices: what ranks of an MPI engine learn of each other besides messages: that one has failed
// (failure notice), has left, or that its process has ended. MPI itself tells nothing of this.
//
// Notices are in the store; processes are looked at if they are on this host.
// Threading: any thread may call.
#pragma once

#include <lockstep/backend.h>
#include <lockstep/error.h>

#include <cstdint>
#include <exception>
#include <optional>
#include <string>
#include <vector>

#include "collective/operation.h"

namespace lockstep {

class MpiNotices {
 public:
  using Activity = collective::Activity;

  explicit MpiNotices(const EngineContext& context);

  // Never throw: a store that is gone can be told nothing.
  void tell_failure(const std::exception_ptr& error) noexcept;
  void tell_leaving(std::uint64_t num_done) noexcept;

  // Throws if one of `peers` cannot do its part of operation `number` any more: its failure, or
  // PeerLostError.
  void check_processes(const std::vector<int>& peers, const Activity& activity) const;
  void check_store(const std::vector<int>& peers, std::uint64_t number, const Activity& activity);

  int global_rank(int peer) const { return peer < 0 ? peer : member(peer).rank; }

 private:
  const Member& member(int peer) const { return members_[static_cast<std::size_t>(peer)]; }
  ErrorPlace place(int peer, const Activity& activity) const;
  std::optional<std::string> read(const std::string& key) noexcept;
  void tell(const std::string& text) noexcept;

  const int rank_;
  const std::vector<Member> members_;
  const c10::intrusive_ptr<c10d::Store> store_;
};

}  // namespace lockstep
