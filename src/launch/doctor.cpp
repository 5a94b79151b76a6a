#include "launch/doctor.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <sstream>

#include "base/cgroup.h"
#include "base/posix.h"
#include "base/text.h"
#include "launch/cores.h"
#include "launch/gpus.h"

namespace lockstep {
namespace {

using Kind = Finding::Kind;

constexpr std::uint64_t kNoLimit = std::numeric_limits<std::uint64_t>::max();
constexpr double kGiB = 1 << 30;

std::string plural(int count, const std::string& what) {
  return text::format("{} {}{}", count, what, count == 1 ? "" : "s");
}

std::vector<int> allowed_cpus(const Machine& machine) {
  std::vector<int> cpus;
  for (const Cpu& cpu : machine.cpus) cpus.push_back(cpu.id);
  return cpus;
}

Finding look_at_cores(const std::string& system_root, const Machine& machine) {
  const auto online =
      parse_cpu_list(read_small_file(system_root + "/sys/devices/system/cpu/online")).size();
  Finding finding{"cores",
                  text::format("{}, {}", plural(machine.num_cores(), "core"),
                               plural(static_cast<int>(machine.cpus.size()), "hardware thread"))};
  if (machine.cpus.size() < online) {
    finding.kind = Kind::kNote;
    finding.text += text::format(" of the machine's {}", online);
    finding.remedy = text::format(
        "This process may use cpus {} only: taskset, the batch system or "
        "the container decides.",
        to_cpu_list(allowed_cpus(machine)));
  }
  return finding;
}

Finding look_at_quota(const Machine& machine) {
  if (std::isinf(machine.quota)) return {"cpu quota", "none"};
  Finding finding{"cpu quota", text::format("{:.2g} cores' worth of time", machine.quota)};
  if (machine.quota < machine.num_cores()) {
    finding.kind = Kind::kNote;
    finding.remedy = text::format(
        "More than {} busy threads are held up by the kernel: -n auto takes "
        "{}; raise the container's cpu limit for more.",
        std::max(1, static_cast<int>(machine.quota)), ranks_for(machine));
  }
  return finding;
}

Finding look_at_numa(const Machine& machine) {
  return {"NUMA", plural(machine.num_nodes(), "node")};
}

Finding look_at_gpus(const Machine& machine) {
  return {"GPUs", machine.num_gpus == 0 ? "none" : plural(machine.num_gpus, "NVIDIA device")};
}

// Only where there are any: a machine without GPUs need not hear of drivers.
void look_at_driver(const std::string& system_root, std::vector<Finding>& findings) {
  const GpuReport report = ask_gpu_driver(system_root);
  if (!report.trouble.empty()) {
    findings.push_back({"GPU driver", report.trouble, Kind::kProblem,
                        "The devices are there, but programs cannot use them: install NVIDIA's "
                        "driver, or start the container with --gpus all."});
    return;
  }
  findings.push_back({"GPU driver", text::format("for CUDA {}: {}", report.cuda_version,
                                                 text::join(report.names, ", "))});
  if (report.nccl_version.empty()) {
    findings.push_back({"NCCL", "libnccl.so.2 was not found", Kind::kNote,
                        "PyTorch's build for CUDA brings it (./dev build cuda); some LibTorch "
                        "archives contain it."});
  } else {
    findings.push_back({"NCCL", report.nccl_version});
  }
  if (report.names.size() < 2) return;
  if (report.without_peer_access.empty()) {
    findings.push_back({"peer access", "between all GPUs"});
    return;
  }
  std::vector<std::string> pairs;
  for (const auto& [a, b] : report.without_peer_access) {
    pairs.push_back(text::format("{} and {}", a, b));
  }
  findings.push_back({"peer access", text::format("not between {}", text::join(pairs, ", ")),
                      Kind::kNote,
                      "Gradients between these go through main memory: nvidia-smi topo -m shows "
                      "how they are connected."});
}

Finding look_at_memory(const std::string& system_root) {
  const std::string text = read_small_file(system_root + "/proc/meminfo");
  const std::size_t at = text.find("MemAvailable:");
  const std::uint64_t available = at == std::string::npos
                                      ? kNoLimit
                                      : std::strtoull(text.c_str() + at + 13, nullptr, 10) * 1024;
  const std::uint64_t in_cgroup = memory_left_in_cgroup(system_root);
  const double left = static_cast<double>(std::min(available, in_cgroup)) / kGiB;
  Finding finding{"memory", text::format("{:.1f} GiB for processes and shared segments", left)};
  if (in_cgroup < available) finding.text += " (the cgroup's limit)";
  if (left < 0.5) {
    finding.kind = Kind::kProblem;
    finding.remedy =
        "A rank of LibTorch takes 0.2 GiB before the model: free memory, or raise the "
        "container's limit.";
  }
  return finding;
}

Finding look_at_segments() {
  try {
    make_memfd("lockstep-doctor");
    return {"shared memory", "memory files can be made (/dev/shm is not used)"};
  } catch (const std::exception& error) {
    return {"shared memory", error.what(), Kind::kProblem,
            "The engine shm needs memfd_create: allow it in the container's security profile."};
  }
}

Finding look_at_huge_pages(const std::string& system_root) {
  const std::string folder = system_root + "/sys/kernel/mm/transparent_hugepage/";
  const std::string text = read_small_file(folder + "shmem_enabled");
  const std::size_t from = text.find('[');
  const std::size_t to = text.find(']');
  if (from == std::string::npos || to == std::string::npos) {
    return {"huge pages", "this kernel has none for shared memory"};
  }
  const std::string mode = text.substr(from + 1, to - from - 1);
  if (mode == "never" || mode == "deny") {
    return {"huge pages", "off for shared memory", Kind::kNote,
            "Large gradients move a little faster with them: as root, echo advise > "
            "/sys/kernel/mm/transparent_hugepage/shmem_enabled"};
  }
  return {"huge pages", text::format("'{}' for shared memory", mode)};
}

Finding look_at_limit(const char* subject, int resource, rlim_t wanted, const char* option) {
  rlimit limit{};
  ::getrlimit(static_cast<__rlimit_resource_t>(resource), &limit);
  if (limit.rlim_cur == RLIM_INFINITY) return {subject, "no limit"};
  Finding finding{subject, text::format("at most {}", limit.rlim_cur)};
  if (limit.rlim_cur < wanted) {
    finding.kind = Kind::kProblem;
    finding.remedy = text::format("Raise it: ulimit {} {}", option, wanted);
  }
  return finding;
}

Finding look_at_engines() { return {"engines", LOCKSTEP_ENGINES, Kind::kFine, {}}; }

Finding look_at_torch() {
  const std::string root = LOCKSTEP_TORCH_ROOT;
  if (root.empty())
    return {"LibTorch", "this launcher was built without it", Kind::kNote,
            "Programs bring their own; nothing is wrong with that."};
  if (::access((root + "/lib/libtorch_cpu.so").c_str(), R_OK) != 0) {
    return {"LibTorch", text::format("{} at {}, where it is no more", LOCKSTEP_TORCH_VERSION, root),
            Kind::kNote,
            "Programs that were linked with it there do not start: put it back, or build again."};
  }
  return {"LibTorch", text::format("{} at {}", LOCKSTEP_TORCH_VERSION, root)};
}

Finding look_at_addresses() {
  ifaddrs* list = nullptr;
  if (::getifaddrs(&list) != 0) {
    return {"addresses", std::strerror(errno), Kind::kNote, "See what ip address says."};
  }
  const std::unique_ptr<ifaddrs, decltype(&::freeifaddrs)> owner(list, ::freeifaddrs);
  std::vector<std::string> found;
  for (const ifaddrs* one = list; one != nullptr; one = one->ifa_next) {
    if (one->ifa_addr == nullptr || (one->ifa_flags & IFF_UP) == 0 ||
        (one->ifa_flags & IFF_LOOPBACK) != 0) {
      continue;
    }
    const int family = one->ifa_addr->sa_family;
    if (family != AF_INET && family != AF_INET6) continue;
    std::array<char, NI_MAXHOST> text{};
    const socklen_t size = family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
    ::getnameinfo(one->ifa_addr, size, text.data(), text.size(), nullptr, 0, NI_NUMERICHOST);
    if (std::string_view(text.data()).starts_with("fe80:")) continue;  // of the link only
    found.push_back(text::format("{} {}", one->ifa_name, text.data()));
  }
  if (found.empty()) {
    return {"addresses", "loopback only", Kind::kNote,
            "One host needs no network. For several, bring an interface up."};
  }
  return {"addresses", text::format("{}", text::join(found, ", "))};
}

Finding look_at_host_name() {
  const std::string name = host_name();
  addrinfo hints{};
  hints.ai_family = AF_INET;
  addrinfo* found = nullptr;
  if (::getaddrinfo(name.c_str(), nullptr, &hints, &found) != 0) {
    return {
        "host name", text::format("{}, which has no address", name), Kind::kNote,
        "With several hosts, give --master an address, or enter the name in DNS or /etc/hosts."};
  }
  const std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> owner(found, ::freeaddrinfo);
  std::array<char, INET_ADDRSTRLEN> text{};
  const auto* address = reinterpret_cast<const sockaddr_in*>(found->ai_addr);
  ::inet_ntop(AF_INET, &address->sin_addr, text.data(), text.size());
  Finding finding{"host name", text::format("{} is {}", name, text.data())};
  if (std::string_view(text.data()).starts_with("127.")) {
    finding.kind = Kind::kNote;
    finding.remedy =
        "Other hosts cannot reach it there: give --master an address instead of this "
        "name.";
  }
  return finding;
}

}  // namespace

std::vector<Finding> examine_machine(const std::string& system_root) {
  const Machine real = this_machine();
  const Machine machine =
      system_root.empty() ? real : read_machine(system_root, allowed_cpus(real));
  std::vector<Finding> findings = {look_at_cores(system_root, machine), look_at_quota(machine),
                                   look_at_numa(machine), look_at_gpus(machine)};
  if (machine.num_gpus > 0) look_at_driver(system_root, findings);
  for (Finding& finding : std::vector<Finding>{
           look_at_memory(system_root), look_at_segments(), look_at_huge_pages(system_root),
           look_at_limit("open files", RLIMIT_NOFILE, 1024, "-n"),
           look_at_limit("processes", RLIMIT_NPROC, 1024, "-u"), look_at_engines(), look_at_torch(),
           look_at_addresses(), look_at_host_name()}) {
    findings.push_back(std::move(finding));
  }
  return findings;
}

std::string to_text(const std::vector<Finding>& findings) {
  std::string text;
  for (const Finding& finding : findings) {
    const char* const mark = finding.kind == Kind::kFine   ? "ok"
                             : finding.kind == Kind::kNote ? "note"
                                                           : "PROBLEM";
    text += text::format("{:<8} {:<14} {}\n", mark, finding.subject, finding.text);
    if (!finding.remedy.empty())
      text += text::format("{:<8} {:<14} -> {}\n", "", "", finding.remedy);
  }
  return text;
}

}  // namespace lockstep
