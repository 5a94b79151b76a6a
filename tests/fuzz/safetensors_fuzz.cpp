// A fuzz target for the reader of safetensors files (libFuzzer): whatever a file has, it is read or
// refused, and no allocation is out of proportion to it.

#include <lockstep/error.h>
#include <sanitizer/allocator_interface.h>

#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "archive/safetensors.h"

namespace {

std::size_t largest_allowed = SIZE_MAX;

void check_size(const volatile void*, std::size_t size) {
  if (size > largest_allowed) std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerInitialize(int*, char***) {
  __sanitizer_install_malloc_and_free_hooks(check_size, nullptr);
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view file(reinterpret_cast<const char*>(data), size);
  // Texts grow by doubling, and a message quotes a little.
  largest_allowed = 2 * size + 4096;
  try {
    const auto length = lockstep::parse_header_length(file, size, "input");
    const auto header =
        lockstep::parse_header(file.substr(lockstep::kLengthBytes, length), size, "input");
    for (const auto& [name, entry] : header.tensors) {
      if (entry.begin + entry.bytes > size) std::abort();
    }
  } catch (const lockstep::UsageError&) {
  }
  largest_allowed = SIZE_MAX;
  return 0;
}
