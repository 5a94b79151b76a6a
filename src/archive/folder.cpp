#include "archive/folder.h"

#include <fcntl.h>
#include <fmt/chrono.h>
#include <fmt/format.h>
#include <lockstep/error.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <ctime>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <random>

namespace lockstep {

NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(FileRecord, name, bytes, hash)

namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

constexpr int kFormat = 1;
constexpr const char* kManifest = "manifest.json";
constexpr const char* kIdentity = ".lockstep";
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

void make_folder(const std::string& path) {
  std::error_code error;
  fs::create_directories(path, error);
  if (error) {
    errno = error.value();
    throw_errno(fmt::format("cannot make the folder {}", path),
                "Give a folder that this user may write to.");
  }
}

}  // namespace

std::string CheckpointName::text() const { return fmt::format("{}-step-{}", number, step); }

std::vector<CheckpointName> list_checkpoints(const std::string& folder) {
  std::vector<CheckpointName> found;
  std::error_code error;
  fs::directory_iterator entries(folder, error);
  if (error) {
    errno = error.value();
    throw_errno(fmt::format("cannot read the folder {}", folder),
                "Check its name and its permissions.");
  }
  for (const auto& entry : entries) {
    const CheckpointName name = parse_name(entry.path().filename().string());
    if (name.number >= 0) found.push_back(name);
  }
  std::ranges::sort(found, std::greater(), &CheckpointName::number);
  return found;
}

Manifest read_manifest(const std::string& checkpoint) {
  const std::string path = checkpoint + "/" + kManifest;
  if (!fs::exists(path))
    refuse(fmt::format("{} has no {}.\nGive a checkpoint.", checkpoint, kManifest));
  const std::string text = read_whole(path);
  try {
    Json json = Json::parse(text);
    Manifest manifest;
    manifest.hash = json.at("hash");
    json.erase("hash");
    if (json.at("format") != kFormat) {
      refuse(fmt::format("{} has the format {}, this lockstep knows {}.\nUse a newer lockstep.",
                         path, json.at("format").dump(), kFormat));
    }
    if (hash_of(json) != manifest.hash) {
      refuse(fmt::format("{} was changed after it was written.\nTake another checkpoint.", path));
    }
    manifest.step = json.at("step");
    manifest.saved_at = json.at("saved_at");
    manifest.world_size = json.at("world_size");
    manifest.files = json.at("files").get<std::vector<FileRecord>>();
    return manifest;
  } catch (const Json::exception&) {
    refuse(fmt::format("{} is no manifest of a checkpoint.\nTake another one.", path));
  }
}

std::string find_damage(const std::string& checkpoint, const Manifest& manifest) try {
  for (const FileRecord& record : manifest.files) {
    const bool is_plain = record.name.find('/') == std::string::npos && !record.name.empty();
    if (!is_plain) return fmt::format("its manifest names the file '{}'", record.name);
    const FileReader file(checkpoint + "/" + record.name);
    if (file.bytes() != record.bytes) {
      return fmt::format("{} has {} bytes instead of {}", record.name, file.bytes(), record.bytes);
    }
    if (file.hash() != record.hash) return fmt::format("{} has a wrong checksum", record.name);
  }
  return {};
} catch (const Error& error) {
  return error.message().substr(0, error.message().find('\n'));
}

CheckpointFolder::CheckpointFolder(std::string path) : path_(std::move(path)) {
  identify_folder(path_);
  const std::string file = path_ + "/" + kIdentity;
  lock_ = Fd(::open(file.c_str(), O_RDWR | O_CLOEXEC));
  if (!lock_) throw_errno(fmt::format("cannot write {}", file), "Check its permissions.");
  if (::flock(lock_.get(), LOCK_EX | LOCK_NB) == 0) return;
  if (errno != EWOULDBLOCK) throw_errno(fmt::format("cannot lock {}", file), "Use another folder.");
  refuse(
      fmt::format("Another run writes its checkpoints to {}.\nGive each run a folder of its own, "
                  "or wait until that one has ended.",
                  path_));
}

std::string CheckpointFolder::unfinished_path(std::int64_t number) const {
  return fmt::format("{}/{}{}", path_, kUnfinished, number);
}

void CheckpointFolder::remove_orphans() const {
  for (const auto& entry : fs::directory_iterator(path_)) {
    std::error_code ignored;  // it stays an orphan
    const std::string name = entry.path().filename().string();
    if (name.starts_with(kUnfinished) || name.starts_with(std::string(kIdentity) + "-")) {
      fs::remove_all(entry.path(), ignored);
    }
  }
}

void CheckpointFolder::begin(std::int64_t number) const {
  abandon(number);
  make_folder(unfinished_path(number));
}

void CheckpointFolder::commit(const CheckpointName& name, Manifest manifest) const {
  const std::string unfinished = unfinished_path(name.number);
  const std::string finished = path_ + "/" + name.text();
  manifest.saved_at = fmt::format("{:%Y-%m-%dT%H:%M:%SZ}", fmt::gmtime(std::time(nullptr)));
  Json json = to_json(manifest);
  json["hash"] = hash_of(json);
  write_file(unfinished, kManifest, json.dump(1) + "\n");
  sync_folder(unfinished);
  if (::rename(unfinished.c_str(), finished.c_str()) != 0) {
    throw_errno(fmt::format("cannot rename {} to {}", unfinished, finished),
                "Check whether the disk is full or failing.");
  }
  sync_folder(path_);
}

void CheckpointFolder::abandon(std::int64_t number) const noexcept {
  std::error_code ignored;  // the next start removes it
  fs::remove_all(unfinished_path(number), ignored);
}

void CheckpointFolder::retain(int keep_last, int keep_every) const {
  if (keep_last <= 0) return;
  const auto names = list_checkpoints(path_);
  for (std::size_t i = static_cast<std::size_t>(keep_last); i < names.size(); ++i) {
    if (keep_every > 0 && names[i].number % keep_every == 0) continue;
    // First it loses its name, so that half of it is never taken for a checkpoint.
    const std::string gone = unfinished_path(names[i].number);
    std::error_code ignored;  // it is tried again with the next one
    fs::rename(path_ + "/" + names[i].text(), gone, ignored);
    fs::remove_all(gone, ignored);
  }
}

std::string identify_folder(const std::string& path) {
  make_folder(path);
  const std::string file = path + "/" + kIdentity;
  if (!fs::exists(file)) {
    std::random_device random;
    const std::string mine = fmt::format("{}-{}-{}", file, random(), ::getpid());
    const std::string id = fmt::format("{:08x}{:08x}{:08x}\n", random(), random(), random());
    write_file(path, mine.substr(path.size() + 1), id);
    // Of all who try, one wins.
    const bool is_made = ::link(mine.c_str(), file.c_str()) == 0 || errno == EEXIST;
    const int code = errno;
    ::unlink(mine.c_str());
    errno = code;
    if (!is_made) throw_errno(fmt::format("cannot write {}", file), "Use another file system.");
  }
  return read_whole(file);
}

}  // namespace lockstep
