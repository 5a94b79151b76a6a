#include "archive/safetensors.h"

#include <lockstep/error.h>

#include <algorithm>
#include <array>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>

#include "base/json.h"
#include "base/printable.h"
#include "base/text.h"

namespace lockstep {
namespace {

constexpr std::uint64_t kMaxHeaderBytes = 100'000'000;  // as in Python's package
constexpr std::size_t kAlignment = 8;                   // of the first tensor, likewise
constexpr const char* kMetadata = "__metadata__";

constexpr std::array<std::pair<std::string_view, int>, 18> kTypes = {{{"BOOL", 1},
                                                                      {"U8", 1},
                                                                      {"I8", 1},
                                                                      {"F8_E4M3", 1},
                                                                      {"F8_E5M2", 1},
                                                                      {"F8_E4M3FNUZ", 1},
                                                                      {"F8_E5M2FNUZ", 1},
                                                                      {"U16", 2},
                                                                      {"I16", 2},
                                                                      {"F16", 2},
                                                                      {"BF16", 2},
                                                                      {"U32", 4},
                                                                      {"I32", 4},
                                                                      {"F32", 4},
                                                                      {"U64", 8},
                                                                      {"I64", 8},
                                                                      {"F64", 8},
                                                                      {"C64", 8}}};

[[noreturn]] void refuse(const std::string& file, const std::string& why) {
  throw UsageError(
      {.operation = "reading a checkpoint"},
      text::format("{} is no whole safetensors file: {}.\nTake another copy of it.", file, why));
}

// A name out of the file, for messages.
std::string shown(std::string_view name) { return printable(name.substr(0, 100)); }

// Follows the parser through the header, one value at a time: no tree is built, so a header costs
// no more memory than its entries.
class Reader : public Json::json_sax_t {
 public:
  explicit Reader(const std::string& file) : file_(file) {}

  bool null() override { unexpected("null"); }
  bool boolean(bool) override { unexpected("a truth value"); }
  bool number_float(double, const std::string&) override { unexpected("a fraction"); }
  bool binary(Json::binary_t&) override { unexpected("bytes"); }
  bool number_integer(std::int64_t) override { unexpected("a negative number"); }

  bool number_unsigned(std::uint64_t value) override {
    if (level_ != Level::kNumbers) unexpected("a number");
    if (value > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max())) {
      unexpected(text::format("the number {}", value));
    }
    if (field_ == "shape") {
      entry_.shape.push_back(static_cast<std::int64_t>(value));
    } else {
      if (num_offsets_ == 2) unexpected("a third offset");
      offsets_[num_offsets_++] = value;
    }
    return true;
  }

  bool string(std::string& value) override {
    if (level_ == Level::kTexts) {
      if (!header.metadata.emplace(name_, value).second) unexpected("a name that is there twice");
    } else if (level_ == Level::kEntry && field_ == "dtype" && entry_.dtype.empty()) {
      entry_.dtype = value;
    } else {
      unexpected("a text");
    }
    return true;
  }

  bool key(std::string& value) override {
    if (level_ == Level::kEntry) {
      field_ = value;
    } else {
      name_ = value;
    }
    return true;
  }

  bool start_object(std::size_t) override {
    switch (level_) {
      case Level::kOutside:
        level_ = Level::kHeader;
        break;
      case Level::kHeader:
        level_ = name_ == kMetadata ? Level::kTexts : Level::kEntry;
        entry_ = {};
        num_offsets_ = 0;
        has_shape_ = has_offsets_ = false;
        field_.clear();
        break;
      default:
        unexpected("an object");
    }
    return true;
  }

  bool end_object() override {
    if (level_ == Level::kEntry) finish_entry();
    level_ = level_ == Level::kHeader ? Level::kOutside : Level::kHeader;
    return true;
  }

  bool start_array(std::size_t) override {
    bool* const has = field_ == "shape" ? &has_shape_ : &has_offsets_;
    if (level_ != Level::kEntry || (field_ != "shape" && field_ != "data_offsets") || *has) {
      unexpected("a list");
    }
    *has = true;
    level_ = Level::kNumbers;
    return true;
  }

  bool end_array() override {
    level_ = Level::kEntry;
    return true;
  }

  bool parse_error(std::size_t at, const std::string&, const Json::exception&) override {
    refuse(file_, text::format("its header is no JSON at byte {}", at));
  }

  TensorHeader header;  // places are counted from the end of the header

 private:
  enum class Level { kOutside, kHeader, kTexts, kEntry, kNumbers };

  [[noreturn]] void unexpected(const std::string& what) {
    refuse(file_, text::format("its header has {} where there must be none, near '{}'", what,
                               shown(name_)));
  }

  void finish_entry() {
    const std::string name = shown(name_);
    if (entry_.dtype.empty() || !has_shape_ || num_offsets_ != 2) {
      refuse(file_, text::format("'{}' lacks its dtype, shape or data_offsets", name));
    }
    const int element = bytes_of_dtype(entry_.dtype);
    if (element == 0) {
      refuse(file_, text::format("'{}' has the unknown type '{}'", name, shown(entry_.dtype)));
    }
    std::uint64_t bytes = static_cast<std::uint64_t>(element);
    for (const std::int64_t size : entry_.shape) {
      if (__builtin_mul_overflow(bytes, static_cast<std::uint64_t>(size), &bytes)) {
        refuse(file_, text::format("'{}' has more elements than there can be", name));
      }
    }
    if (offsets_[1] < offsets_[0] || offsets_[1] - offsets_[0] != bytes) {
      refuse(file_, text::format("'{}' needs {} bytes, its data_offsets are [{}, {}]", name, bytes,
                                 offsets_[0], offsets_[1]));
    }
    entry_.begin = offsets_[0];
    entry_.bytes = bytes;
    if (!header.tensors.emplace(name_, std::move(entry_)).second) {
      refuse(file_, text::format("'{}' is there twice", name));
    }
  }

  const std::string& file_;
  Level level_ = Level::kOutside;
  std::string name_;
  std::string field_;
  TensorEntry entry_;
  std::array<std::uint64_t, 2> offsets_{};
  std::size_t num_offsets_ = 0;
  bool has_shape_ = false;
  bool has_offsets_ = false;
};

}  // namespace

int bytes_of_dtype(std::string_view dtype) {
  const auto found = std::ranges::find(kTypes, dtype, &decltype(kTypes)::value_type::first);
  return found == kTypes.end() ? 0 : found->second;
}

std::uint64_t parse_header_length(std::string_view first_bytes, std::uint64_t file_bytes,
                                  const std::string& file) {
  if (file_bytes < kLengthBytes || first_bytes.size() < kLengthBytes) {
    refuse(file, text::format("it has {} bytes", file_bytes));
  }
  std::uint64_t length = 0;
  for (std::size_t i = kLengthBytes; i-- > 0;) {
    length = length << 8 | static_cast<unsigned char>(first_bytes[i]);
  }
  if (length > file_bytes - kLengthBytes) {
    refuse(file, text::format("its header is said to have {} bytes, the file has {}", length,
                              file_bytes));
  }
  if (length > kMaxHeaderBytes) {
    refuse(file, text::format("its header has {} bytes, more than {}", length, kMaxHeaderBytes));
  }
  return length;
}

TensorHeader parse_header(std::string_view json, std::uint64_t file_bytes,
                          const std::string& file) {
  if (json.empty() || json.front() != '{') refuse(file, "its header does not begin with '{'");
  Reader reader(file);
  Json::sax_parse(json, &reader);
  const std::uint64_t data_begin = kLengthBytes + json.size();
  std::vector<std::pair<std::uint64_t, std::string_view>> places;  // in the order of the file
  for (auto& [name, entry] : reader.header.tensors) {
    if (entry.bytes > 0) places.emplace_back(entry.begin, name);
  }
  std::ranges::sort(places);
  std::uint64_t at = 0;
  for (const auto& [begin, name] : places) {
    if (begin != at) {
      refuse(file, text::format("'{}' begins at {}, but what is before it ends at {}", shown(name),
                                begin, at));
    }
    at += reader.header.tensors.find(std::string(name))->second.bytes;
  }
  for (auto& [name, entry] : reader.header.tensors) {
    if (entry.begin > at) refuse(file, text::format("'{}' lies outside", shown(name)));
    entry.begin += data_begin;
  }
  if (data_begin + at != file_bytes) {
    refuse(file,
           text::format("its tensors end at byte {}, the file at {}", data_begin + at, file_bytes));
  }
  return std::move(reader.header);
}

std::string make_header(std::vector<std::pair<std::string, TensorEntry>>& tensors,
                        const std::map<std::string, std::string>& metadata) {
  Json json = Json::object();
  if (!metadata.empty()) json[kMetadata] = metadata;
  std::uint64_t at = 0;
  for (auto& [name, entry] : tensors) {
    entry.begin = at;
    entry.bytes = static_cast<std::uint64_t>(bytes_of_dtype(entry.dtype));
    for (const std::int64_t size : entry.shape) entry.bytes *= static_cast<std::uint64_t>(size);
    at += entry.bytes;
    json[name] = {
        {"dtype", entry.dtype}, {"shape", entry.shape}, {"data_offsets", {entry.begin, at}}};
  }
  std::string text = json.dump();
  if (text.size() > kMaxHeaderBytes || json.size() != tensors.size() + (metadata.empty() ? 0 : 1)) {
    throw UsageError(
        {.operation = "save"},
        text::format("{} tensors, with {} different names and {} bytes of their "
                     "description, do not go into a file.\nGive each a name of its own, "
                     "and save fewer together.",
                     tensors.size(), json.size(), text.size()));
  }
  text.resize((text.size() + kAlignment - 1) / kAlignment * kAlignment, ' ');
  std::string length;
  for (std::size_t i = 0; i < kLengthBytes; ++i) {
    length.push_back(static_cast<char>(text.size() >> 8 * i & 0xFF));
  }
  for (auto& [name, entry] : tensors) entry.begin += kLengthBytes + text.size();
  return length + text;
}

}  // namespace lockstep
