#include "archive/folder.h"

#include <fcntl.h>
#include <lockstep/error.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <ctime>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <random>

#include "base/json.h"
#include "base/log.h"
#include "base/posix.h"
#include "base/printable.h"
#include "base/text.h"

namespace lockstep {

LOCKSTEP_JSON_FIELDS(FileRecord, name, bytes, hash)

namespace {

namespace fs = std::filesystem;

constexpr int kFormat = 1;
constexpr const char* kManifest = "manifest.json";
constexpr const char* kLock = ".lock";
constexpr std::string_view kProbe = ".probe-";
constexpr std::string_view kUnfinished = ".unfinished-";

[[noreturn]] void refuse(const std::string& message) {
  throw UsageError({.operation = "checkpoint"}, message);
}

Json to_json(const Manifest& manifest) {
  return {{"format", kFormat},
          {"step", manifest.step},
          {"saved_at", manifest.saved_at},
          {"world_size", manifest.world_size},
          {"files", manifest.files}};
}

std::string hash_of(const Json& json) {
  Hasher hasher;
  hasher.add(json.dump());
  return hasher.hex();
}

// "12-step-600"
CheckpointName parse_name(const std::string& text) {
  CheckpointName name;
  const char* const end = text.data() + text.size();
  const auto number = std::from_chars(text.data(), end, name.number);
  constexpr std::string_view kMiddle = "-step-";
  const std::string_view rest(number.ptr, static_cast<std::size_t>(end - number.ptr));
  if (number.ec != std::errc() || !rest.starts_with(kMiddle)) return {};
  const auto step = std::from_chars(number.ptr + kMiddle.size(), end, name.step);
  if (step.ec != std::errc() || step.ptr != end || name.text() != text) return {};
  return name;
}

// `whole` is an absolute path. Its parents get what the umask allows; all are fsynced.
void make_folders(const fs::path& whole, mode_t mode) {
  std::error_code error;
  if (fs::is_directory(whole, error)) return;
  if (!whole.has_filename()) return make_folders(whole.parent_path(), mode);  // "runs/"
  make_folders(whole.parent_path(), 0777);
  if (::mkdir(whole.c_str(), mode) != 0 && errno != EEXIST) {
    throw_errno(text::format("cannot make the folder {}", whole.string()),
                "Give a folder that this user may write to.");
  }
  sync_folder(whole.parent_path());
}

void make_folder(const std::string& path) { make_folders(fs::absolute(path), 0700); }

std::string random_name(std::string_view prefix) {
  std::random_device random;
  return text::format("{}{:08x}{:08x}", prefix, random(), random());
}

std::vector<std::string> names_in(const std::string& folder) {
  std::vector<std::string> names;
  std::error_code error;
  fs::directory_iterator entry(folder, error);
  for (; !error && entry != fs::directory_iterator(); entry.increment(error)) {
    names.push_back(entry->path().filename().string());
  }
  if (error) {
    errno = error.value();
    throw_errno(text::format("cannot read the folder {}", folder),
                "Check its name and its permissions.");
  }
  return names;
}

Fd open_lock(const std::string& folder, const std::string& file) {
  Fd lock(::open(file.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, mode_in(folder, 0666)));
  if (!lock) throw_errno(text::format("cannot write {}", file), "Check its permissions.");
  return lock;
}

// False if another process has it.
bool try_lock(const Fd& lock, const std::string& file) {
  if (::flock(lock.get(), LOCK_EX | LOCK_NB) == 0) return true;
  if (errno == EWOULDBLOCK) return false;
  if (errno != ENOSYS && errno != ENOLCK && errno != ENOTSUP && errno != EINVAL) {
    throw_errno(text::format("cannot lock {}", file), "Use another folder.");
  }
  Log(-1).warning(
      "the file system of {} has no locks ({}): make sure that no other run writes there", file,
      std::strerror(errno));
  return true;
}

// Who has the folder, for those who come while it is locked: NFS may keep a lock whose host is
// gone.
void write_owner(const Fd& lock) {
  const std::string text = Json{{"host", host_name()}, {"pid", ::getpid()}}.dump();
  // Only errors tell it: a disk without room for it shows when a checkpoint is written.
  if (::ftruncate(lock.get(), 0) == 0) {
    [[maybe_unused]] const ssize_t written = ::pwrite(lock.get(), text.data(), text.size(), 0);
  }
}

std::string owner_text(const Fd& lock) {
  std::string text(4096, '\0');
  text.resize(static_cast<std::size_t>(
      std::max<ssize_t>(0, ::pread(lock.get(), text.data(), text.size(), 0))));
  const Json json = Json::parse(text, nullptr, false);
  if (!json.is_object() || !json.contains("host") || !json.contains("pid")) return {};
  return text::format("process {} of host {}", json["pid"].dump(),
                      printable(json["host"].is_string() ? json["host"].get<std::string>() : ""));
}

}  // namespace

std::string CheckpointName::text() const { return text::format("{}-step-{}", number, step); }

std::vector<CheckpointName> list_checkpoints(const std::string& folder) {
  std::vector<CheckpointName> found;
  for (const std::string& text : names_in(folder)) {
    const CheckpointName name = parse_name(text);
    if (name.number >= 0) found.push_back(name);
  }
  std::ranges::sort(found, std::greater(), &CheckpointName::number);
  return found;
}

Manifest read_manifest(const std::string& checkpoint) {
  const std::string path = checkpoint + "/" + kManifest;
  std::error_code error;
  if (fs::status(path, error).type() == fs::file_type::not_found) {
    refuse(text::format("{} has no {}.\nGive a checkpoint.", checkpoint, kManifest));
  }
  Json json = parse_json(read_whole(path), path);
  try {
    Manifest manifest;
    manifest.hash = json.at("hash");
    json.erase("hash");
    if (json.at("format") != kFormat) {
      refuse(text::format("{} has the format {}, this lockstep knows {}.\nUse a newer lockstep.",
                          path, printable(json.at("format").dump().substr(0, 100)), kFormat));
    }
    if (hash_of(json) != manifest.hash) {
      refuse(text::format("{} was changed after it was written.\nTake another checkpoint.", path));
    }
    manifest.step = json.at("step");
    manifest.saved_at = json.at("saved_at");
    manifest.world_size = json.at("world_size");
    manifest.files = json.at("files").get<std::vector<FileRecord>>();
    for (const FileRecord& file : manifest.files) {
      const std::string shown_name = printable(file.name.substr(0, 255));
      if (file.name.empty() || file.name.find('/') != std::string::npos ||
          shown_name != file.name) {
        refuse(
            text::format("{} names '{}', which is not a file beside it.\nTake another checkpoint.",
                         path, shown_name));
      }
    }
    return manifest;
  } catch (const Json::exception&) {
    refuse(text::format("{} is no manifest of a checkpoint.\nTake another one.", path));
  }
}

std::string find_damage(const std::string& checkpoint, const Manifest& manifest) try {
  for (const FileRecord& record : manifest.files) {
    const FileReader file(checkpoint + "/" + record.name);
    if (file.bytes() != record.bytes) {
      return text::format("{} has {} bytes instead of {}", record.name, file.bytes(), record.bytes);
    }
    if (file.hash() != record.hash) return text::format("{} has a wrong checksum", record.name);
  }
  return {};
} catch (const Error& error) {
  return error.message().substr(0, error.message().find('\n'));
}

CheckpointFolder::CheckpointFolder(std::string path) : path_(std::move(path)) {
  make_folder(path_);
  if (!sync_folder(path_)) {
    Log(-1).warning(
        "the file system of {} cannot fsync a folder: the newest checkpoint may be missing after "
        "the machine has lost power",
        path_);
  }
  const std::string file = path_ + "/" + kLock;
  lock_ = open_lock(path_, file);
  if (!try_lock(lock_, file)) {
    const std::string owner = owner_text(lock_);
    refuse(
        text::format("Another run writes its checkpoints to {}{}.\nGive each run a folder of its "
                     "own, or wait until that one has ended. If its host is gone, and the file "
                     "system keeps the lock, remove {}.",
                     path_, owner.empty() ? "" : ": " + owner, file));
  }
  write_owner(lock_);
}

void CheckpointFolder::remove_orphans() const {
  for (const std::string& name : names_in(path_)) {
    std::error_code ignored;  // it stays an orphan
    if (name.starts_with(kUnfinished) || name.starts_with(kProbe)) {
      fs::remove_all(path_ + "/" + name, ignored);
    }
  }
}

std::string CheckpointFolder::begin() const {
  // Chance is in the name, so a process of an earlier run that is still there writes elsewhere.
  std::string name = random_name(kUnfinished);
  if (::mkdir((path_ + "/" + name).c_str(), mode_in(path_, 0777)) != 0) {
    throw_errno(text::format("cannot make the folder {}/{}", path_, name),
                "Check whether the disk is full, and the folder's permissions.");
  }
  return name;
}

void CheckpointFolder::commit(const std::string& unfinished, const CheckpointName& name,
                              Manifest manifest) const {
  const std::string from = path_ + "/" + unfinished;
  const std::string to = path_ + "/" + name.text();
  const std::time_t now = std::time(nullptr);
  std::tm calendar{};
  char saved_at[32];
  std::strftime(saved_at, sizeof saved_at, "%Y-%m-%dT%H:%M:%SZ", ::gmtime_r(&now, &calendar));
  manifest.saved_at = saved_at;
  Json json = to_json(manifest);
  json["hash"] = hash_of(json);
  write_file(from, kManifest, json.dump(1) + "\n");
  sync_folder(from);
  if (::rename(from.c_str(), to.c_str()) != 0) {
    throw_errno(text::format("cannot rename {} to {}", from, to),
                "Check whether the disk is full or failing.");
  }
  sync_folder(path_);
}

void CheckpointFolder::abandon(const std::string& unfinished) const noexcept {
  std::error_code ignored;  // the next start removes it
  fs::remove_all(path_ + "/" + unfinished, ignored);
}

void CheckpointFolder::retain(int keep_last, int keep_every) const {
  if (keep_last <= 0) return;
  const auto names = list_checkpoints(path_);
  for (std::size_t i = static_cast<std::size_t>(keep_last); i < names.size(); ++i) {
    if (keep_every > 0 && names[i].number % keep_every == 0) continue;
    // First it loses its name, so that half of it is never taken for a checkpoint.
    const std::string gone = random_name(kUnfinished);
    std::error_code ignored;  // it is tried again with the next one
    fs::rename(path_ + "/" + names[i].text(), path_ + "/" + gone, ignored);
    abandon(gone);
  }
}

std::string leave_probe(const std::string& path) {
  make_folder(path);
  std::string name = random_name(kProbe);
  write_file(path, name, "");
  return name;
}

}  // namespace lockstep
