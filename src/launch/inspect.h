// Inspect: what is in checkpoints and safetensors files, whether they are whole, how two differ.
#pragma once

#include <string>
#include <vector>

namespace lockstep {

struct Report {
  std::string text = {};
  int code = 0;  // what the program exits with
};

// `path`: a checkpoint, a folder of checkpoints or a .safetensors file. The code is 1 if something
// is not whole. Throws: UsageError, SystemError if it is none of these, or cannot be read.
Report inspect(const std::string& path);

// Both checkpoints or both files. The code is 1 if they differ.
Report diff(const std::string& left, const std::string& right);

struct DiffLine {
  std::string name = {};  // of a tensor, or "state/parts/..."; as a terminal may show it
  std::string text = {};  // with the name: a line
};

struct Differences {
  std::vector<DiffLine> tensors = {};
  std::vector<DiffLine> values = {};  // of the state
  std::size_t num_tensors = 0;        // that were compared, by name
};

// kAll: everything; kRun: only what does not depend on the ranks that saved it. Their number,
// random states, and what each rank has for itself are left out.
enum class DiffScope { kAll, kRun };
Differences compare_tensors(const std::string& left, const std::string& right, DiffScope scope);

}  // namespace lockstep
