#include "base/cgroup.h"

#include <sys/stat.h>

#include <algorithm>
#include <functional>
#include <limits>
#include <sstream>

#include "base/posix.h"
#include "base/text.h"

namespace lockstep {
namespace {

constexpr std::uint64_t kNoLimit = std::numeric_limits<std::uint64_t>::max();

std::uint64_t number_in(const std::string& path) {
  std::istringstream text(read_small_file(path));
  std::uint64_t number = 0;
  return text >> number ? number : kNoLimit;  // "max": no limit
}

// Bytes that the kernel drops when others need them. The same names in v1 and v2.
std::uint64_t reclaimable_in(const std::string& path) {
  std::istringstream lines(read_small_file(path));
  std::uint64_t bytes = 0;
  std::string name;
  for (std::uint64_t number = 0; lines >> name >> number;) {
    if (name == "active_file" || name == "inactive_file" || name == "slab_reclaimable") {
      bytes += number;
    }
  }
  return bytes;
}

// Calls `look` with the folder of this process's group, and of each group above it.
void for_each_group(const std::string& system_root, const std::string& controller,
                    const std::function<void(const std::string& folder, bool is_v2)>& look) {
  std::istringstream lines(read_small_file(system_root + "/proc/self/cgroup"));
  for (std::string line; std::getline(lines, line);) {
    // "0::/path" (v2), "4:cpu,cpuacct:/path" (v1)
    const std::size_t first = line.find(':');
    const std::size_t second = line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers =
        text::format(",{},", line.substr(first + 1, second - first - 1));
    const bool is_v2 = line.starts_with("0::");
    if (!is_v2 && controllers.find(text::format(",{},", controller)) == std::string::npos) continue;
    const std::string root = system_root + "/sys/fs/cgroup" + (is_v2 ? "" : "/" + controller);
    std::string path = line.substr(second + 1);
    while (true) {
      look(root + path, is_v2);
      if (path.empty() || path == "/") break;
      path.resize(path.rfind('/'));
    }
  }
}

std::uint64_t inode_of(const std::string& folder) {
  struct stat status {};
  return ::stat(folder.c_str(), &status) == 0 ? status.st_ino : 0;
}

double least(const std::vector<Limit>& limits) {
  double amount = std::numeric_limits<double>::infinity();
  for (const Limit& limit : limits) amount = std::min(amount, limit.amount);
  return amount;
}

}  // namespace

std::vector<Limit> memory_limits(const std::string& system_root) {
  std::vector<Limit> limits;
  for_each_group(system_root, "memory", [&](const std::string& folder, bool is_v2) {
    const auto limit = number_in(folder + (is_v2 ? "/memory.max" : "/memory.limit_in_bytes"));
    const auto usage = number_in(folder + (is_v2 ? "/memory.current" : "/memory.usage_in_bytes"));
    if (limit == kNoLimit || usage == kNoLimit) return;
    // Pages of files that were read count as used, and are given back when memory is needed.
    const std::uint64_t used = usage - std::min(usage, reclaimable_in(folder + "/memory.stat"));
    limits.push_back({inode_of(folder), static_cast<double>(limit - std::min(limit, used))});
  });
  return limits;
}

std::vector<Limit> core_limits(const std::string& system_root) {
  std::vector<Limit> limits;
  for_each_group(system_root, "cpu", [&](const std::string& folder, bool is_v2) {
    // "200000 100000": microseconds of each period. v1 has two files, and -1 for no limit.
    std::istringstream text(is_v2 ? read_small_file(folder + "/cpu.max")
                                  : read_small_file(folder + "/cpu.cfs_quota_us") + " " +
                                        read_small_file(folder + "/cpu.cfs_period_us"));
    double quota = 0;
    double period = 0;
    if (text >> quota >> period && quota > 0 && period > 0) {
      limits.push_back({inode_of(folder), quota / period});
    }
  });
  return limits;
}

std::uint64_t memory_left_in_cgroup(const std::string& system_root) {
  const std::vector<Limit> limits = memory_limits(system_root);
  return limits.empty() ? kNoLimit : static_cast<std::uint64_t>(least(limits));
}

double cores_in_cgroup(const std::string& system_root) { return least(core_limits(system_root)); }

}  // namespace lockstep
