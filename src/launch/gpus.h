// gpus: what the driver and NCCL of this machine say, asked of their libraries without linking
// them.
#pragma once

#include <string>
#include <utility>
#include <vector>

namespace lockstep {

struct GpuReport {
  std::string trouble = {};       // why the driver could not be asked; empty if it could
  std::string cuda_version = {};  // that the driver is for
  std::vector<std::string> names = {};
  std::vector<std::pair<int, int>> without_peer_access = {};
  std::string nccl_version = {};  // empty: not found
};

// `system_root` as for examine_machine; tests have libraries there.
GpuReport ask_gpu_driver(const std::string& system_root);

}  // namespace lockstep
