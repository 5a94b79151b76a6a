// Weights alone, as one file: what other programs read, and what comes from them.

#include <torch/nn/module.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <filesystem>

#include "base/text.h"
#include "checkpoint/tensors.h"

namespace lockstep {

void save_tensors(const std::string& path, const std::vector<NamedTensor>& tensors) {
  const std::filesystem::path target = std::filesystem::absolute(path);
  const std::string folder = target.parent_path().string();
  const std::string unfinished = text::format(".{}.{}", target.filename().string(), ::getpid());
  const std::string temporary = folder + "/" + unfinished;
  ::unlink(temporary.c_str());  // of a process with the same number, long gone
  try {
    write_tensors(folder, unfinished, tensors);
    if (::rename(temporary.c_str(), target.c_str()) != 0) {
      throw_errno(text::format("cannot write {}", path), "Give a file that this user may write.");
    }
    sync_folder(folder);
  } catch (...) {
    ::unlink(temporary.c_str());
    throw;
  }
}

std::vector<NamedTensor> load_tensors(const std::string& path) {
  const FileReader file(path);
  std::vector<NamedTensor> tensors;
  for (const auto& [name, entry] : file.tensors().tensors) {
    tensors.push_back({name, make_tensor(entry)});
    read_tensor(file, entry, tensors.back().tensor);
  }
  return tensors;
}

void save_weights(const std::string& path, const torch::nn::Module& model) {
  save_tensors(path, tensors_of(model));
}

Loaded load_weights(const std::string& path, torch::nn::Module& model, const LoadOptions& options) {
  const FileReader file(path);
  const TensorHeader header = file.tensors();
  std::vector<NamedTensor> fitting;
  Loaded loaded{.path = path};
  loaded.differences = compare(header.tensors, tensors_of(model), options.strict, fitting);
  if (options.strict && !loaded.differences.empty()) {
    throw_differences(path, loaded.differences, -1);
  }
  for (const NamedTensor& one : fitting) {
    read_tensor(file, header.tensors.at(one.name), one.tensor);
  }
  return loaded;
}

}  // namespace lockstep
