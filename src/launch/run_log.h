// RunLog: a log of hashes of a run (ddp/hash_log.h), as `lockstep verify` reads it.
//
// Only where each entry is stands in memory: logs of long runs are large. A last line without an
// end, and one before a header, are what a process that was killed has left, and are ignored with a
// note; anything else that lockstep does not write is an error with its line.
// Threading: none.
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "archive/file.h"
#include "base/json.h"

namespace lockstep {

class RunLog {
 public:
  struct Entry {
    std::string hash = {};
    std::uint64_t begin = 0;  // in the file
    std::uint64_t bytes = 0;
  };
  using Key = std::pair<std::int64_t, std::string>;  // the step and the model
  using Tensors = std::map<std::string, std::string>;

  // Throws: UsageError, SystemError.
  explicit RunLog(const std::string& path);

  const std::string& path() const { return file_.path(); }
  const std::map<Key, Entry>& entries() const { return entries_; }
  std::set<std::string> models() const;
  std::set<std::int64_t> steps() const;
  Tensors tensors(const Entry& entry) const;
  // What the headers say, by name. A run that was resumed has several.
  const std::map<std::string, std::set<std::string>>& settings() const { return settings_; }
  const std::vector<std::string>& notes() const { return notes_; }
  const std::set<std::int64_t>& twice() const { return twice_; }  // with different hashes

 private:
  [[noreturn]] void refuse_line(const std::string& problem, std::size_t number) const;
  [[noreturn]] void refuse_kind() const;
  void take(const std::string& line, std::uint64_t begin);
  void take_header(const Json& json);

  FileReader file_;
  std::map<Key, Entry> entries_;
  std::map<std::string, std::set<std::string>> settings_;
  std::vector<std::string> notes_;
  std::set<std::int64_t> twice_;
  std::size_t num_lines_ = 0;
  std::size_t bad_line_ = 0;  // one that may be half of one; 0: none
};

}  // namespace lockstep
