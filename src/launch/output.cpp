#include "launch/output.h"

#include <fcntl.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstdlib>
#include <cstring>
#include <filesystem>

#include "base/text.h"

namespace lockstep {
namespace {

constexpr std::size_t kReadBytes = 64 << 10;

bool is_ready(int fd, short events) {
  pollfd one{fd, events, 0};
  return ::poll(&one, 1, 0) > 0;
}

}  // namespace

Printer::Printer(EventLoop& loop, int fd) : loop_(loop), fd_(fd), is_terminal_(::isatty(fd) == 1) {
  if (!is_terminal_) return;
  // poll(2) says that a terminal has room when it has room for one byte.
  own_ = Fd(::open(text::format("/proc/self/fd/{}", fd).c_str(),
                   O_WRONLY | O_NOCTTY | O_NONBLOCK | O_CLOEXEC));
  if (own_) fd_ = own_.get();
}

Printer::~Printer() { loop_.forget(fd_); }

int Printer::columns() const {
  winsize size{};
  return ::ioctl(fd_, TIOCGWINSZ, &size) == 0 && size.ws_col > 0 ? size.ws_col : 80;
}

void Printer::write(std::string_view text) {
  if (fd_ < 0) return;
  pending_ += text;
  write_some();
}

// In pieces that a pipe takes at once when poll(2) says that it has room: the descriptor is shared
// with others, so it cannot be made non-blocking.
void Printer::write_some() {
  const bool was_full = is_full();
  while (written_ < pending_.size() && is_ready(fd_, POLLOUT)) {
    const std::size_t size = std::min<std::size_t>(pending_.size() - written_, PIPE_BUF);
    const ssize_t count = ::write(fd_, pending_.data() + written_, size);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0 && errno == EAGAIN) break;
    if (count < 0) {  // nobody reads any more: the job goes on without
      loop_.forget(fd_);
      fd_ = -1;
      written_ = pending_.size();
      break;
    }
    written_ += static_cast<std::size_t>(count);
  }
  if (written_ == pending_.size()) {
    pending_.clear();
    written_ = 0;
    if (fd_ >= 0) loop_.forget(fd_);
  } else {
    if (written_ > kFullBytes) pending_.erase(0, std::exchange(written_, 0));
    loop_.watch(fd_, POLLOUT, [this](short) { write_some(); });
  }
  if (was_full && !is_full() && on_room_) on_room_();
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
      streams_{Printer(loop, STDOUT_FILENO), Printer(loop, STDERR_FILENO)} {
  for (Printer& stream : streams_) {
    stream.on_room([this] {
      for (const auto& [fd, source] : sources_) {
        if (!streams_[static_cast<std::size_t>(source.stream)].is_full()) watch(fd);
      }
    });
  }
}

void Output::begin(int first_rank, int num_ranks, int world_size, int generation) {
  ranks_.clear();
  const std::size_t width = std::to_string(world_size - 1).size();
  for (int rank = first_rank; rank < first_rank + num_ranks; ++rank) {
    Rank& one = ranks_[rank];
    one.prefix = text::format("[{:>{}}] ", rank, width);
    if (options_.log_dir.empty()) continue;
    const std::string path = text::format("{}/rank-{}.log", options_.log_dir, rank);
    const int how = generation == 0 ? O_TRUNC : O_APPEND;
    one.log = Fd(::open(path.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC | how, 0666));
    if (!one.log) {
      throw_errno(text::format("cannot write the log file {}", path),
                  "Give --log-dir a folder that this user may write to.");
    }
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
    if (found != sources_.end() &&
        streams_[static_cast<std::size_t>(found->second.stream)].is_full()) {
      loop_.forget(fd);
    }
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
  if (rank.log) {
    const std::string whole = text::format("{}{}", text, mark);
    for (std::size_t at = 0; at < whole.size();) {
      const ssize_t count = ::write(rank.log.get(), whole.data() + at, whole.size() - at);
      if (count < 0 && errno == EINTR) continue;
      if (count < 0) {
        say(text::format("cannot write the log file of rank {} any more: {}", source.rank,
                         std::strerror(errno)));
        rank.log.reset();
        break;
      }
      at += static_cast<std::size_t>(count);
    }
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

void Output::catch_up(int rank) {
  constexpr int kReads = 64;  // a pipe's worth; a child of the rank may go on writing
  std::vector<int> fds;
  for (const auto& [fd, source] : sources_) {
    if (source.rank == rank) fds.push_back(fd);
  }
  for (const int fd : fds) {
    for (int i = 0; i < kReads && read_once(fd); ++i) {
    }
  }
}

void Output::end() {
  while (!sources_.empty()) {
    const int fd = sources_.begin()->first;
    while (read_once(fd)) {
      // What a full stream cannot take now is kept in memory: a pipe holds little.
    }
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
