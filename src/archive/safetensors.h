// safetensors: tensors in a file, as Python's package of that name reads and writes them.
//
// A file is the length of a header (8 bytes, the lowest first), the header, which is JSON and says
// for each name type, shape and place, and the bytes. Nothing in it is run. The reader believes
// nothing: places must follow each other without gap up to the end of the file, and fit the shapes.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace lockstep {

struct TensorEntry {
  std::string dtype = {};  // "F32", "BF16", "I64", ...
  std::vector<std::int64_t> shape = {};
  std::uint64_t begin = 0;  // in the file
  std::uint64_t bytes = 0;
};

struct TensorHeader {
  std::map<std::string, TensorEntry> tensors = {};
  std::map<std::string, std::string> metadata = {};
};

constexpr std::uint64_t kLengthBytes = 8;

// Bytes of one element; 0: there is no such type.
int bytes_of_dtype(std::string_view dtype);

// How long the header is, from the first 8 bytes of a file of this size.
// Throws: UsageError that names `file`, as all here do.
std::uint64_t parse_header_length(std::string_view first_bytes, std::uint64_t file_bytes,
                                  const std::string& file);
TensorHeader parse_header(std::string_view json, std::uint64_t file_bytes, const std::string& file);

// The first bytes of a file with these tensors, in this order; sets their places. Throws:
// UsageError if two have one name, or they are too many.
std::string make_header(std::vector<std::pair<std::string, TensorEntry>>& tensors,
                        const std::map<std::string, std::string>& metadata);

}  // namespace lockstep
