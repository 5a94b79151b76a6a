// Files of records: lines, or sizes and bytes.

#include <lockstep/error.h>
#include <lockstep/records.h>
#include <sys/stat.h>
#include <unistd.h>
#include <zlib.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <exception>
#include <fstream>
#include <memory>
#include <string_view>

#include "base/cause.h"
#include "base/posix.h"
#include "base/text.h"
#include "world/exchange.h"

namespace lockstep {
namespace {

// What a file of sized records begins with. Without it the size of the first record could be the
// bytes by which zlib knows a compressed file.
constexpr std::string_view kMagic = "records1";

class RecordFile {
 public:
  RecordFile(std::string path, RecordFormat format)
      : path_(std::move(path)), format_(format), file_(::gzopen(path_.c_str(), "rbe"), ::gzclose) {
    if (!file_) {
      throw_errno(text::format("cannot read {}", path_), "Check the path and the permissions.");
    }
    ::gzbuffer(file_.get(), 1 << 17);
    if (format_ == RecordFormat::kSized) check_magic();
  }

  std::optional<std::string> next() {
    auto record = format_ == RecordFormat::kLines ? next_line() : next_sized();
    if (record) ++num_read_;
    return record;
  }

 private:
  [[noreturn]] void refuse_file(const std::string& what) const {
    throw UsageError(
        {.operation = "RecordFiles"},
        text::format("{}: record {} {}.\nFetch or make the file again.", path_, num_read_, what));
  }

  void check_magic() {
    std::string begin(kMagic.size(), '\0');
    if (read(begin.data(), begin.size()) == begin.size() && begin == kMagic) return;
    throw UsageError({.operation = "RecordFiles"},
                     text::format("{} does not begin with \"{}\", as files of write_records() "
                                  "do.\nUse RecordFormat::kLines for a text, or make the file "
                                  "again.",
                                  path_, kMagic));
  }

  std::size_t read(char* to, std::size_t size) {
    const int count = ::gzread(file_.get(), to, static_cast<unsigned>(size));
    // At an end that comes too early gzread returns what there is: gzerror knows.
    int code = 0;
    const char* const error = ::gzerror(file_.get(), &code);
    if (count < 0 || (code != Z_OK && code != Z_STREAM_END)) {
      refuse_file(text::format("is damaged: {}", error));
    }
    return static_cast<std::size_t>(count);
  }

  std::optional<std::string> next_line() {
    std::string line;
    while (true) {
      if (begin_ == end_) {
        begin_ = 0;
        end_ = read(block_.data(), block_.size());
        if (end_ == 0) break;
      }
      const char* const first = block_.data() + begin_;
      const char* const last = block_.data() + end_;
      const char* const found = std::find(first, last, '\n');
      line.append(first, found);
      begin_ = static_cast<std::size_t>(found - block_.data());
      if (found == last) continue;
      ++begin_;
      return line;
    }
    // The last line need not have an end.
    return line.empty() ? std::nullopt : std::optional(std::move(line));
  }

  std::optional<std::string> next_sized() {
    std::array<unsigned char, 8> head{};
    const std::size_t got = read(reinterpret_cast<char*>(head.data()), head.size());
    if (got == 0) return std::nullopt;
    if (got < head.size()) refuse_file("is truncated in its size");
    std::uint64_t size = 0;
    for (std::size_t i = 0; i < head.size(); ++i) size |= std::uint64_t{head[i]} << (8 * i);
    // In steps: a damaged size may say more than there is memory.
    std::string record;
    while (record.size() < size) {
      const std::size_t before = record.size();
      const auto step = static_cast<std::size_t>(std::min<std::uint64_t>(1 << 20, size - before));
      record.resize(before + step);
      const std::size_t count = read(record.data() + before, step);
      if (count < step) {
        refuse_file(text::format("is truncated: it has {} bytes of {}", before + count, size));
      }
    }
    return record;
  }

  const std::string path_;
  const RecordFormat format_;
  const std::unique_ptr<gzFile_s, decltype(&::gzclose)> file_;
  std::size_t num_read_ = 0;
  std::string block_ = std::string(1 << 16, '\0');  // of lines: what is read, from begin_ to end_
  std::size_t begin_ = 0;
  std::size_t end_ = 0;
};

void check_files(const std::vector<std::string>& paths) {
  if (paths.empty()) {
    throw UsageError({.operation = "RecordFiles"}, "There are no files.\nGive at least one.");
  }
  for (const std::string& path : paths) {
    struct stat status {};
    if (::access(path.c_str(), R_OK) != 0 || ::stat(path.c_str(), &status) != 0) {
      throw_errno(text::format("cannot read {}", path), "Check the path and the permissions.");
    }
    if (!S_ISREG(status.st_mode)) {
      throw UsageError({.operation = "RecordFiles"},
                       text::format("{} is not a file.\nGive the paths of files.", path));
    }
  }
}

}  // namespace

RecordFiles::RecordFiles(std::vector<std::string> paths, RecordFormat format)
    : paths_(std::move(paths)), format_(format) {
  check_files(paths_);
}

RecordFiles::RecordFiles(std::vector<std::string> paths, const World& world, RecordFormat format)
    : paths_(std::move(paths)), format_(format) {
  std::string failure;
  try {
    check_files(paths_);
  } catch (const std::exception&) {
    failure = to_text(cause_of(std::current_exception(), world.global_rank()));
  }
  throw_first_cause(world, exchange_texts(world, failure),
                    {.rank = world.global_rank(), .operation = "RecordFiles"});
  std::vector<std::string> lines = {text::format(
      "{} files of {}", paths_.size(), format == RecordFormat::kLines ? "lines" : "sizes")};
  // Hosts may have them in different folders.
  for (const std::string& path : paths_) lines.push_back(path.substr(path.rfind('/') + 1));
  check_same_lines(world, lines, "RecordFiles", "Files of records",
                   "Give the same files in the same order on all ranks.");
}

RecordFiles::Reader RecordFiles::open(std::size_t shard) const {
  return [file = std::make_shared<RecordFile>(paths_.at(shard), format_)] { return file->next(); };
}

void write_records(const std::string& path, const std::vector<std::string>& records) {
  std::ofstream file(path, std::ios::binary);
  file << kMagic;
  for (const std::string& record : records) {
    std::array<char, 8> head{};
    for (std::size_t i = 0; i < head.size(); ++i) {
      head[i] = static_cast<char>(static_cast<std::uint64_t>(record.size()) >> (8 * i));
    }
    file.write(head.data(), head.size());
    file.write(record.data(), static_cast<std::streamsize>(record.size()));
  }
  file.close();
  if (!file) {
    throw_errno(text::format("cannot write {}", path), "Check the path and the space left.");
  }
}

StreamSampler::StreamSampler(const World& world, const StreamOptions& options)
    : StreamSampler(world.rank(), world.size(), options) {
  if (!world.has_logical_ranks()) return;
  throw UsageError(
      {.rank = world.global_rank(), .operation = "StreamSampler"},
      "Records that are read in order are dealt out to ranks, not to logical "
      "ranks.\nUse a DistributedSampler, or a StreamSampler with a rank and a number of "
      "ranks for each logical rank.");
}

StreamSampler::StreamSampler(int rank, int num_ranks, const StreamOptions& options)
    : rank_(rank), num_ranks_(num_ranks), options_(options) {
  if (num_ranks >= 1 && rank >= 0 && rank < num_ranks) return;
  throw UsageError({.operation = "StreamSampler"},
                   text::format("Rank {} of {} was given.\nRanks are 0 to the number of ranks - 1.",
                                rank, num_ranks));
}

}  // namespace lockstep
