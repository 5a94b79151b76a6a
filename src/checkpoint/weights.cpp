// Weights alone, as one file: what other programs read, and what comes from them.

#include <torch/nn/module.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <optional>

#include "base/text.h"
#include "checkpoint/checkpointer.h"
#include "checkpoint/sharing.h"
#include "checkpoint/tensors.h"
#include "ddp/shards.h"
#include "world/exchange.h"

namespace lockstep {

void save_tensors(const std::string& path, const std::vector<NamedTensor>& tensors) {
  const std::filesystem::path target = std::filesystem::absolute(path);
  const std::string folder = target.parent_path().string();
  const std::string unfinished = text::format(".{}.{}", target.filename().string(), ::getpid());
  const std::string temporary = folder + "/" + unfinished;
  ::unlink(temporary.c_str());  // of a process with the same number, long gone
  try {
    write_tensors(folder, unfinished, tensors, FileKind::kAlone);
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
  const std::vector<NamedTensor> tensors = tensors_of(model);
  for (const auto& shards : holders_of(tensors)) shards->check_usable();
  Shards::check_whole(tensors, -1);
  save_tensors(path, tensors);
}

Loaded load_weights(const std::string& path, torch::nn::Module& model, const LoadOptions& options) {
  const std::vector<NamedTensor> tensors = tensors_of(model);
  std::optional<FileReader> file;
  TensorHeader header;
  std::vector<NamedTensor> fitting;
  Loaded loaded{.path = path};
  const auto open = [&] {
    file.emplace(path);
    header = file->tensors();
    loaded.differences = compare(header.tensors, tensors, options.strict, fitting);
    if (options.strict && !loaded.differences.empty()) {
      throw_differences(path, loaded.differences, -1);
    }
  };
  const auto read = [&](const std::shared_ptr<Shards>& holder) {
    for (const NamedTensor& one : fitting) {
      if (Shards::holder_of(one.tensor) != holder) continue;
      read_tensor(*file, header.tensors.at(one.name), one.tensor);
    }
  };
  const auto holders = holders_of(tensors);
  holders.empty() ? open() : do_together(holders.front()->host(), "load", open);
  for (const auto& shards : holders) shards->change_parameters([&] { read(shards); });
  read(nullptr);  // what is this rank's own
  return loaded;
}

}  // namespace lockstep
