#include "launch/gpus.h"

#include <dlfcn.h>

#include <array>
#include <memory>

#include "base/text.h"

namespace lockstep {
namespace {

class Library {
 public:
  // The first that can be loaded.
  explicit Library(const std::vector<std::string>& names) {
    for (const std::string& name : names) {
      handle_.reset(::dlopen(name.c_str(), RTLD_LAZY | RTLD_LOCAL));
      if (handle_) return;
      const char* const why = ::dlerror();
      if (error_.empty()) error_ = why == nullptr ? name + " cannot be loaded" : why;
    }
  }

  bool is_loaded() const { return handle_ != nullptr; }
  const std::string& error() const { return error_; }

  template <typename Function>
  Function* find(const char* name) const {
    return reinterpret_cast<Function*>(::dlsym(handle_.get(), name));
  }

 private:
  struct Close {
    void operator()(void* handle) const { ::dlclose(handle); }
  };
  std::unique_ptr<void, Close> handle_;
  std::string error_;
};

// As in cuda.h: a result of 0 is success.
using Init = int(unsigned flags);
using GetNumber = int(int* number);
using GetName = int(char* name, int size, int device);
using CanAccessPeer = int(int* is_possible, int device, int peer);

std::string where(const std::string& system_root, const char* library) {
  return system_root.empty() ? library : system_root + "/usr/lib/" + library;
}

void ask_driver(const Library& driver, GpuReport& report) {
  auto* const init = driver.find<Init>("cuInit");
  auto* const version = driver.find<GetNumber>("cuDriverGetVersion");
  auto* const count = driver.find<GetNumber>("cuDeviceGetCount");
  auto* const name = driver.find<GetName>("cuDeviceGetName");
  auto* const can_access = driver.find<CanAccessPeer>("cuDeviceCanAccessPeer");
  if (init == nullptr || version == nullptr || count == nullptr || name == nullptr ||
      can_access == nullptr) {
    report.trouble = "libcuda.so.1 is not a CUDA driver";
    return;
  }
  if (const int code = init(0); code != 0) {
    report.trouble = text::format("cuInit() failed with {}", code);
    return;
  }
  int number = 0;
  if (version(&number) == 0) {
    report.cuda_version = text::format("{}.{}", number / 1000, number % 1000 / 10);
  }
  if (count(&number) != 0) number = 0;
  for (int device = 0; device < number; ++device) {
    std::array<char, 256> text{};
    name(text.data(), text.size() - 1, device);
    report.names.emplace_back(text.data());
    for (int peer = 0; peer < device; ++peer) {
      int is_possible = 0;
      if (can_access(&is_possible, device, peer) != 0 || is_possible == 0) {
        report.without_peer_access.emplace_back(peer, device);
      }
    }
  }
}

}  // namespace

GpuReport ask_gpu_driver(const std::string& system_root) {
  GpuReport report;
  const Library driver({where(system_root, "libcuda.so.1")});
  if (driver.is_loaded()) {
    ask_driver(driver, report);
  } else {
    report.trouble = driver.error();
  }
  // PyTorch's package has NCCL beside it.
  const Library nccl(
      {where(system_root, "libnccl.so.2"), LOCKSTEP_TORCH_ROOT "/../nvidia/nccl/lib/libnccl.so.2"});
  int number = 0;
  if (auto* const version = nccl.is_loaded() ? nccl.find<GetNumber>("ncclGetVersion") : nullptr;
      version != nullptr && version(&number) == 0) {
    report.nccl_version =
        text::format("{}.{}.{}", number / 10000, number / 100 % 100, number % 100);
  }
  return report;
}

}  // namespace lockstep
