#include "archive/file.h"

#include <fcntl.h>
#include <lockstep/error.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <vector>

#include "base/text.h"

namespace lockstep {
namespace {

constexpr std::size_t kPiece = 1 << 20;         // hashed while it is in the cache
constexpr std::uint64_t kReadAhead = 64 << 20;  // so that the disk is busy while we hash
constexpr const char* kDiskAdvice = "Check whether the disk is full or failing.";

}  // namespace

FileWriter::FileWriter(const std::string& folder, const std::string& name)
    : path_(folder + "/" + name),
      file_(::open(path_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, mode_in(folder, 0666))) {
  if (!file_) {
    throw_errno(text::format("cannot write {}", path_),
                "Give a folder that this user may write to.");
  }
  record_.name = name;
}

void FileWriter::write(std::string_view bytes) {
  while (!bytes.empty()) {
    const std::string_view piece = bytes.substr(0, kPiece);
    const ssize_t count = ::write(file_.get(), piece.data(), piece.size());
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) throw_errno(text::format("cannot write {}", path_), kDiskAdvice);
    const auto written = static_cast<std::size_t>(count);
    hasher_.add(bytes.substr(0, written));
    record_.bytes += written;
    bytes.remove_prefix(written);
  }
}

FileRecord FileWriter::finish() {
  if (::fsync(file_.get()) != 0) {
    throw_errno(text::format("cannot fsync {}", path_), kDiskAdvice);
  }
  // Some file systems, NFS among them, report here that they had no room.
  if (::close(file_.release()) != 0 && errno != EINTR) {
    throw_errno(text::format("cannot close {}", path_), kDiskAdvice);
  }
  record_.hash = hasher_.hex();
  return record_;
}

FileRecord write_file(const std::string& folder, const std::string& name, std::string_view bytes) {
  FileWriter writer(folder, name);
  writer.write(bytes);
  return writer.finish();
}

bool sync_folder(const std::string& folder) {
  const Fd fd(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (fd && ::fsync(fd.get()) == 0) return true;
  if (fd && (errno == EINVAL || errno == ENOTSUP || errno == ENOSYS)) return false;
  throw_errno(text::format("cannot fsync the folder {}", folder), kDiskAdvice);
}

FileReader::FileReader(const std::string& path)
    : path_(path), file_(::open(path.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC)) {
  struct stat status {};
  if (!file_ || ::fstat(file_.get(), &status) != 0) {
    throw_errno(text::format("cannot read {}", path_), "Check its name and its permissions.");
  }
  if (!S_ISREG(status.st_mode)) {
    throw UsageError({.operation = "reading a checkpoint"},
                     text::format("{} is not a file.\nGive the file itself.", path_));
  }
  bytes_ = static_cast<std::uint64_t>(status.st_size);
}

void FileReader::read(std::uint64_t at, std::uint64_t count, char* into) const {
  while (count > 0) {
    const ssize_t got = ::pread(file_.get(), into, count, static_cast<off_t>(at));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) throw_errno(text::format("cannot read {}", path_), kDiskAdvice);
    if (got == 0) {
      throw UsageError({.operation = "reading a checkpoint"},
                       text::format("{} became shorter while it was read: it had {} bytes.\nLet "
                                    "nobody write to it.",
                                    path_, bytes_));
    }
    at += static_cast<std::uint64_t>(got);
    into += got;
    count -= static_cast<std::uint64_t>(got);
  }
}

std::string FileReader::read(std::uint64_t at, std::uint64_t count) const {
  std::string bytes(count, '\0');
  read(at, count, bytes.data());
  return bytes;
}

void FileReader::for_each_piece(const std::function<void(std::string_view)>& take) const {
  std::vector<char> piece(std::min<std::uint64_t>(kPiece, bytes_));
  std::uint64_t asked = 0;
  for (std::uint64_t at = 0; at < bytes_;) {
    if (at + kReadAhead / 2 >= asked) {
      ::posix_fadvise(file_.get(), static_cast<off_t>(asked), kReadAhead, POSIX_FADV_WILLNEED);
      asked += kReadAhead;
    }
    const std::uint64_t count = std::min<std::uint64_t>(piece.size(), bytes_ - at);
    read(at, count, piece.data());
    take({piece.data(), count});
    at += count;
  }
}

std::string FileReader::hash() const {
  Hasher hasher;
  for_each_piece([&](std::string_view piece) { hasher.add(piece); });
  return hasher.hex();
}

TensorHeader FileReader::tensors() const {
  const std::string first = read(0, std::min(kLengthBytes, bytes_));
  const std::uint64_t length = parse_header_length(first, bytes_, path_);
  return parse_header(read(kLengthBytes, length), bytes_, path_);
}

std::string read_whole(const std::string& path) {
  const FileReader file(path);
  if (file.bytes() > kMaxSmallBytes) {
    throw UsageError({.operation = "reading a checkpoint"},
                     text::format("{} has {} bytes, far more than such a file has.\nTake another "
                                  "copy of it.",
                                  path, file.bytes()));
  }
  return file.read(0, file.bytes());
}

Json parse_json(const std::string& text, const std::string& path) {
  constexpr int kMaxDepth = 32;  // what comes after works by recursion
  const auto too_deep = [](int depth, Json::parse_event_t, Json&) {
    if (depth > kMaxDepth) throw std::length_error("too deep");
    return true;
  };
  try {
    Json json = Json::parse(text, too_deep);
    if (json.is_object()) return json;
  } catch (const std::exception&) {  // said below
  }
  throw UsageError(
      {.operation = "reading a checkpoint"},
      text::format("{} is not as lockstep writes it.\nTake another copy of it.", path));
}

}  // namespace lockstep
