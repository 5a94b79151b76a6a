// Tensors in files: their types by safetensors' names, and their bytes.
#pragma once

#include <lockstep/checkpoint.h>

#include <string>
#include <vector>

#include "archive/file.h"

namespace lockstep {

// Throws: UsageError that names the tensor if files cannot have its type or layout.
TensorEntry entry_of(const NamedTensor& tensor);
at::Tensor make_tensor(const TensorEntry& entry);

// "F32 [10, 5]"
std::string text_of(const TensorEntry& entry);

// The header of a checkpoint's file says also that its tensors are whole, as PyTorch's distributed
// checkpoint wants to know it.
enum class FileKind { kAlone, kOfCheckpoint };

// Writes a file of these tensors, from where they are: what is not contiguous, or not on the CPU,
// goes through a buffer of bounded size.
FileRecord write_tensors(const std::string& folder, const std::string& name,
                         const std::vector<NamedTensor>& tensors, FileKind kind);

// `into` has the entry's number of elements; its type may be another.
void read_tensor(const FileReader& file, const TensorEntry& entry, const at::Tensor& into);

// How names, shapes and types of what a file has and what a program wants differ, a line each.
// A name for which there is no difference is put into `fitting`.
std::vector<std::string> compare(const std::map<std::string, TensorEntry>& in_file,
                                 const std::vector<NamedTensor>& wanted, bool must_have_type,
                                 std::vector<NamedTensor>& fitting);
// Throws: UsageError that lists all differences.
[[noreturn]] void throw_differences(const std::string& path,
                                    const std::vector<std::string>& differences, int rank);

// Parameters and buffers, in the order and with the names that Python's state_dict() has.
std::vector<NamedTensor> tensors_of(const torch::nn::Module& model);

}  // namespace lockstep
