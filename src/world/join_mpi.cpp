// join_mpi: a world whose ranks are a communicator's. Only the store has to be made for it: ranks
// tell each other through MPI where it is, a memory file on one host, else a port of rank 0's.

#include <fcntl.h>
#include <lockstep/mpi.h>

#include <algorithm>
#include <cstring>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "base/env.h"
#include "base/hash.h"
#include "base/posix.h"
#include "base/process.h"
#include "base/text.h"
#include "engine/mpi/calls.h"
#include "world/hosts.h"
#include "world/store.h"

namespace lockstep {
namespace {

// What ranks tell each other; where the store is counts if rank 0 says it.
struct Notice {
  std::uint64_t host = 0;
  std::int32_t pid = 0;
  std::int32_t fd = -1;
  std::int32_t port = 0;
  char address[256] = {};
};

mpi::Communicator copy(MPI_Comm communicator, const JoinOptions& options) {
  MPI_Comm handle = MPI_COMM_NULL;
  MPI_Request request = MPI_REQUEST_NULL;
  int code = MPI_SUCCESS;
  {
    const mpi::Calls calls;
    const mpi::ErrorsReturn errors(communicator);
    code = MPI_Comm_idup(communicator, &handle, &request);
  }
  if (code != MPI_SUCCESS) {
    throw UsageError(
        {.operation = "join"},
        text::format("MPI cannot copy this communicator: {}.\nGive an intracommunicator "
                     "that has not been freed.",
                     mpi::text_of(code)));
  }
  mpi::wait(request, options.join_timeout, -1, "join_mpi");
  return mpi::Communicator(handle);
}

std::vector<Notice> exchange(const mpi::Communicator& communicator, const Notice& mine,
                             const JoinOptions& options) {
  std::vector<Notice> all(static_cast<std::size_t>(communicator.size()));
  MPI_Request request = MPI_REQUEST_NULL;
  {
    const mpi::Calls calls;
    MPI_Iallgather(&mine, sizeof mine, MPI_BYTE, all.data(), sizeof mine, MPI_BYTE,
                   communicator.get(), &request);
  }
  mpi::wait(request, options.join_timeout, communicator.rank(), "join_mpi");
  return all;
}

c10::intrusive_ptr<c10d::Store> open_at(StorePlace place, int rank,
                                        std::chrono::milliseconds timeout) {
  Placement placement;
  placement.rank = rank;
  placement.store = std::move(place);
  return open_store(placement, timeout).store;
}

c10::intrusive_ptr<c10d::Store> make_store(const mpi::Communicator& communicator,
                                           const JoinOptions& options) {
  if (communicator.size() == 1) return c10::make_intrusive<c10d::HashStore>();
  const bool is_first = communicator.rank() == 0;
  const std::string host_id = this_host_id();
  Notice mine;
  mine.host = hash_bytes(host_id.data(), host_id.size());
  mine.pid = this_process().pid;
  Fd file;
  if (is_first) {
    file = make_memfd("lockstep-store");
    mine.fd = file.get();
  }
  const std::vector<Notice> all = exchange(communicator, mine, options);
  const bool is_one_host =
      std::ranges::all_of(all, [&](const Notice& notice) { return notice.host == mine.host; });
  const auto timeout = options.join_timeout;
  if (is_one_host) {
    if (is_first) {
      auto store = open_at(InheritedFd{file.get()}, 0, timeout);
      exchange(communicator, mine, options);  // the others have it open
      return store;
    }
    file = Fd(
        ::open(text::format("/proc/{}/fd/{}", all[0].pid, all[0].fd).c_str(), O_RDWR | O_CLOEXEC));
    exchange(communicator, mine, options);
    if (!file) {
      throw_errno(text::format("cannot open the store of process {}", all[0].pid),
                  "Run all ranks as the same user.");
    }
    return open_at(InheritedFd{file.get()}, communicator.rank(), timeout);
  }
  TcpAddress address;
  address.host = Environment::of_process().get("MASTER_ADDR").value_or(host_name());
  if (is_first) {
    auto store = serve_store(address, timeout).store;
    mine.port = address.port;
    address.host.copy(mine.address, sizeof mine.address - 1);
    exchange(communicator, mine, options);
    return store;
  }
  const std::vector<Notice> served = exchange(communicator, mine, options);
  return open_at(TcpAddress{served[0].address, served[0].port}, communicator.rank(), timeout);
}

}  // namespace

World join_mpi(MPI_Comm communicator, JoinOptions options) {
  if (options.rank || options.size || options.store) {
    throw UsageError({.operation = "join"},
                     "JoinOptions has rank, size or store, and join_mpi takes them from the "
                     "communicator.\nGive none.");
  }
  if (!mpi::is_running() || communicator == MPI_COMM_NULL) {
    throw UsageError({.operation = "join"},
                     "join_mpi was given no communicator, or MPI is not initialised.\n"
                     "Call MPI_Init_thread first.");
  }
  const auto copied = std::make_shared<const mpi::Communicator>(copy(communicator, options));
  options.rank = copied->rank();
  options.size = copied->size();
  options.store = make_store(*copied, options);
  options.communicator = copied;
  if (options.engine == "auto") options.engine = "mpi";
  return World::join(options);
}

}  // namespace lockstep
