// Cores: what of this machine the job may use, and each rank's share of it.
#pragma once

#include <limits>
#include <optional>
#include <string>
#include <vector>

namespace lockstep {

struct Cpu {  // a hardware thread, as the kernel numbers them
  int id = 0;
  int core = 0;  // the lowest cpu of the same core
  int node = 0;  // of NUMA
};

struct Machine {
  std::vector<Cpu> cpus = {};  // those this process may run on, by node, core and number
  double quota = std::numeric_limits<double>::infinity();  // cores' worth of time
  int num_gpus = 0;                                        // that programs can see

  int num_cores() const;
  int num_nodes() const;
};

// `system_root` stands before /proc, /sys and /dev: tests have their own. `allowed`: this process's
// affinity mask. `visible_gpus`: CUDA_VISIBLE_DEVICES, if it is set.
Machine read_machine(const std::string& system_root, const std::vector<int>& allowed,
                     const std::optional<std::string>& visible_gpus = std::nullopt);
Machine this_machine();

// "0-3,8" as lists in /sys have it.
std::vector<int> parse_cpu_list(const std::string& text);
std::string to_cpu_list(std::vector<int> cpus);

// -n auto: a rank for each GPU; without any, for each core that the quota pays for.
int ranks_for(const Machine& machine);

enum class Bind { kNone, kCore, kNuma };

struct Share {
  std::vector<int> cpus = {};  // empty: not bound
  int threads = 1;
};

// Whole cores to each rank, neighbours on one node, as even as can be. With kNuma a rank may use
// all of the nodes that its share touches. With more ranks than cores none is bound.
std::vector<Share> split_cores(const Machine& machine, int num_ranks, Bind bind);

}  // namespace lockstep
