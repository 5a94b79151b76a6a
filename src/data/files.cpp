// Tensors from files: mapped, IDX, text.

#include <ATen/ATen.h>
#include <fcntl.h>
#include <lockstep/dataset.h>
#include <lockstep/error.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <zlib.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <memory>

#include "base/posix.h"
#include "base/text.h"

namespace lockstep {
namespace {

[[noreturn]] void refuse(const std::string& path, const std::string& what) {
  throw UsageError({.operation = "data"},
                   text::format("{} {}.\nFetch or make the file again.", path, what));
}

std::size_t size_of(const Fd& fd, const std::string& path) {
  struct stat status {};
  if (!fd || ::fstat(fd.get(), &status) != 0) {
    throw_errno(text::format("cannot read {}", path), "Check the path and the permissions.");
  }
  if (!S_ISREG(status.st_mode)) refuse(path, "is not a file");
  return static_cast<std::size_t>(status.st_size);
}

// What gzip has packed, or the file as it is. At most `size` bytes: a small file can claim to hold
// much more than there is memory.
std::string read_some(gzFile file, const std::string& path, std::size_t size) {
  std::string bytes;
  constexpr unsigned kStep = 1 << 20;
  while (bytes.size() < size) {
    const std::size_t before = bytes.size();
    const auto step = static_cast<unsigned>(std::min<std::size_t>(kStep, size - before));
    bytes.resize(before + step);
    const int count = ::gzread(file, bytes.data() + before, step);
    if (count < 0) {
      int code = 0;
      refuse(path, text::format("is damaged: {}", ::gzerror(file, &code)));
    }
    bytes.resize(before + static_cast<std::size_t>(count));
    if (count == 0) break;
  }
  return bytes;
}

std::uint32_t number_at(const std::string& bytes, std::size_t at) {
  std::uint32_t number = 0;
  for (std::size_t i = 0; i < 4; ++i)
    number = number << 8 | static_cast<unsigned char>(bytes[at + i]);
  return number;
}

at::ScalarType idx_type(unsigned char code, const std::string& path) {
  switch (code) {
    case 0x08:
      return at::kByte;
    case 0x09:
      return at::kChar;
    case 0x0B:
      return at::kShort;
    case 0x0C:
      return at::kInt;
    case 0x0D:
      return at::kFloat;
    case 0x0E:
      return at::kDouble;
    default:
      refuse(path, text::format("is not in the IDX format: there is no type {:#x}", code));
  }
}

}  // namespace

at::Tensor map_tensor(const std::string& path, at::ScalarType type,
                      const std::vector<std::int64_t>& sizes, std::size_t offset) {
  const Fd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  const std::size_t file_bytes = size_of(fd, path);
  const std::size_t element = c10::elementSize(type);
  std::size_t bytes = element;
  for (const std::int64_t size : sizes) {
    if (size < 0 || (size > 0 && bytes > SIZE_MAX / 2 / static_cast<std::size_t>(size))) {
      throw UsageError({.operation = "data"},
                       text::format("A tensor of {} was asked for.\nGive sizes "
                                    "that fit the file.",
                                    c10::str(sizes)));
    }
    bytes *= static_cast<std::size_t>(size);
  }
  if (offset % element != 0 || offset > file_bytes || bytes > file_bytes - offset) {
    throw UsageError(
        {.operation = "data"},
        text::format("{} bytes from byte {} on were asked of {}, which has {}; elements "
                     "have {}.\nGive the sizes and the type that the file has.",
                     bytes, offset, path, file_bytes, element));
  }
  const auto options = at::TensorOptions(type);
  if (bytes == 0) return at::empty(sizes, options);
  // From the beginning: an offset need not be that of a page.
  void* const data = ::mmap(nullptr, offset + bytes, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_NORESERVE, fd.get(), 0);
  if (data == MAP_FAILED) {
    throw_errno(text::format("cannot map {}", path),
                "Raise the limit on address space (ulimit -v).");
  }
  return at::from_blob(
      static_cast<char*>(data) + offset, sizes,
      [data, length = offset + bytes](void*) { ::munmap(data, length); }, options);
}

at::Tensor read_idx(const std::string& path) {
  const std::unique_ptr<gzFile_s, decltype(&::gzclose)> file(::gzopen(path.c_str(), "rbe"),
                                                             ::gzclose);
  if (!file)
    throw_errno(text::format("cannot read {}", path), "Check the path and the permissions.");
  const std::string head = read_some(file.get(), path, 4);
  if (head.size() < 4 || head[0] != 0 || head[1] != 0) refuse(path, "is not in the IDX format");
  const at::ScalarType type = idx_type(static_cast<unsigned char>(head[2]), path);
  const auto num_dims = static_cast<unsigned char>(head[3]);
  const std::string dims = read_some(file.get(), path, std::size_t{4} * num_dims);
  if (dims.size() < std::size_t{4} * num_dims) refuse(path, "ends in its header");
  std::vector<std::int64_t> sizes;
  std::size_t bytes = c10::elementSize(type);
  for (std::size_t i = 0; i < num_dims; ++i) {
    const std::size_t size = number_at(dims, 4 * i);
    if (size != 0 && bytes > (SIZE_MAX >> 1) / size)
      refuse(path, "says that it is larger than memory");
    sizes.push_back(static_cast<std::int64_t>(size));
    bytes *= size;
  }
  std::string data = read_some(file.get(), path, bytes);
  if (data.size() < bytes) {
    refuse(path, text::format("is truncated: it has {} bytes of {} ({})", data.size(), bytes,
                              c10::str(sizes)));
  }
  if (!read_some(file.get(), path, 1).empty()) {
    refuse(path, text::format("goes on behind its {} bytes ({})", bytes, c10::str(sizes)));
  }
  at::Tensor tensor = at::empty(sizes, at::TensorOptions(type));
  if (std::endian::native == std::endian::little) {
    const std::size_t width = c10::elementSize(type);
    for (std::size_t at = 0; width > 1 && at < bytes; at += width) {
      std::reverse(data.begin() + static_cast<std::ptrdiff_t>(at),
                   data.begin() + static_cast<std::ptrdiff_t>(at + width));
    }
  }
  if (bytes != 0) std::memcpy(tensor.mutable_data_ptr(), data.data(), bytes);
  return tensor;
}

TextFile::TextFile(const std::string& path, std::size_t length) : length_(length) {
  num_bytes_ = size_of(Fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC)), path);
  if (length == 0 || num_bytes_ < length + 1) {
    throw UsageError({.operation = "data"},
                     text::format("{} has {} characters, and samples of {} and one more were asked "
                                  "for.\nGive a longer text, or a length from 1.",
                                  path, num_bytes_, length));
  }
  bytes_ = map_tensor(path, at::kByte, {static_cast<std::int64_t>(num_bytes_)});
  std::vector<bool> occurs(256, false);
  const auto* const text = bytes_.const_data_ptr<std::uint8_t>();
  for (std::size_t i = 0; i < num_bytes_; ++i) occurs[text[i]] = true;
  token_of_ = at::zeros({256}, at::TensorOptions(at::kLong));
  auto* const tokens = token_of_.mutable_data_ptr<std::int64_t>();
  for (std::size_t byte = 0; byte < 256; ++byte) {
    if (!occurs[byte]) continue;
    tokens[byte] = static_cast<std::int64_t>(vocabulary_.size());
    vocabulary_.push_back(static_cast<char>(byte));
  }
}

Sample TextFile::get(std::size_t index) const {
  if (index >= size()) {
    throw UsageError(
        {.operation = "data"},
        text::format("Sample {} was asked for, and the text has {}.\nGive the sampler the "
                     "data set's size.",
                     index, size()));
  }
  const at::Tensor part = bytes_.narrow(0, static_cast<std::int64_t>(index * length_),
                                        static_cast<std::int64_t>(length_ + 1));
  const at::Tensor tokens = token_of_.index_select(0, part.to(at::kLong));
  const auto length = static_cast<std::int64_t>(length_);
  return {tokens.narrow(0, 0, length), tokens.narrow(0, 1, length)};
}

std::string TextFile::decode(const at::Tensor& tokens) const {
  std::string text;
  const at::Tensor flat = tokens.to(at::kLong).flatten().contiguous();
  for (std::int64_t i = 0; i < flat.numel(); ++i) {
    const auto token = static_cast<std::size_t>(flat.const_data_ptr<std::int64_t>()[i]);
    if (token >= vocabulary_.size()) {
      throw UsageError(
          {.operation = "data"},
          text::format("There is no character for token {}: there are {}.\nGive tokens of "
                       "this text.",
                       token, vocabulary_.size()));
    }
    text.push_back(vocabulary_[token]);
  }
  return text;
}

}  // namespace lockstep
