#include "base/posix.h"

#include <fcntl.h>
#include <lockstep/error.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <climits>
#include <cstring>

#include "base/text.h"

namespace lockstep {

void Fd::reset() noexcept {
  if (fd_ >= 0) ::close(fd_);
  fd_ = -1;
}

namespace {

sigset_t only_sigpipe() {
  sigset_t set;
  ::sigemptyset(&set);
  ::sigaddset(&set, SIGPIPE);
  return set;
}

}  // namespace

NoSigpipe::NoSigpipe() noexcept {
  sigset_t pending;
  ::sigpending(&pending);
  was_pending_ = ::sigismember(&pending, SIGPIPE) == 1;
  const sigset_t blocked = only_sigpipe();
  ::pthread_sigmask(SIG_BLOCK, &blocked, &before_);
}

NoSigpipe::~NoSigpipe() {
  const sigset_t blocked = only_sigpipe();
  if (!was_pending_) {  // what has come since is ours: nobody else is to see it
    const timespec at_once{};
    ::sigtimedwait(&blocked, nullptr, &at_once);
  }
  ::pthread_sigmask(SIG_SETMASK, &before_, nullptr);
}

void throw_errno(std::string_view what, std::string_view action) {
  const int code = errno;
  throw SystemError({}, code, text::format("{}: {}.\n{}", what, std::strerror(code), action));
}

Pipe make_pipe() {
  std::array<int, 2> ends{};
  if (::pipe2(ends.data(), O_CLOEXEC) != 0) {
    throw_errno("cannot make a pipe", "Raise the limit on open files (ulimit -n).");
  }
  return {Fd(ends[0]), Fd(ends[1])};
}

Fd make_memfd(const std::string& name) {
  Fd fd(::memfd_create(name.c_str(), MFD_CLOEXEC));
  if (!fd) throw_errno("cannot make a memory file", "Raise the limit on open files (ulimit -n).");
  return fd;
}

Fd duplicate(int fd) {
  Fd copy(::fcntl(fd, F_DUPFD_CLOEXEC, 0));
  if (!copy) {
    throw_errno(text::format("cannot duplicate descriptor {}", fd),
                "It must be open in this process, and below the limit on open files (ulimit -n).");
  }
  return copy;
}

std::string host_name() {
  std::array<char, HOST_NAME_MAX + 1> name{};
  return ::gethostname(name.data(), name.size() - 1) == 0 ? name.data() : "unknown";
}

mode_t mode_in(const std::string& folder, mode_t mode) {
  constexpr mode_t kOwner = 0700;
  struct stat status {};
  if (::stat(folder.c_str(), &status) != 0) return mode & kOwner;
  return mode & (status.st_mode | kOwner);
}

std::uint64_t inode_of(int fd) {
  struct stat status {};
  return ::fstat(fd, &status) == 0 ? static_cast<std::uint64_t>(status.st_ino) : 0;
}

std::string read_small_file(const std::string& path) {
  const Fd file(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  std::string text;
  std::array<char, 4096> piece{};
  while (file) {
    const ssize_t count = ::read(file.get(), piece.data(), piece.size());
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return {};  // as of a process that has ended since it was opened
    if (count == 0) break;
    text.append(piece.data(), static_cast<std::size_t>(count));
  }
  return text;
}

}  // namespace lockstep
