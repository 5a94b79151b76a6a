// Files that are whole or not there: written with a checksum and fsynced, read in
// pieces.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>

#include "archive/safetensors.h"
#include "base/hash.h"
#include "base/json.h"
#include "base/posix.h"

namespace lockstep {

// A file as the manifest of a checkpoint knows it.
struct FileRecord {
  std::string name = {};
  std::uint64_t bytes = 0;
  std::string hash = {};  // XXH3, 128 bits, as `xxhsum -H2` prints it
};

// Throws: SystemError with what the system said, as all here do.
class FileWriter {
 public:
  FileWriter(const std::string& folder, const std::string& name);
  void write(std::string_view bytes);
  FileRecord finish();  // with fsync

 private:
  std::string path_;
  Fd file_;
  FileRecord record_;
  Hasher hasher_;
};

FileRecord write_file(const std::string& folder, const std::string& name, std::string_view bytes);

// fsync of a folder: of its list of names. False if its file system cannot.
bool sync_folder(const std::string& folder);

class FileReader {
 public:
  explicit FileReader(const std::string& path);
  std::uint64_t bytes() const { return bytes_; }
  const std::string& path() const { return path_; }
  // Requires: the range lies within bytes(). Throws also if the file has become shorter.
  void read(std::uint64_t at, std::uint64_t count, char* into) const;
  std::string read(std::uint64_t at, std::uint64_t count) const;
  // Calls `take` with the whole file, piece by piece.
  void for_each_piece(const std::function<void(std::string_view)>& take) const;
  std::string hash() const;
  TensorHeader tensors() const;

 private:
  std::string path_;
  Fd file_;
  std::uint64_t bytes_ = 0;
};

// Manifests and states are smaller.
constexpr std::uint64_t kMaxSmallBytes = 256 << 20;
// The whole of a file that is expected to be small. Throws: UsageError if it is not.
std::string read_whole(const std::string& path);
// Throws: UsageError if it is no JSON object, or nested deeper than any of ours.
Json parse_json(const std::string& text, const std::string& path);

}  // namespace lockstep
