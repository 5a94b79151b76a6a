#include "ddp/platform.h"

#include <ATen/Version.h>
#include <torch/version.h>

#include <array>
#include <sstream>
#include <string>
#include <vector>

#include "base/env.h"
#include "base/posix.h"
#include "base/text.h"

namespace lockstep {
namespace {

// By the names that kernels for x86 and ARM have for them, of the first processor.
constexpr std::array kFields = {"vendor_id",        "cpu family", "model",
                                "model name",       "cache size", "CPU implementer",
                                "CPU architecture", "CPU part"};
// What they do is in docs/reproducibility.md.
constexpr std::array kVariables = {"ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "MKL_CBWR",
                                   "MKL_ENABLE_INSTRUCTIONS"};

std::string cpu_model() {
  std::istringstream lines(read_small_file("/proc/cpuinfo"));
  std::vector<std::string> values;
  for (std::string line; std::getline(lines, line) && !line.empty();) {
    const std::size_t colon = line.find(':');
    if (colon == std::string::npos || colon == 0) continue;
    const std::string name = line.substr(0, line.find_last_not_of(" \t", colon - 1) + 1);
    for (const char* const field : kFields) {
      if (name != field || colon + 2 > line.size()) continue;
      values.push_back(line.substr(colon + 2));
    }
  }
  return text::join(values, " ");
}

}  // namespace

std::string platform() {
  std::string all =
      text::format("LibTorch {}, {}, {}", TORCH_VERSION, at::get_cpu_capability(), cpu_model());
  const Environment environment = Environment::of_process();
  for (const char* const name : kVariables) {
    if (const auto value = environment.get(name)) all += text::format(", {}={}", name, *value);
  }
  return all;
}

bool is_any_platform_allowed() {
  return Environment::of_process().get_int("LOCKSTEP_ANY_PLATFORM").value_or(0) != 0;
}

}  // namespace lockstep
