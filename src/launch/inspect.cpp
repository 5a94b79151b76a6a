#include "launch/inspect.h"

#include <lockstep/error.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <functional>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>

#include "archive/folder.h"
#include "base/json.h"
#include "base/printable.h"
#include "base/text.h"

namespace lockstep {
namespace {

namespace fs = std::filesystem;

std::string size_text(std::uint64_t bytes) {
  constexpr std::array kUnits = {"B", "kB", "MB", "GB", "TB"};
  double size = static_cast<double>(bytes);
  std::size_t unit = 0;
  for (; size >= 1000 && unit + 1 < kUnits.size(); ++unit) size /= 1000;
  return text::format("{:.{}f} {}", size, unit == 0 ? 0 : 1, kUnits[unit]);
}

std::string text_of(const TensorEntry& entry) {
  return text::format("{} [{}]", entry.dtype, text::join(entry.shape, ", "));
}

// Names and values come from strangers: they are cut, so that a report is never much longer than
// the file, and do nothing to a terminal.
std::string shown(std::string_view text, std::size_t longest = 200) {
  return printable(text.substr(0, longest)) + (text.size() > longest ? "..." : "");
}

// The tensors of a file, or of all files of a checkpoint.
struct Tensors {
  struct Place {
    std::size_t file = 0;
    TensorEntry entry = {};
  };
  std::vector<FileReader> files = {};
  std::map<std::string, Place> by_name = {};
  Json state = Json::object();

  void add(const std::string& path) {
    files.emplace_back(path);
    for (const auto& [name, entry] : files.back().tensors().tensors) {
      by_name[name] = {files.size() - 1, entry};
    }
  }
  std::string bytes(const Place& place) const {
    return files[place.file].read(place.entry.begin, place.entry.bytes);
  }
};

Tensors open_tensors(const std::string& path, DiffScope scope = DiffScope::kAll) {
  Tensors tensors;
  std::error_code ignored;  // of one that may not be seen, reading says more
  if (!fs::is_directory(path, ignored)) {
    tensors.add(path);
    return tensors;
  }
  for (const FileRecord& record : read_manifest(path).files) {
    if (scope == DiffScope::kRun && record.name.starts_with("rank-")) continue;
    const std::string file = path + "/" + record.name;
    if (record.name.ends_with(".safetensors")) {
      tensors.add(file);
    } else {
      tensors.state = parse_json(read_whole(file), file);
    }
  }
  return tensors;
}

std::string list_tensors(const Tensors& tensors) {
  constexpr std::size_t kWidest = 60;  // longer names stand out: each line would be as long
  std::size_t width = 0;
  std::uint64_t total = 0;
  for (const auto& [name, place] : tensors.by_name) {
    width = std::max(width, std::min(name.size(), kWidest));
    total += place.entry.bytes;
  }
  std::string text = text::format("  {} tensors, {}\n", tensors.by_name.size(), size_text(total));
  for (const auto& [name, place] : tensors.by_name) {
    text += text::format("    {:<{}}  {:<24}  {:>9}\n", shown(name), width, text_of(place.entry),
                         size_text(place.entry.bytes));
  }
  return text;
}

struct Health {
  Manifest manifest = {};
  std::string damage = {};
  std::uint64_t bytes = 0;
};

Health look_at(const std::string& checkpoint) {
  Health health;
  try {
    health.manifest = read_manifest(checkpoint);
    health.damage = printable(find_damage(checkpoint, health.manifest));
  } catch (const Error& error) {
    health.damage = printable(error.message().substr(0, error.message().find('\n')));
  }
  for (const FileRecord& file : health.manifest.files) health.bytes += file.bytes;
  return health;
}

Report inspect_checkpoint(const std::string& path) {
  const Health health = look_at(path);
  if (!health.damage.empty()) {
    return {text::format("{}: not whole: {}\n", printable(path), health.damage), 1};
  }
  const Manifest& manifest = health.manifest;
  Report report{text::format("{}: whole\n  step {}, saved {} by {} ranks, {}, hash {}\n",
                             printable(path), manifest.step, shown(manifest.saved_at),
                             manifest.world_size, size_text(health.bytes), shown(manifest.hash))};
  for (const FileRecord& file : manifest.files) {
    report.text +=
        text::format("  {}  {}  {}\n", shown(file.hash), shown(file.name), size_text(file.bytes));
  }
  const Tensors tensors = open_tensors(path);
  const Json parts = tensors.state.value("parts", Json::object());
  for (const auto& [name, value] : parts.items()) {
    const bool has_kind = value.is_object() && value.contains("kind");
    const std::string its = has_kind ? value["kind"].dump() : value.dump();
    report.text += text::format("  {}: {}\n", shown(name), shown(its, 100));
  }
  report.text += list_tensors(tensors);
  return report;
}

Report inspect_folder(const std::string& path) {
  const auto names = list_checkpoints(path);
  if (names.empty()) {
    throw UsageError(
        {.operation = "inspect"},
        text::format("There is no checkpoint in {}.\nGive a folder that a Checkpointer "
                     "has written to.",
                     path));
  }
  Report report;
  for (const CheckpointName& name : names) {
    const Health health = look_at(path + "/" + name.text());
    const bool is_whole = health.damage.empty();
    report.text += text::format(
        "{}/{}  {}\n", printable(path), name.text(),
        is_whole ? text::format("whole  step {}  {}  {}", health.manifest.step,
                                shown(health.manifest.saved_at), size_text(health.bytes))
                 : "not whole: " + health.damage);
    if (!is_whole) report.code = 1;
  }
  return report;
}

float from_half(std::uint16_t bits) {
  const int exponent = bits >> 10 & 31;
  const int fraction = bits & 1023;
  const float sign = (bits & 0x8000) != 0 ? -1.0F : 1.0F;
  if (exponent == 31) return fraction == 0 ? sign * INFINITY : NAN;
  return sign * (exponent == 0 ? std::ldexp(static_cast<float>(fraction), -24)
                               : std::ldexp(static_cast<float>(1024 + fraction), exponent - 25));
}

template <typename T>
T load(const std::string& bytes, std::size_t index) {
  T value;
  std::memcpy(&value, bytes.data() + index * sizeof value, sizeof value);
  return value;
}

// Of floating point types; nothing for others.
std::optional<double> value_at(const std::string& dtype, const std::string& bytes,
                               std::size_t index) {
  if (dtype == "F64") return load<double>(bytes, index);
  if (dtype == "F32") return load<float>(bytes, index);
  if (dtype == "F16") return from_half(load<std::uint16_t>(bytes, index));
  if (dtype == "BF16") {
    return std::bit_cast<float>(std::uint32_t{load<std::uint16_t>(bytes, index)} << 16);
  }
  return std::nullopt;
}

// How many values differ, and by how much; empty if none does.
std::string compare_values(const std::string& dtype, const std::string& left,
                           const std::string& right) {
  if (left == right) return {};
  const auto size = static_cast<std::size_t>(bytes_of_dtype(dtype));
  std::size_t count = 0;
  double most = 0;
  bool has_value = false;
  for (std::size_t i = 0; i < left.size() / size; ++i) {
    if (std::memcmp(left.data() + i * size, right.data() + i * size, size) == 0) continue;
    ++count;
    const auto one = value_at(dtype, left, i);
    if (!one) continue;
    has_value = true;
    const double difference = std::abs(*one - *value_at(dtype, right, i));
    most = std::isnan(difference) ? difference : std::max(most, difference);
  }
  return text::format("{} of {} values differ{}", count, left.size() / size,
                      has_value ? text::format(", by up to {:.3g}", most) : "");
}

// Calls `say` with each place where two states differ. Null: there is none.
void compare_states(const Json* left, const Json* right, const std::string& path,
                    const std::function<void(DiffLine)>& say) {
  const auto find = [](const Json& object, const std::string& key) {
    const auto found = object.find(key);
    return found == object.end() ? nullptr : &*found;
  };
  if (left != nullptr && right != nullptr) {
    if (*left == *right) return;
    if (left->is_object() && right->is_object()) {
      std::set<std::string> keys;
      for (const Json* one : {left, right}) {
        for (const auto& [key, _] : one->items()) keys.insert(key);
      }
      for (const std::string& key : keys) {
        compare_states(find(*left, key), find(*right, key), path + "/" + shown(key), say);
      }
      return;
    }
    if (left->is_array() && right->is_array() && left->size() == right->size()) {
      for (std::size_t i = 0; i < left->size(); ++i) {
        compare_states(&(*left)[i], &(*right)[i], path + "/" + std::to_string(i), say);
      }
      return;
    }
  }
  const auto text_of_value = [](const Json* value) {
    return value == nullptr ? "nothing" : shown(value->dump(), 60);
  };
  say({"state" + path,
       text::format("state{}: {} and {}", path, text_of_value(left), text_of_value(right))});
}

// Of those that a Checkpointer saves: random states of ranks, and texts of add_per_rank(), which
// are the bytes of one tensor. (What hooks keep is in files of its own.)
void leave_out_ranks(Tensors& tensors) {
  tensors.state.erase("world_size");
  const auto parts = tensors.state.find("parts");
  if (parts == tensors.state.end() || !parts->is_object()) return;
  for (auto part = parts->begin(); part != parts->end();) {
    if (part.key() == "random") {
      std::erase_if(tensors.by_name,
                    [](const auto& one) { return one.first.starts_with("random."); });
    } else if (part->is_object() && part->contains("lengths") &&
               tensors.by_name.contains(part.key() + ".texts")) {
      tensors.by_name.erase(part.key() + ".texts");
    } else {
      ++part;
      continue;
    }
    part = parts->erase(part);
  }
}

}  // namespace

Report inspect(const std::string& path) {
  std::error_code ignored;
  if (!fs::is_directory(path, ignored)) {
    const Tensors tensors = open_tensors(path);
    return {text::format("{}: whole\n", printable(path)) + list_tensors(tensors)};
  }
  std::error_code error;  // of one that may not be seen, reading says more
  if (fs::exists(path + "/manifest.json", error) || error) return inspect_checkpoint(path);
  return inspect_folder(path);
}

Differences compare_tensors(const std::string& left, const std::string& right, DiffScope scope) {
  Tensors mine = open_tensors(left, scope);
  Tensors other = open_tensors(right, scope);
  if (scope == DiffScope::kRun) {
    leave_out_ranks(mine);
    leave_out_ranks(other);
  }
  Differences found;
  std::set<std::string> names;
  for (const auto& [name, place] : mine.by_name) names.insert(name);
  for (const auto& [name, place] : other.by_name) names.insert(name);
  found.num_tensors = names.size();
  for (const std::string& name : names) {
    const auto one = mine.by_name.find(name);
    const auto two = other.by_name.find(name);
    std::string text;
    if (two == other.by_name.end()) {
      text = text::format("only in {}: {} {}", printable(left), shown(name),
                          text_of(one->second.entry));
    } else if (one == mine.by_name.end()) {
      text = text::format("only in {}: {} {}", printable(right), shown(name),
                          text_of(two->second.entry));
    } else if (text_of(one->second.entry) != text_of(two->second.entry)) {
      text = text::format("{}: {} and {}", shown(name), text_of(one->second.entry),
                          text_of(two->second.entry));
    } else {
      const std::string values = compare_values(one->second.entry.dtype, mine.bytes(one->second),
                                                other.bytes(two->second));
      if (!values.empty()) text = text::format("{}: {}", shown(name), values);
    }
    if (!text.empty()) found.tensors.push_back({shown(name), std::move(text)});
  }
  compare_states(&mine.state, &other.state, "",
                 [&](DiffLine one) { found.values.push_back(std::move(one)); });
  return found;
}

Report diff(const std::string& left, const std::string& right) {
  const Differences found = compare_tensors(left, right, DiffScope::kAll);
  Report report;
  for (const auto* const kind : {&found.tensors, &found.values}) {
    for (const DiffLine& one : *kind) report.text += one.text + "\n";
  }
  if (report.text.empty()) return {"no difference\n", 0};
  report.code = 1;
  return report;
}

}  // namespace lockstep
