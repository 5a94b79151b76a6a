#include "world/store.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <lockstep/error.h>
#include <netdb.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <cerrno>
#include <cstdlib>
#include <memory>

#include "base/posix.h"
#include "base/process.h"
#include "world/translate.h"

namespace lockstep {
namespace {

struct FdOwner {
  Fd fd;
};

// A FileStore that reaches its file through a descriptor: it opens the path anew for every
// operation, and /proc/self/fd/N opens memory files and files without a name just as well.
// FdOwner comes first so that the descriptor outlives FileStore's destructor, which uses the path.
class DescriptorStore : private FdOwner, public c10d::FileStore {
 public:
  explicit DescriptorStore(Fd file)
      : FdOwner{std::move(file)}, c10d::FileStore(fmt::format("/proc/self/fd/{}", fd.get()), -1) {}

  c10::intrusive_ptr<c10d::Store> clone() override {
    return c10::make_intrusive<DescriptorStore>(duplicate(fd.get()));
  }
};

// The launcher is the nearest ancestor that was not itself given a rank; all ranks of a job on one
// host find the same one, also through wrapper scripts. Where its variables cannot be read, it
// belongs to another user (slurmstepd does) and is no wrapper of ours.
ProcessId find_launcher(const std::string& rank_variable) {
  pid_t pid = ::getppid();
  while (pid > 1) {
    const std::string variables = '\0' + read_small_file(fmt::format("/proc/{}/environ", pid));
    if (variables.find('\0' + rank_variable + '=') == std::string::npos) break;
    pid = parent_of(pid);
  }
  return find_process(pid);
}

OpenStore open_launcher_file(const LauncherFile& place) {
  const char* folder = std::getenv("TMPDIR");
  const ProcessId launcher = find_launcher(place.rank_variable);
  const std::string path =
      fmt::format("{}/lockstep-{}-{}-{}", folder != nullptr && *folder != '\0' ? folder : "/tmp",
                  ::geteuid(), launcher.pid, launcher.start_time);
  Fd file(::open(path.c_str(), O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC, S_IRUSR | S_IWUSR));
  if (!file) {
    throw_errno(fmt::format("cannot open {}, where the ranks of this job meet", path),
                "Set TMPDIR to a folder that you may write to, the same on all ranks.");
  }
  struct stat status {};
  if (::fstat(file.get(), &status) != 0 || status.st_uid != ::geteuid() ||
      (status.st_mode & (S_IRWXG | S_IRWXO)) != 0) {
    throw UsageError({.operation = "join"},
                     fmt::format("{} belongs to user {} or is open to others, so it is not used.\n"
                                 "Remove it, or set TMPDIR to a folder of your own.",
                                 path, status.st_uid));
  }
  return {c10::make_intrusive<DescriptorStore>(std::move(file)), "the file " + path,
          [path] { ::unlink(path.c_str()); }};
}

// A socket on exactly the address asked for. LibTorch's own server would listen on all of them.
Fd bind_socket(const TcpAddress& address) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  const std::string port = std::to_string(address.port);
  if (const int code = ::getaddrinfo(address.host.c_str(), port.c_str(), &hints, &found);
      code != 0) {
    throw SystemError({.rank = 0, .operation = "join"}, 0,
                      fmt::format("The address of MASTER_ADDR '{}' was not found: {}.\n"
                                  "Set it to a name or address of rank 0's host.",
                                  address.host, ::gai_strerror(code)));
  }
  const std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> owner(found, ::freeaddrinfo);
  Fd socket(::socket(found->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const int yes = 1;
  ::setsockopt(socket.get(), SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
  if (::bind(socket.get(), found->ai_addr, found->ai_addrlen) != 0 ||
      ::listen(socket.get(), SOMAXCONN) != 0) {
    throw_errno(fmt::format("rank 0 cannot listen on {}:{}", address.host, address.port),
                errno == EADDRINUSE
                    ? "Another job uses this port: set MASTER_PORT to a free one, on all ranks."
                    : "Set MASTER_ADDR to an address of rank 0's own host, on all ranks.");
  }
  return socket;
}

OpenStore open_tcp(const TcpAddress& address, int rank, std::chrono::milliseconds timeout) {
  c10d::TCPStoreOptions options;
  options.port = static_cast<std::uint16_t>(address.port);
  options.isServer = rank == 0 && !address.is_served_by_launcher;
  options.waitWorkers = false;
  options.timeout = timeout;
  const std::string place = fmt::format("{}:{}", address.host, address.port);
  if (options.isServer) options.masterListenFd = bind_socket(address).release();
  try {
    return {c10::make_intrusive<c10d::TCPStore>(address.host, options), place, [] {}};
  } catch (const std::exception& error) {
    throw TimeoutError({.rank = rank, .peer = 0, .operation = "join"},
                       fmt::format("There is no answer from the store at {} after {:.1f} s: {}\n"
                                   "Check that rank 0 is running and that MASTER_ADDR and "
                                   "MASTER_PORT are the same on all ranks.",
                                   place, static_cast<double>(timeout.count()) / 1000.0,
                                   first_line(error.what())));
  }
}

struct Opener {
  const Placement& placement;
  std::chrono::milliseconds timeout;

  OpenStore operator()(const InProcess&) const {
    return {c10::make_intrusive<c10d::HashStore>(), "this process", [] {}};
  }
  OpenStore operator()(const InheritedFd& place) const {
    return {c10::make_intrusive<DescriptorStore>(duplicate(place.fd)),
            fmt::format("descriptor {}", place.fd), [] {}};
  }
  OpenStore operator()(const TcpAddress& place) const {
    return open_tcp(place, placement.rank, timeout);
  }
  OpenStore operator()(const LauncherFile& place) const { return open_launcher_file(place); }
};

}  // namespace

OpenStore open_store(const Placement& placement, std::chrono::milliseconds timeout) {
  return std::visit(Opener{placement, timeout}, placement.store);
}

}  // namespace lockstep
