// Log: whole lines on standard error, each with the rank: "lockstep[3] warning: ...".
//
// LOCKSTEP_LOG sets the least level shown: debug, info (the default), warning, error or off.
// Threading: safe from any thread and any number of processes; a line is one write(2).
#pragma once

#include <string_view>

#include "base/text.h"

namespace lockstep {

enum class LogLevel { kDebug, kInfo, kWarning, kError, kOff };

// Throws UsageError if `text` names no level.
LogLevel parse_log_level(std::string_view text);

class Log {
 public:
  // Reads LOCKSTEP_LOG. A negative rank is left out of the prefix.
  explicit Log(int rank);
  Log(int rank, LogLevel least, int fd) : rank_(rank), least_(least), fd_(fd) {}

  template <typename... Args>
  void debug(fmt::format_string<Args...> format, Args&&... args) const {
    write(LogLevel::kDebug, text::format(format, std::forward<Args>(args)...));
  }
  template <typename... Args>
  void info(fmt::format_string<Args...> format, Args&&... args) const {
    write(LogLevel::kInfo, text::format(format, std::forward<Args>(args)...));
  }
  template <typename... Args>
  void warning(fmt::format_string<Args...> format, Args&&... args) const {
    write(LogLevel::kWarning, text::format(format, std::forward<Args>(args)...));
  }

  void write(LogLevel level, std::string_view message) const;

 private:
  int rank_;
  LogLevel least_;
  int fd_;
};

}  // namespace lockstep
