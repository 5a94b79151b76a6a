#include "base/log.h"

#include <lockstep/error.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdlib>

namespace lockstep {
namespace {

constexpr std::array<std::string_view, 5> kNames = {"debug", "info", "warning", "error", "off"};

LogLevel level_from_environment() {
  const char* text = std::getenv("LOCKSTEP_LOG");
  return text == nullptr || *text == '\0' ? LogLevel::kInfo : parse_log_level(text);
}

// A line goes out in one write, so lines of several processes never mix on a terminal or a file,
// and on a pipe as long as they are shorter than PIPE_BUF (4096 bytes).
void write_line(int fd, std::string_view line) {
  while (!line.empty()) {
    const ssize_t written = ::write(fd, line.data(), line.size());
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) return;  // nobody is left to tell
    line.remove_prefix(static_cast<std::size_t>(written));
  }
}

}  // namespace

LogLevel parse_log_level(std::string_view text) {
  for (std::size_t i = 0; i < kNames.size(); ++i) {
    if (text == kNames[i]) return static_cast<LogLevel>(i);
  }
  throw UsageError({}, text::format("LOCKSTEP_LOG is '{}'.\n"
                                    "Set it to debug, info, warning, error or off.",
                                    text));
}

Log::Log(int rank) : Log(rank, level_from_environment(), STDERR_FILENO) {}

void Log::write(LogLevel level, std::string_view message) const {
  if (level < least_) return;
  const std::string prefix = text::format(
      "lockstep{}{}: ", rank_ < 0 ? std::string() : text::format("[{}]", rank_),
      level == LogLevel::kInfo ? std::string()
                               : text::format(" {}", kNames[static_cast<std::size_t>(level)]));
  while (true) {
    const std::size_t end = message.find('\n');
    write_line(fd_, text::format("{}{}\n", prefix, message.substr(0, end)));
    if (end == std::string_view::npos) return;
    message.remove_prefix(end + 1);
  }
}

}  // namespace lockstep
