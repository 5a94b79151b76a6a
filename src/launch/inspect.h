// Inspect: what is in checkpoints and safetensors files, whether they are whole, how two differ.
#pragma once

#include <string>

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

}  // namespace lockstep
