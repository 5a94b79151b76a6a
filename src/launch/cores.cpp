#include "launch/cores.h"

#include <sched.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <set>
#include <sstream>
#include <tuple>

#include "base/cgroup.h"
#include "base/posix.h"
#include "base/text.h"

namespace lockstep {
namespace {

// The numbers N of all entries of `folder` that are called `prefix`N.
std::vector<int> numbers_in(const std::string& folder, const std::string& prefix) {
  std::vector<int> numbers;
  std::error_code ignored;
  for (const auto& entry : std::filesystem::directory_iterator(folder, ignored)) {
    const std::string name = entry.path().filename();
    if (!name.starts_with(prefix) || name.size() == prefix.size()) continue;
    const std::string digits = name.substr(prefix.size());
    if (digits.find_first_not_of("0123456789") == std::string::npos) {
      numbers.push_back(std::stoi(digits));
    }
  }
  std::ranges::sort(numbers);
  return numbers;
}

std::vector<int> allowed_cpus() {
  // The kernel wants a mask at least as long as its own.
  for (std::size_t count = 1024; count <= (1 << 20); count *= 2) {
    std::vector<std::byte> mask(CPU_ALLOC_SIZE(count));
    auto* const set = reinterpret_cast<cpu_set_t*>(mask.data());
    if (::sched_getaffinity(0, mask.size(), set) == 0) {
      std::vector<int> cpus;
      for (std::size_t cpu = 0; cpu < count; ++cpu) {
        if (CPU_ISSET_S(cpu, mask.size(), set)) cpus.push_back(static_cast<int>(cpu));
      }
      return cpus;
    }
    if (errno != EINVAL) break;
  }
  throw_errno("cannot read on which cores this process may run",
              "Check the container's security profile: it must allow sched_getaffinity.");
}

// As CUDA reads its variable: numbers of devices, or names such as GPU-8932f937 and MIG-..., with
// commas; what follows the first one that is not there does not count.
int count_visible_gpus(const std::string& list, int num_devices) {
  int count = 0;
  std::istringstream parts(list);
  for (std::string part; std::getline(parts, part, ',');) {
    part.erase(0, part.find_first_not_of(' '));
    part.erase(part.find_last_not_of(' ') + 1);
    const bool is_name = part.starts_with("GPU-") || part.starts_with("MIG-");
    int number = -1;
    const char* const end = part.data() + part.size();
    const auto read = std::from_chars(part.data(), end, number);
    const bool is_number = read.ec == std::errc() && read.ptr == end;
    if (!is_name && (!is_number || number < 0 || number >= num_devices)) break;
    ++count;
  }
  return num_devices == 0 ? 0 : count;
}

std::vector<int> cores_of(const Machine& machine) {
  std::vector<int> cores;
  for (const Cpu& cpu : machine.cpus) {
    if (std::ranges::find(cores, cpu.core) == cores.end()) cores.push_back(cpu.core);
  }
  return cores;
}

}  // namespace

int Machine::num_cores() const { return static_cast<int>(cores_of(*this).size()); }

int Machine::num_nodes() const {
  std::set<int> nodes;
  for (const Cpu& cpu : cpus) nodes.insert(cpu.node);
  return static_cast<int>(nodes.size());
}

std::vector<int> parse_cpu_list(const std::string& text) {
  std::vector<int> cpus;
  std::istringstream parts(text);
  for (std::string part; std::getline(parts, part, ',');) {
    int first = 0;
    int last = 0;
    const int count = std::sscanf(part.c_str(), "%d-%d", &first, &last);
    for (int cpu = first; count >= 1 && cpu <= (count == 2 ? last : first); ++cpu) {
      cpus.push_back(cpu);
    }
  }
  return cpus;
}

std::string to_cpu_list(std::vector<int> cpus) {
  std::ranges::sort(cpus);
  std::string text;
  for (std::size_t i = 0; i < cpus.size();) {
    std::size_t end = i + 1;
    while (end < cpus.size() && cpus[end] == cpus[end - 1] + 1) ++end;
    if (!text.empty()) text += ",";
    text +=
        end - i == 1 ? text::format("{}", cpus[i]) : text::format("{}-{}", cpus[i], cpus[end - 1]);
    i = end;
  }
  return text;
}

Machine read_machine(const std::string& system_root, const std::vector<int>& allowed,
                     const std::optional<std::string>& visible_gpus) {
  std::map<int, int> node_of;
  const std::string nodes = system_root + "/sys/devices/system/node";
  for (const int node : numbers_in(nodes, "node")) {
    const auto list = read_small_file(text::format("{}/node{}/cpulist", nodes, node));
    for (const int cpu : parse_cpu_list(list)) node_of[cpu] = node;
  }
  Machine machine;
  for (const int id : allowed) {
    const auto siblings = parse_cpu_list(read_small_file(text::format(
        "{}/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list", system_root, id)));
    const int core = siblings.empty() ? id : *std::ranges::min_element(siblings);
    machine.cpus.push_back({.id = id, .core = core, .node = node_of[id]});
  }
  std::ranges::sort(machine.cpus, {},
                    [](const Cpu& cpu) { return std::tuple(cpu.node, cpu.core, cpu.id); });
  machine.quota = cores_in_cgroup(system_root);
  machine.num_gpus = static_cast<int>(numbers_in(system_root + "/dev", "nvidia").size());
  if (visible_gpus) machine.num_gpus = count_visible_gpus(*visible_gpus, machine.num_gpus);
  return machine;
}

Machine this_machine() {
  const char* const visible = std::getenv("CUDA_VISIBLE_DEVICES");  // empty: none
  return read_machine("", allowed_cpus(),
                      visible != nullptr ? std::optional<std::string>(visible) : std::nullopt);
}

int ranks_for(const Machine& machine) {
  if (machine.num_gpus > 0) return machine.num_gpus;
  const double paid = std::max(1.0, std::floor(machine.quota));
  return paid < machine.num_cores() ? static_cast<int>(paid) : machine.num_cores();
}

std::vector<Share> split_cores(const Machine& machine, int num_ranks, Bind bind) {
  const std::vector<int> cores = cores_of(machine);
  const auto num_cores = static_cast<std::int64_t>(cores.size());
  const double paid = std::max(1.0, std::floor(machine.quota / num_ranks));
  std::vector<Share> shares;
  for (std::int64_t rank = 0; rank < num_ranks; ++rank) {
    Share share;
    const std::set<int> mine(cores.begin() + rank * num_cores / num_ranks,
                             cores.begin() + (rank + 1) * num_cores / num_ranks);
    share.threads = static_cast<int>(std::min<double>(paid, std::max<double>(1, mine.size())));
    if (bind != Bind::kNone && num_ranks <= num_cores) {
      std::set<int> nodes;
      for (const Cpu& cpu : machine.cpus) {
        if (mine.contains(cpu.core)) nodes.insert(cpu.node);
      }
      for (const Cpu& cpu : machine.cpus) {
        const bool is_mine =
            bind == Bind::kCore ? mine.contains(cpu.core) : nodes.contains(cpu.node);
        if (is_mine) share.cpus.push_back(cpu.id);
      }
    }
    shares.push_back(std::move(share));
  }
  return shares;
}

}  // namespace lockstep
