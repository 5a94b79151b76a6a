// POSIX handles: a descriptor that closes itself, and system calls that throw SystemError.
//
// Threading: free functions are safe from any thread; an Fd belongs to one owner.
#pragma once

#include <sys/types.h>

#include <csignal>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>

namespace lockstep {

class Fd {
 public:
  Fd() = default;
  explicit Fd(int fd) : fd_(fd) {}
  Fd(Fd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Fd& operator=(Fd&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~Fd() { reset(); }

  int get() const noexcept { return fd_; }
  explicit operator bool() const noexcept { return fd_ >= 0; }
  void reset() noexcept;
  int release() noexcept { return std::exchange(fd_, -1); }

 private:
  int fd_ = -1;
};

// While one exists, this thread is not killed by SIGPIPE when it writes to a closed connection, and
// neither are threads that it starts meanwhile.
class NoSigpipe {
 public:
  NoSigpipe() noexcept;
  ~NoSigpipe();
  NoSigpipe(const NoSigpipe&) = delete;
  NoSigpipe& operator=(const NoSigpipe&) = delete;

 private:
  sigset_t before_;
  bool was_pending_;
};

struct Pipe {
  Fd read_end;
  Fd write_end;
};

// Throws SystemError with errno: "<what>: <strerror>. <action>".
[[noreturn]] void throw_errno(std::string_view what, std::string_view action);

// All descriptors made here are closed on exec, unless a Command passes them on (process.h).
Pipe make_pipe();
Fd make_memfd(const std::string& name);
Fd duplicate(int fd);

std::string host_name();

// `mode` for what is made in `folder`, without what the folder itself does not allow to others: a
// file in a private folder stays private when it is moved or copied. The umask comes on top.
mode_t mode_in(const std::string& folder, mode_t mode);

// Of an open file, to know it again; 0 if it is not open.
std::uint64_t inode_of(int fd);

// The whole of a small file such as one in /proc; empty if it cannot be read.
std::string read_small_file(const std::string& path);

}  // namespace lockstep
