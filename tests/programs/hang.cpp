// Hang: for LD_PRELOAD: calls of the C library that may wait for a file server or a name server do,
// as long as a file is there that a variable names.
//
//   HANG_OPEN: open of a log file    HANG_EXEC: execvpe    HANG_NAMES: getaddrinfo
//   HANG_POLL: poll, which stands for anything that a thread may wait in

#include <dlfcn.h>
#include <netdb.h>
#include <poll.h>
#include <sys/types.h>
#include <unistd.h>

#include <cstdarg>
#include <cstdlib>
#include <string_view>

namespace {

void hang_while(const char* variable) {
  const char* const file = std::getenv(variable);
  while (file != nullptr && ::access(file, F_OK) == 0) ::usleep(10000);
}

template <typename Function>
Function* real(const char* name) {
  return reinterpret_cast<Function*>(::dlsym(RTLD_NEXT, name));
}
// Found before anything runs: not all is allowed between fork and exec.
auto* const real_execvpe = real<int(const char*, char* const*, char* const*)>("execvpe");

}  // namespace

extern "C" {

int open64(const char* path, int flags, ...) {
  std::va_list arguments;
  va_start(arguments, flags);
  const auto mode = va_arg(arguments, mode_t);
  va_end(arguments);
  if (std::string_view(path).ends_with(".log")) hang_while("HANG_OPEN");
  static auto* const real_open = real<int(const char*, int, ...)>("open64");
  return real_open(path, flags, mode);
}

int open(const char* path, int flags, ...) __attribute__((alias("open64")));

int execvpe(const char* file, char* const* arguments, char* const* environment) noexcept {
  hang_while("HANG_EXEC");
  return real_execvpe(file, arguments, environment);
}

int getaddrinfo(const char* name, const char* service, const addrinfo* hints, addrinfo** found) {
  hang_while("HANG_NAMES");
  static auto* const real_getaddrinfo =
      real<int(const char*, const char*, const addrinfo*, addrinfo**)>("getaddrinfo");
  return real_getaddrinfo(name, service, hints, found);
}

int poll(pollfd* fds, nfds_t count, int timeout) {
  static auto* const real_poll = real<int(pollfd*, nfds_t, int)>("poll");
  const int result = real_poll(fds, count, timeout);
  hang_while("HANG_POLL");
  return result;
}
}
