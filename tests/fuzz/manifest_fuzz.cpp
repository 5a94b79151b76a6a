// A fuzz target for the reader of a checkpoint's manifest (libFuzzer): it is read or refused.

#include <lockstep/error.h>

#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>

#include "archive/folder.h"

namespace {

struct Folder {
  Folder() {
    if (::mkdtemp(path.data()) == nullptr) std::abort();
  }
  ~Folder() { std::filesystem::remove_all(path); }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;

  std::string path = "/tmp/lockstep-fuzz-XXXXXX";
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const Folder mine;
  const std::string& folder = mine.path;
  std::ofstream(folder + "/manifest.json", std::ios::binary)
      .write(reinterpret_cast<const char*>(data), static_cast<std::streamsize>(size));
  try {
    const auto manifest = lockstep::read_manifest(folder);
    static_cast<void>(lockstep::find_damage(folder, manifest));
  } catch (const lockstep::Error&) {  // NOLINT: refused
  }
  return 0;
}
