// Stands for libcuda.so.1 and libnccl.so.2: FAKE_CUDA is the number of GPUs, of which each but the
// first two can reach the others; negative: cuInit() fails.

#include <cstdio>
#include <cstdlib>

namespace {

int number_of_gpus() {
  const char* const text = std::getenv("FAKE_CUDA");
  return text == nullptr ? 0 : std::atoi(text);
}

}  // namespace

extern "C" {

int cuInit(unsigned /*flags*/) { return number_of_gpus() < 0 ? 999 : 0; }

int cuDriverGetVersion(int* version) {
  *version = 13010;
  return 0;
}

int cuDeviceGetCount(int* count) {
  *count = number_of_gpus();
  return 0;
}

int cuDeviceGetName(char* name, int size, int device) {
  std::snprintf(name, static_cast<std::size_t>(size), "Model %d", device);
  return 0;
}

int cuDeviceCanAccessPeer(int* is_possible, int device, int peer) {
  *is_possible = device + peer == 1 ? 0 : 1;
  return 0;
}

int ncclGetVersion(int* version) {
  *version = 22907;
  return 0;
}
}
