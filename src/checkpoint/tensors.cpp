#include "checkpoint/tensors.h"

#include <ATen/ATen.h>
#include <lockstep/error.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>
#include <set>

#include "base/json.h"
#include "base/text.h"

namespace lockstep {
namespace {

constexpr std::int64_t kBufferBytes = 16 << 20;

constexpr std::array<std::pair<const char*, at::ScalarType>, 18> kTypes = {
    {{"F32", at::kFloat},
     {"F64", at::kDouble},
     {"F16", at::kHalf},
     {"BF16", at::kBFloat16},
     {"I64", at::kLong},
     {"I32", at::kInt},
     {"I16", at::kShort},
     {"I8", at::kChar},
     {"U8", at::kByte},
     {"BOOL", at::kBool},
     {"C64", at::kComplexFloat},
     {"U16", at::kUInt16},
     {"U32", at::kUInt32},
     {"U64", at::kUInt64},
     {"F8_E4M3", at::kFloat8_e4m3fn},
     {"F8_E5M2", at::kFloat8_e5m2},
     {"F8_E4M3FNUZ", at::kFloat8_e4m3fnuz},
     {"F8_E5M2FNUZ", at::kFloat8_e5m2fnuz}}};

// Files have no complex numbers of 128 bits: they are kept as pairs of F64.
at::Tensor as_in_file(const at::Tensor& tensor) {
  const at::Tensor plain = tensor.detach().resolve_conj().resolve_neg();
  return plain.scalar_type() == at::kComplexDouble ? at::view_as_real(plain) : plain;
}

std::string_view bytes_of(const at::Tensor& tensor) {
  return {static_cast<const char*>(tensor.const_data_ptr()), tensor.nbytes()};
}

void write(FileWriter& file, const at::Tensor& tensor) {
  if (tensor.numel() == 0) return;
  if (tensor.is_cpu() && tensor.is_contiguous()) return file.write(bytes_of(tensor));
  if (static_cast<std::int64_t>(tensor.nbytes()) <= kBufferBytes || tensor.dim() == 0) {
    return file.write(bytes_of(tensor.cpu().contiguous()));
  }
  const std::int64_t size = tensor.size(0);
  if (size == 1) return write(file, tensor.select(0, 0));
  write(file, tensor.narrow(0, 0, size / 2));
  write(file, tensor.narrow(0, size / 2, size - size / 2));
}

using Entries = std::vector<std::pair<std::string, TensorEntry>>;

// What torch.distributed.checkpoint's writer of safetensors puts into a header: where in the whole
// tensor a file's piece begins, here at 0 in each dimension. Its reader assumes that where it finds
// nothing; consolidate_safetensors_files refuses a file without it, or with an empty list.
std::map<std::string, std::string> metadata_of(const Entries& entries, FileKind kind) {
  std::map<std::string, std::string> metadata = {{"format", "pt"}};
  if (kind == FileKind::kAlone) return metadata;
  Json offsets = Json::object();
  for (const auto& [name, entry] : entries) {
    offsets[name]["saved_offsets"] = std::vector<int>(entry.shape.size(), 0);
  }
  metadata["DCP_VERSION"] = "1.0";
  metadata["DCP_SHARDING_INFO"] = offsets.dump();
  return metadata;
}

}  // namespace

TensorEntry entry_of(const NamedTensor& one) {
  if (!one.tensor.defined() || one.tensor.layout() != at::kStrided) {
    throw UsageError({.operation = "checkpoint"},
                     text::format("'{}' is {}.\nOnly dense tensors can be saved.", one.name,
                                  one.tensor.defined() ? "sparse" : "undefined"));
  }
  const at::Tensor plain = as_in_file(one.tensor);
  const auto* const found =
      std::ranges::find(kTypes, plain.scalar_type(), &decltype(kTypes)::value_type::second);
  if (found == kTypes.end()) {
    throw UsageError({.operation = "checkpoint"},
                     text::format("'{}' has the type {}, which safetensors files cannot have.\n"
                                  "Save it as another type.",
                                  one.name, c10::toString(plain.scalar_type())));
  }
  return {.dtype = found->first, .shape = plain.sizes().vec()};
}

at::Tensor make_tensor(const TensorEntry& entry) {
  const auto* const found =
      std::ranges::find(kTypes, entry.dtype, &decltype(kTypes)::value_type::first);
  return at::empty(entry.shape, found->second);
}

std::string text_of(const TensorEntry& entry) {
  return text::format("{} [{}]", entry.dtype, text::join(entry.shape, ", "));
}

FileRecord write_tensors(const std::string& folder, const std::string& name,
                         const std::vector<NamedTensor>& tensors, FileKind kind) {
  Entries entries;
  for (const NamedTensor& one : tensors) entries.emplace_back(one.name, entry_of(one));
  FileWriter file(folder, name);
  file.write(make_header(entries, metadata_of(entries, kind)));
  for (const NamedTensor& one : tensors) write(file, as_in_file(one.tensor));
  return file.finish();
}

void read_tensor(const FileReader& file, const TensorEntry& entry, const at::Tensor& into) {
  if (entry.bytes == 0) return;
  const at::NoGradGuard no_grad;
  at::Tensor target = into.detach();
  if (target.scalar_type() == at::kComplexDouble) target = at::view_as_real(target);
  at::Tensor buffer = target;
  const bool is_direct =
      target.is_cpu() && target.is_contiguous() && entry_of({"", target}).dtype == entry.dtype;
  if (!is_direct) buffer = make_tensor(entry);
  file.read(entry.begin, entry.bytes, static_cast<char*>(buffer.mutable_data_ptr()));
  if (is_direct) {
    target.unsafeGetTensorImpl()->bump_version();  // as copy_() does
  } else {
    target.copy_(buffer);
  }
}

std::vector<std::string> compare(const std::map<std::string, TensorEntry>& in_file,
                                 const std::vector<NamedTensor>& wanted, bool must_have_type,
                                 std::vector<NamedTensor>& fitting) {
  std::vector<std::string> differences;
  std::set<std::string> names;
  for (const NamedTensor& one : wanted) {
    names.insert(one.name);
    const TensorEntry here = entry_of(one);
    const auto found = in_file.find(one.name);
    if (found == in_file.end()) {
      differences.push_back(text::format("missing: {} {}", one.name, text_of(here)));
    } else if (found->second.shape != here.shape ||
               (must_have_type && found->second.dtype != here.dtype)) {
      differences.push_back(text::format("{}: {} in the file, {} here", one.name,
                                         text_of(found->second), text_of(here)));
    } else {
      fitting.push_back(one);
    }
  }
  for (const auto& [name, entry] : in_file) {
    if (!names.contains(name)) {
      differences.push_back(text::format("unexpected: {} {}", name, text_of(entry)));
    }
  }
  return differences;
}

void throw_differences(const std::string& path, const std::vector<std::string>& differences,
                       int rank) {
  throw UsageError({.rank = rank, .operation = "load"},
                   text::format("{} does not fit what is to be loaded; nothing was changed:\n  {}\n"
                                "Load it into the model that it was saved from, or with "
                                "strict = false.",
                                path, text::join(differences, "\n  ")));
}

std::vector<NamedTensor> tensors_of(const torch::nn::Module& model) {
  std::vector<NamedTensor> all;
  for (const auto& one : model.named_parameters()) all.push_back({one.key(), one.value()});
  for (const auto& one : model.named_buffers()) all.push_back({one.key(), one.value()});
  std::erase_if(all, [](const NamedTensor& one) { return !one.tensor.defined(); });
  return all;
}

}  // namespace lockstep
