// Args: from what a person types to what is to be done.
#pragma once

#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "launch/run_options.h"

namespace lockstep {

// The arguments make no sense; what() is one sentence.
struct BadArguments : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct Invocation {
  enum class Verb { kRun, kDoctor, kInspect, kVerify, kScale, kTop, kJobs, kSecret, kPrint };
  Verb verb = Verb::kPrint;
  RunOptions run = {};
  // kInspect: one, or two to compare; kVerify: two; kSecret: one, or none to print it.
  std::vector<std::string> paths = {};
  std::string job = {};                     // kScale, kTop: which one
  double every_s = 1;                       // kTop: how often it looks
  std::optional<int> ranks = std::nullopt;  // kScale: how many it is to have
  std::optional<int> leave = std::nullopt;  // kScale: which one is to leave
  std::string text = {};                    // kPrint: help, the version, a completion script
};

// `arguments` without the program's own name. Throws BadArguments.
Invocation parse_arguments(const std::vector<std::string>& arguments);

}  // namespace lockstep
