// doctor: what this machine offers to a job, and what is wrong with it.
#pragma once

#include <string>
#include <vector>

namespace lockstep {

struct Finding {
  enum class Kind { kFine, kNote, kProblem };
  std::string subject;
  std::string text;
  Kind kind = Kind::kFine;
  std::string remedy = {};  // unless all is fine
};

// `system_root` stands before /proc and /sys: tests have their own.
std::vector<Finding> examine_machine(const std::string& system_root);

// One line each, the remedies below theirs.
std::string to_text(const std::vector<Finding>& findings);

}  // namespace lockstep
