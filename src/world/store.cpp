#include "world/store.h"

#include <fcntl.h>
#include <lockstep/error.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <cerrno>
#include <cstdlib>
#include <filesystem>

#include "base/env.h"
#include "base/posix.h"
#include "base/process.h"
#include "base/socket.h"
#include "base/text.h"
#include "world/launcher_store.h"
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
      : FdOwner{std::move(file)}, c10d::FileStore(text::format("/proc/self/fd/{}", fd.get()), -1) {}

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
    const std::string variables = '\0' + read_small_file(text::format("/proc/{}/environ", pid));
    if (variables.find('\0' + rank_variable + '=') == std::string::npos) break;
    pid = parent_of(pid);
  }
  return find_process(pid);
}

// The user's own, where there is one: in /tmp somebody else may have taken the name before.
std::string folder_for_file() {
  const Environment environment = Environment::of_process();
  const auto own = environment.get("XDG_RUNTIME_DIR");
  struct stat status {};
  if (own && ::stat(own->c_str(), &status) == 0 && S_ISDIR(status.st_mode) &&
      status.st_uid == ::geteuid() && (status.st_mode & (S_IRWXG | S_IRWXO)) == 0) {
    return *own;
  }
  return environment.get("TMPDIR").value_or("/tmp");
}

OpenStore open_launcher_file(const LauncherFile& place) {
  const ProcessId launcher = find_launcher(place.rank_variable);
  const std::string path = text::format("{}/lockstep-{}-{}-{}", folder_for_file(), ::geteuid(),
                                        launcher.pid, launcher.start_time);
  Fd file(::open(path.c_str(), O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC, S_IRUSR | S_IWUSR));
  if (!file) {
    throw_errno(text::format("cannot open {}, where the ranks of this job meet", path),
                "Set XDG_RUNTIME_DIR to a folder of your own (mode 0700), the same on all ranks.");
  }
  struct stat status {};
  // A second name would be that of another file of this user's, which somebody has linked here.
  if (::fstat(file.get(), &status) != 0 || !S_ISREG(status.st_mode) || status.st_nlink != 1 ||
      status.st_uid != ::geteuid() || (status.st_mode & (S_IRWXG | S_IRWXO)) != 0) {
    throw UsageError(
        {.operation = "join"},
        text::format("{} is not used: it belongs to user {}, has mode {:o} and {} "
                     "names, instead of {}, 600 and 1.\nRemove it, or set "
                     "XDG_RUNTIME_DIR to a folder of your own (mode 0700).",
                     path, status.st_uid, status.st_mode & 0777, status.st_nlink, ::geteuid()));
  }
  return {c10::make_intrusive<DescriptorStore>(std::move(file)), "the file " + path,
          [path] { ::unlink(path.c_str()); }};
}

c10::intrusive_ptr<c10d::Store> connect_tcp(const TcpAddress& address,
                                            std::chrono::milliseconds timeout,
                                            Fd listening = Fd()) {
  c10d::TCPStoreOptions options;
  options.port = static_cast<std::uint16_t>(address.port);
  options.waitWorkers = false;
  options.timeout = timeout;
  if (listening) {
    options.isServer = true;
    options.masterListenFd = listening.release();
  }
  return c10::make_intrusive<c10d::TCPStore>(address.host, options);
}

int port_of(int socket) {
  sockaddr_in6 address{};  // an IPv4 address has its port in the same place
  socklen_t length = sizeof address;
  ::getsockname(socket, reinterpret_cast<sockaddr*>(&address), &length);
  return ntohs(address.sin6_port);
}

// Whether this very process listens on the port: an earlier world of it serves its store there.
bool is_listening_here(int port) {
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    const int fd = std::atoi(entry.path().filename().c_str());
    int accepts = 0;
    socklen_t length = sizeof accepts;
    if (::getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &accepts, &length) != 0 || accepts == 0) {
      continue;
    }
    if (port_of(fd) == port) return true;
  }
  return false;
}

// Rank 0 serves the store, unless an earlier world of this process does so already.
c10::intrusive_ptr<c10d::Store> serve_tcp(const TcpAddress& address,
                                          std::chrono::milliseconds timeout) {
  Fd socket = listen_at(address.host, address.port);
  if (socket) return connect_tcp(address, timeout, std::move(socket));
  const int code = errno;
  if (code == EADDRINUSE && is_listening_here(address.port)) return connect_tcp(address, timeout);
  errno = code;
  throw_errno(text::format("rank 0 cannot listen on {}:{}", address.host, address.port),
              code == EADDRINUSE
                  ? "Another program uses this port: set MASTER_PORT to a free one, on all ranks."
                  : "Set MASTER_ADDR to an address of rank 0's own host, on all ranks.");
}

OpenStore open_tcp(const TcpAddress& address, int rank, std::chrono::milliseconds timeout) {
  const std::string place = text::format("{}:{}", address.host, address.port);
  const auto start = std::chrono::steady_clock::now();
  try {
    const bool is_server = rank == 0 && !address.is_served_by_launcher;
    return {is_server ? serve_tcp(address, timeout) : connect_tcp(address, timeout), place, [] {}};
  } catch (const Error&) {
    throw;
  } catch (const std::exception& error) {
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
    const std::string message = text::format(
        "There is no answer from the store at {} after {:.1f} s: {}\nCheck that rank 0 is running "
        "and that MASTER_ADDR and MASTER_PORT are the same on all ranks.",
        place, took.count(), first_line(error.what()));
    const ErrorPlace here{.rank = rank, .peer = 0, .operation = "join"};
    if (took < timeout * 0.9) throw SystemError(here, 0, message);
    throw TimeoutError(here, message);
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
            text::format("descriptor {}", place.fd), [] {}};
  }
  OpenStore operator()(const LauncherSocket& place) const {
    return {c10::make_intrusive<LauncherStore>(duplicate(place.fd), timeout),
            "this host's launcher", [] {}};
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

OpenStore serve_store(TcpAddress& address, std::chrono::milliseconds timeout) {
  Fd socket = listen_at(address.host, 0);
  if (!socket) {
    throw_errno(text::format("rank 0 cannot listen on {}", address.host),
                "Set MASTER_ADDR to an address of rank 0's own host.");
  }
  address.port = port_of(socket.get());
  return {connect_tcp(address, timeout, std::move(socket)),
          text::format("{}:{}", address.host, address.port), [] {}};
}

}  // namespace lockstep
