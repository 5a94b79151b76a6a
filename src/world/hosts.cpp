#include "world/hosts.h"

#include <array>
#include <filesystem>
#include <system_error>

#include "base/posix.h"

namespace lockstep {

std::string this_host_id() {
  std::string id = read_small_file("/proc/sys/kernel/random/boot_id");
  if (!id.empty() && id.back() == '\n') id.pop_back();
  for (const char* kind : {"pid", "user", "net"}) {
    std::error_code ignored;  // a kernel without this namespace has only one of it
    id += "/";
    id += std::filesystem::read_symlink(std::string("/proc/self/ns/") + kind, ignored).string();
  }
  return id;
}

}  // namespace lockstep
