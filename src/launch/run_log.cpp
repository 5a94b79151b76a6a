#include "launch/run_log.h"

#include <lockstep/error.h>

#include <nlohmann/json.hpp>
#include <string_view>

#include "base/printable.h"
#include "base/text.h"

namespace lockstep {
namespace {

// Of a model with a million tensors. More is not a log.
constexpr std::size_t kMaxLineBytes = 256 << 20;
constexpr const char* kNotOurs = "is not as lockstep writes it";

}  // namespace

RunLog::RunLog(const std::string& path) : file_(path) {
  std::string line;
  std::uint64_t begin = 0;
  file_.for_each_piece([&](std::string_view piece) {
    while (!piece.empty()) {
      const std::size_t end = piece.find('\n');
      line += piece.substr(0, end);
      if (line.size() > kMaxLineBytes) refuse_line("is too long", num_lines_ + 1);
      if (end == std::string_view::npos) return;
      take(line, begin);
      begin += line.size() + 1;
      line.clear();
      piece.remove_prefix(end + 1);
    }
  });
  if (!line.empty()) take(line, begin);
  if (bad_line_ != 0 && !line.empty()) {  // it has no end
    notes_.push_back(
        text::format("{}: the last line is incomplete and was ignored: the run was "
                     "killed, or found no room",
                     printable(path)));
  } else if (bad_line_ != 0) {
    refuse_line(kNotOurs, bad_line_);
  }
  if (settings_.empty()) refuse_kind();
}

std::set<std::string> RunLog::models() const {
  std::set<std::string> all;
  for (const auto& [key, entry] : entries_) all.insert(key.second);
  return all;
}

std::set<std::int64_t> RunLog::steps() const {
  std::set<std::int64_t> all;
  for (const auto& [key, entry] : entries_) all.insert(key.first);
  return all;
}

RunLog::Tensors RunLog::tensors(const Entry& entry) const {
  return Json::parse(file_.read(entry.begin, entry.bytes)).at("tensors").get<Tensors>();
}

void RunLog::refuse_line(const std::string& problem, std::size_t number) const {
  throw UsageError(
      {.operation = "verify"},
      text::format("{}, line {} {}.\nTake another copy of it.", path(), number, problem));
}

void RunLog::refuse_kind() const {
  throw UsageError(
      {.operation = "verify"},
      text::format(
          "{} is not a log of hashes.\nGive two files of lockstep run --hash-every, or two "
          "checkpoints. (lockstep inspect --diff compares .safetensors files.)",
          path()));
}

void RunLog::take(const std::string& line, std::uint64_t begin) {
  ++num_lines_;
  Json json;
  try {
    json = parse_json(line, path());
  } catch (const Error&) {
    if (num_lines_ == 1) refuse_kind();
    if (bad_line_ != 0) refuse_line(kNotOurs, bad_line_);
    bad_line_ = num_lines_;
    return;
  }
  try {
    if (json.contains("format")) return take_header(json);
    if (num_lines_ == 1) refuse_kind();
    if (bad_line_ != 0) refuse_line(kNotOurs, bad_line_);
    const Key key(json.at("step").get<std::int64_t>(), json.at("model").get<std::string>());
    Entry entry{json.at("hash").get<std::string>(), begin, line.size()};
    (void)json.at("tensors").get<Tensors>();
    const auto [place, is_new] = entries_.try_emplace(key, entry);
    if (!is_new && place->second.hash != entry.hash) twice_.insert(key.first);
    place->second = std::move(entry);
  } catch (const Json::exception&) {
    refuse_line(kNotOurs, num_lines_);
  }
}

// A process that goes on in a file begins with one: a line before it that has no end is that of a
// process which was killed.
void RunLog::take_header(const Json& json) {
  if (json.at("format") != "lockstep hashes") refuse_kind();
  if (const int version = json.at("version"); version != 1) {
    throw UsageError(
        {.operation = "verify"},
        text::format("{} has version {}, this lockstep knows 1.\nUse a newer lockstep.", path(),
                     version));
  }
  if (bad_line_ != 0) {
    notes_.push_back(
        text::format("{}: line {} is incomplete and was ignored: the run was killed "
                     "there, or found no room, and then resumed",
                     printable(path()), bad_line_));
    bad_line_ = 0;
  }
  const auto note = [&](const std::string& name, const char* key) {
    const auto number = json.at(key).get<std::uint64_t>();
    settings_[name].insert(std::to_string(number));
    return number;
  };
  note("the seed", "seed");
  note("the number of threads", "threads");
  settings_["the platform"].insert(printable(json.at("platform").get<std::string>()));
  // With logical ranks the result does not depend on that of ranks.
  if (note("the number of logical ranks", "logical_ranks") == 0) {
    note("the number of ranks", "ranks");
  }
}

}  // namespace lockstep
