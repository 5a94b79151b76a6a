#include "world/hosts.h"

#include <filesystem>
#include <system_error>

#include "base/env.h"
#include "base/posix.h"

namespace lockstep {
namespace {

// The running kernel, and those of its namespaces that this process is in.
std::string identity(std::initializer_list<const char*> namespaces) {
  std::string id = read_small_file("/proc/sys/kernel/random/boot_id");
  if (!id.empty() && id.back() == '\n') id.pop_back();
  for (const char* kind : namespaces) {
    std::error_code ignored;  // a kernel without this namespace has only one of it
    id += "/";
    id += std::filesystem::read_symlink(std::string("/proc/self/ns/") + kind, ignored).string();
  }
  return id;
}

}  // namespace

std::string this_host_id() {
  const auto pretended = Environment::of_process().get("LOCKSTEP_HOST_ID");
  return identity({"pid", "user", "net"}) + (pretended ? "/" + *pretended : "");
}

std::string this_network_id() { return identity({"net"}); }

}  // namespace lockstep
