#include "launch/output.h"

#include <fcntl.h>
#include <lockstep/error.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "base/text.h"

namespace lockstep {
namespace {

constexpr std::size_t kReadBytes = 64 << 10;
// Of log files that take nothing:
constexpr auto kStall = std::chrono::seconds(10);   // before it is said
constexpr auto kGiveUp = std::chrono::seconds(30);  // at the end, before they are given up
constexpr const char* kLogAdvice =
    "Check the file system of that folder, or give --log-dir another one.";

std::string log_name(int rank) { return text::format("rank-{}.log", rank); }

// A new file in any case: what has this name may be a link to another file, or another user's, who
// would read along. Runs on the writer's thread.
Fd open_log(const std::string& folder, int rank) {
  const std::string path = text::format("{}/{}", folder, log_name(rank));
  struct stat status {};
  if (::lstat(path.c_str(), &status) == 0) {
    if (!S_ISREG(status.st_mode)) {
      throw UsageError({}, text::format("cannot write the log file {}: it is there already, and is "
                                        "no regular file.\nRemove it, or give --log-dir another "
                                        "folder.",
                                        path));
    }
    ::unlink(path.c_str());  // if that fails, so does the next line
  }
  Fd file(::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_APPEND | O_CLOEXEC,
                 mode_in(folder, 0666)));
  if (!file) {
    throw_errno(text::format("cannot write the log file {}", path),
                "Give --log-dir a folder that this user may write to.");
  }
  return file;
}

}  // namespace

Printer::Printer(EventLoop& loop, int fd, std::function<void()> has_room)
    : fd_(fd),
      is_terminal_(::isatty(fd) == 1),
      // Nobody reads any more: the job goes on without.
      writer_(loop, {.has_room = std::move(has_room),
                     .failed = [this](int, bool, const std::string&) { has_reader_ = false; }}) {}

int Printer::columns() const {
  winsize size{};
  return ::ioctl(fd_, TIOCGWINSZ, &size) == 0 && size.ws_col > 0 ? size.ws_col : 80;
}

void Printer::write(std::string_view text) {
  if (!has_reader_) return;
  if (file_ < 0) file_ = writer_.add([fd = fd_] { return duplicate(fd); });
  writer_.write(file_, text);
}

void LineCutter::add(std::string_view text, bool is_bar_cut, const Emit& emit) {
  while (!text.empty()) {
    const bool was_after_bar = std::exchange(is_after_bar_, false);
    const std::size_t end = is_bar_cut ? text.find_first_of("\r\n") : text.find('\n');
    partial_ += text.substr(0, end);
    if (end == std::string_view::npos) {
      if (partial_.size() < kLongest) return;
      emit(partial_, End::kLine);
      partial_.clear();
      return;
    }
    is_after_bar_ = text[end] == '\r';
    emit(partial_, is_after_bar_                       ? End::kBar
                   : was_after_bar && partial_.empty() ? End::kAfterBar
                                                       : End::kLine);
    partial_.clear();
    text.remove_prefix(end + 1);
  }
}

void LineCutter::finish(const Emit& emit) {
  if (partial_.empty()) return;
  emit(partial_, End::kLine);
  partial_.clear();
}

Output::Output(EventLoop& loop, OutputOptions options)
    : loop_(loop),
      options_(std::move(options)),
      streams_{Printer(loop, STDOUT_FILENO, [this] { resume(); }),
               Printer(loop, STDERR_FILENO, [this] { resume(); })},
      logs_(loop,
            {.has_room = [this] { resume(); },
             .failed = [this](int file, bool is_open,
                              const std::string& why) { on_log_problem(file, is_open, why); }}) {}

bool Output::is_empty() const {
  return streams_[0].is_empty() && streams_[1].is_empty() &&
         (has_given_up_logs_ || logs_.is_empty());
}

void Output::finish_logs() {
  if (stall_timer_) loop_.cancel(*stall_timer_);  // no rank waits any more
  watch_logs(logs_.unfinished(), std::chrono::seconds(0));
}

// `before`: what was left when this began to look, or looked last; it was `stalled` for so long.
void Output::watch_logs(const Writer::Unfinished& before, std::chrono::seconds stalled) {
  loop_.after(kStall, [this, before, stalled] {
    const Writer::Unfinished now = logs_.unfinished();
    if (now.empty()) return;
    const auto still = now == before ? stalled + kStall : std::chrono::seconds(0);
    if (still >= kGiveUp) {
      give_up_logs();
      return;
    }
    if (still == kStall) {
      say(
          text::format("the log files in {} have taken nothing for {} s: the launcher waits {} s "
                       "more for them. {}",
                       options_.log_dir, kStall.count(), (kGiveUp - kStall).count(), kLogAdvice));
    }
    watch_logs(now, still);
  });
}

bool Output::give_up_logs() {
  const Writer::Unfinished unfinished = logs_.unfinished();
  std::vector<std::string> names;
  for (const auto& [rank, file] : log_of_) {
    if (unfinished.contains(file)) names.push_back(log_name(rank));
  }
  if (std::exchange(has_given_up_logs_, true) || names.empty()) return false;
  say(text::format("in {}, the log files {} are incomplete: what was left could not be written. {}",
                   options_.log_dir, text::join(names, ", "), kLogAdvice));
  return true;
}

void Output::begin(int first_rank, int num_ranks, int world_size) {
  ranks_.clear();
  width_ = std::to_string(world_size - 1).size();
  for (int rank = first_rank; rank < first_rank + num_ranks; ++rank) add(rank);
}

void Output::add(int rank) {
  ranks_[rank].prefix = text::format("[{:>{}}] ", rank, width_);
  // A later generation goes on in the same file.
  if (options_.log_dir.empty() || log_of_.contains(rank)) return;
  log_of_[rank] = logs_.add([folder = options_.log_dir, rank] { return open_log(folder, rank); });
}

void Output::on_log_problem(int file, bool is_open, const std::string& why) {
  const auto log = std::ranges::find(log_of_, file, [](const auto& one) { return one.second; });
  log->second = -1;
  if (!is_open) return on_log_failure_(why);
  say(text::format("cannot write the log file {}/{} any more: {}. The job goes on without it. {}",
                   options_.log_dir, log_name(log->first), why, kLogAdvice));
}

bool Output::is_held_up(const Source& source) const {
  return logs_.is_full() || streams_[static_cast<std::size_t>(source.stream)].is_full();
}

// After a stream or the log files have been full.
void Output::resume() {
  if (stall_timer_ && !logs_.is_full()) {
    loop_.cancel(*stall_timer_);
    stall_timer_.reset();
  }
  for (const auto& [fd, source] : sources_) {
    if (!is_held_up(source)) watch(fd);
  }
}

void Output::attach(int rank, Fd out, Fd err) {
  int stream = 0;
  for (Fd* const end : {&out, &err}) {
    const int fd = end->get();
    ::fcntl(fd, F_SETFL, ::fcntl(fd, F_GETFL) | O_NONBLOCK);
    sources_[fd] = {.rank = rank, .stream = stream++};
    fds_[fd] = std::move(*end);
    watch(fd);
  }
}

void Output::watch(int fd) {
  loop_.watch(fd, POLLIN, [this, fd](short) {
    if (!read_once(fd)) return;
    const auto found = sources_.find(fd);
    if (found == sources_.end() || !is_held_up(found->second)) return;
    loop_.forget(fd);
    if (stall_timer_ || !logs_.is_full()) return;
    stall_timer_ = loop_.after(kStall, [this] {
      say(
          text::format("the log files in {} have taken nothing for {} s: the ranks wait for "
                       "them. {}",
                       options_.log_dir, kStall.count(), kLogAdvice));
    });
  });
}

// False if there is nothing to read now, or nothing any more.
bool Output::read_once(int fd) {
  static char buffer[kReadBytes];
  const ssize_t count = ::read(fd, buffer, sizeof buffer);
  if (count < 0) return errno == EINTR;
  if (count == 0) {
    close(fd);
    return false;
  }
  Source& source = sources_.at(fd);
  const std::string_view text(buffer, static_cast<std::size_t>(count));
  source.cutter.add(
      text, streams_[static_cast<std::size_t>(source.stream)].is_terminal(),
      [&](std::string_view line_text, LineCutter::End end) { line(source, line_text, end); });
  return true;
}

void Output::line(const Source& source, std::string_view text, LineCutter::End end) {
  Rank& rank = ranks_.at(source.rank);
  const char mark = end == LineCutter::End::kBar ? '\r' : '\n';
  if (end == LineCutter::End::kBar) {
    rank.bar.assign(text.substr(0, kKeptBytes));
  } else {
    // Of a line that was drawn again and again, the last state.
    std::string_view kept = end == LineCutter::End::kAfterBar ? std::string_view(rank.bar) : text;
    if (kept.ends_with('\r')) kept.remove_suffix(1);
    const std::size_t drawn = kept.rfind('\r');
    if (drawn != std::string_view::npos) kept.remove_prefix(drawn + 1);
    if (rank.last.size() == kKept) rank.last.pop_front();
    rank.last.emplace_back(kept.substr(0, kKeptBytes));
  }
  if (const auto log = log_of_.find(source.rank); log != log_of_.end() && log->second >= 0) {
    logs_.write(log->second, text::format("{}{}", text, mark));
  }
  if (options_.only_rank && *options_.only_rank != source.rank) return;
  Printer& stream = streams_[static_cast<std::size_t>(source.stream)];
  if (!stream.is_terminal()) {
    std::string whole;
    whole.reserve(rank.prefix.size() + text.size() + 1);
    whole.append(rank.prefix).append(text).push_back(mark);
    stream.write(whole);
    return;
  }
  if (end == LineCutter::End::kAfterBar) {  // what was drawn stays
    stream.write("\n");
    return;
  }
  // A colour for each rank, and nothing left of a longer line that a progress bar has drawn here.
  const std::string prefix =
      options_.has_colour ? text::format("\x1b[{}m{}\x1b[0m", 31 + source.rank % 6, rank.prefix)
                          : rank.prefix;
  stream.write(text::format("{}{}\x1b[K{}", prefix, text, mark));
}

void Output::close(int fd) {
  Source& source = sources_.at(fd);
  source.cutter.finish(
      [&](std::string_view text, LineCutter::End end) { line(source, text, end); });
  loop_.forget(fd);
  sources_.erase(fd);
  fds_.erase(fd);
}

// What a pipe holds: a child of the rank may go on writing. A full stream keeps it in memory.
void Output::read_rest(int fd) {
  constexpr int kReads = 64;
  for (int i = 0; i < kReads && read_once(fd); ++i) {
  }
}

void Output::catch_up(int rank) {
  std::vector<int> fds;
  for (const auto& [fd, source] : sources_) {
    if (source.rank == rank) fds.push_back(fd);
  }
  for (const int fd : fds) read_rest(fd);
}

void Output::end() {
  while (!sources_.empty()) {
    const int fd = sources_.begin()->first;
    read_rest(fd);
    if (sources_.contains(fd)) close(fd);  // somebody who cannot be killed has it open
  }
}

std::vector<std::string> Output::last_lines(int rank) const {
  const auto found = ranks_.find(rank);
  if (found == ranks_.end()) return {};
  return {found->second.last.begin(), found->second.last.end()};
}

void Output::say(const std::string& text) {
  err().write(text::format("lockstep: {}{}\n", text, err().is_terminal() ? "\x1b[K" : ""));
}

}  // namespace lockstep
