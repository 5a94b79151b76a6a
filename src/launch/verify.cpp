#include "launch/verify.h"

#include <lockstep/error.h>

#include <algorithm>
#include <filesystem>
#include <iterator>
#include <map>
#include <optional>
#include <set>
#include <tuple>
#include <utility>
#include <vector>

#include "archive/folder.h"
#include "base/printable.h"
#include "base/text.h"
#include "launch/run_log.h"

namespace lockstep {
namespace {

namespace fs = std::filesystem;

[[noreturn]] void refuse(const std::string& message) {
  throw UsageError({.operation = "verify"}, message);
}

// What comparing has found, whatever was compared.
struct Outcome {
  std::vector<std::int64_t> common = {};  // steps, in order, up to the last one compared
  std::optional<std::int64_t> first_difference = std::nullopt;
  std::string where = {};                 // "in fc1.weight ..."
  std::string twice = {};                 // what a run says of itself
  std::vector<std::string> details = {};  // lines
};

Report report_of(const Outcome& outcome) {
  const auto& common = outcome.common;
  Report report;
  if (!outcome.first_difference) {
    report.text = common.size() == 1 ? text::format("equal: 1 common step, {}", common.front())
                                     : text::format("equal: {} common steps, {} to {}",
                                                    common.size(), common.front(), common.back());
    if (!outcome.twice.empty()) report.text += ", but " + outcome.twice;
  } else {
    const std::int64_t step = *outcome.first_difference;
    report.text = text::format("differ: first at step {}, {}; ", step, outcome.where);
    const auto place = std::ranges::find(common, step);
    report.text += place == common.begin() ? "it is the first common step"
                                           : text::format("equal up to step {}", *(place - 1));
    if (!outcome.twice.empty()) report.text += "\n" + outcome.twice;
  }
  report.text += "\n";
  for (const std::string& line : outcome.details) report.text += line + "\n";
  report.code = outcome.first_difference || !outcome.twice.empty() ? 1 : 0;
  return report;
}

std::string where_of(const std::string& first, std::size_t count, std::size_t total) {
  if (count == 1) return text::format("in {}, alone of {} tensors", first, total);
  return text::format("in {} (and {} more tensor{} of {})", first, count - 1, count == 2 ? "" : "s",
                      total);
}

std::string text_of(const std::set<std::int64_t>& steps) {
  if (steps.empty()) return "no step";
  if (steps.size() == 1) return text::format("1 step, {}", *steps.begin());
  return text::format("{} steps, {} to {}", steps.size(), *steps.begin(), *steps.rbegin());
}

std::string text_of(const std::set<std::string>& models) {
  std::vector<std::string> names;
  for (const std::string& one : models) names.push_back("'" + printable(one) + "'");
  return text::join(names, ", ");
}

// The steps that both have. Throws if there are none.
std::vector<std::int64_t> match_steps(const std::string& left, const std::set<std::int64_t>& mine,
                                      const std::string& right,
                                      const std::set<std::int64_t>& theirs,
                                      std::vector<std::string>& details) {
  std::vector<std::int64_t> common;
  std::ranges::set_intersection(mine, theirs, std::back_inserter(common));
  if (common.empty()) {
    refuse(
        text::format("There is no common step: {} has {}, {} has {}.\nCompare runs that write "
                     "hashes, or save, at the same steps.",
                     left, text_of(mine), right, text_of(theirs)));
  }
  for (const auto& [path, one, other] :
       {std::tuple(&left, &mine, &theirs), std::tuple(&right, &theirs, &mine)}) {
    std::set<std::int64_t> only;
    std::ranges::set_difference(*one, *other, std::inserter(only, only.end()));
    if (!only.empty()) {
      details.push_back(text::format("only in {}: {}", printable(*path), text_of(only)));
    }
  }
  return common;
}

std::string where_logs_differ(const RunLog::Tensors& mine, const RunLog::Tensors& theirs) {
  std::set<std::string> names;
  RunLog::Tensors all = mine;
  all.insert(theirs.begin(), theirs.end());
  for (const auto& [name, hash] : all) {
    const auto one = mine.find(name);
    const auto other = theirs.find(name);
    if (one == mine.end() || other == theirs.end() || one->second != other->second) {
      names.insert(name);
    }
  }
  if (names.empty()) return "in the hash of all tensors";  // that somebody has changed
  return where_of(printable(*names.begin()), names.size(), all.size());
}

Report verify_logs(const std::string& left, const std::string& right) {
  const RunLog mine(left);
  const RunLog theirs(right);
  Outcome outcome;
  outcome.common = match_steps(left, mine.steps(), right, theirs.steps(), outcome.details);
  std::set<std::int64_t> different;
  std::size_t num_common = 0;
  for (const auto& [key, entry] : mine.entries()) {
    const auto other = theirs.entries().find(key);
    if (other == theirs.entries().end()) continue;
    ++num_common;
    if (entry.hash == other->second.hash) continue;
    if (different.empty()) {
      outcome.first_difference = key.first;
      outcome.where = where_logs_differ(mine.tensors(entry), theirs.tensors(other->second));
      if (!key.second.empty()) outcome.where += " of model " + printable(key.second);
    }
    different.insert(key.first);
  }
  if (num_common == 0 || mine.models() != theirs.models()) {
    refuse(
        text::format("{} and {} have hashes of different models (DdpOptions::name): {} and {}.\n"
                     "Compare runs of one program.",
                     left, right, text_of(mine.models()), text_of(theirs.models())));
  }
  if (!different.empty()) {
    outcome.details.insert(
        outcome.details.begin(),
        text::format("{} of {} common steps differ", different.size(), outcome.common.size()));
  }
  for (const RunLog* const one : {&mine, &theirs}) {
    if (!one->twice().empty()) {
      const std::size_t more = one->twice().size() - 1;
      if (!outcome.twice.empty()) outcome.twice += "\n";
      outcome.twice += text::format("{} has step {} twice, with different hashes{}",
                                    printable(one->path()), *one->twice().begin(),
                                    more == 0 ? "" : text::format(" (and {} more steps)", more));
    }
    outcome.details.insert(outcome.details.end(), one->notes().begin(), one->notes().end());
  }
  for (const auto& [name, values] : mine.settings()) {
    const auto other = theirs.settings().find(name);
    if (other == theirs.settings().end() || other->second == values) continue;
    outcome.details.push_back(text::format(
        "warning: {} is {} in {}, {} in {}: results depend on it", name, text::join(values, ", "),
        printable(left), text::join(other->second, ", "), printable(right)));
  }
  return report_of(outcome);
}

// By step; of two with the same step, the newer one.
std::map<std::int64_t, std::string> checkpoints_of(const std::string& path) {
  std::error_code error;  // of one that may not be seen, reading says more
  if (fs::exists(path + "/manifest.json", error) || error) {
    return {{read_manifest(path).step, path}};
  }
  std::map<std::int64_t, std::string> found;
  for (const CheckpointName& name : list_checkpoints(path)) {
    found.try_emplace(name.step, path + "/" + name.text());
  }
  if (found.empty()) {
    refuse(
        text::format("There is no checkpoint in {}.\nGive a folder that a Checkpointer has "
                     "written to.",
                     path));
  }
  return found;
}

void check_whole(const std::string& checkpoint) {
  const std::string damage = find_damage(checkpoint, read_manifest(checkpoint));
  if (!damage.empty()) {
    refuse(text::format("{} is not whole: {}.\nTake another checkpoint.", checkpoint, damage));
  }
}

Report verify_checkpoints(const std::string& left, const std::string& right) {
  constexpr std::size_t kMaxLines = 20;
  const auto mine = checkpoints_of(left);
  const auto theirs = checkpoints_of(right);
  const auto steps_of = [](const auto& checkpoints) {
    std::set<std::int64_t> steps;
    for (const auto& [step, path] : checkpoints) steps.insert(step);
    return steps;
  };
  Outcome outcome;
  outcome.common = match_steps(left, steps_of(mine), right, steps_of(theirs), outcome.details);
  for (const std::int64_t step : outcome.common) {
    check_whole(mine.at(step));
    check_whole(theirs.at(step));
    const Differences found = compare_tensors(mine.at(step), theirs.at(step), DiffScope::kRun);
    std::vector<std::string> lines;
    for (const auto* const kind : {&found.tensors, &found.values}) {
      for (const DiffLine& one : *kind) lines.push_back("  " + one.text);
    }
    if (lines.empty()) continue;
    outcome.first_difference = step;
    outcome.where = found.tensors.empty() ? "in " + found.values.front().name
                                          : where_of(found.tensors.front().name,
                                                     found.tensors.size(), found.num_tensors);
    if (lines.size() > kMaxLines) {
      const std::size_t more = lines.size() - kMaxLines;
      lines.resize(kMaxLines);
      lines.push_back(text::format("  and {} more differences", more));
    }
    outcome.details.insert(outcome.details.begin(), lines.begin(), lines.end());
    break;
  }
  return report_of(outcome);
}

}  // namespace

Report verify(const std::string& left, const std::string& right) {
  std::error_code ignored;
  const bool is_folder = fs::is_directory(left, ignored);
  if (is_folder != fs::is_directory(right, ignored) && fs::exists(left, ignored) &&
      fs::exists(right, ignored)) {
    refuse(text::format("{} is a {}, {} a {}.\nGive two logs of hashes, or two checkpoints.", left,
                        is_folder ? "folder" : "file", right, is_folder ? "file" : "folder"));
  }
  return is_folder ? verify_checkpoints(left, right) : verify_logs(left, right);
}

}  // namespace lockstep
