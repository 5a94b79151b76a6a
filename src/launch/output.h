// Output: what the ranks of this host write, as whole lines that say whose they are.
//
// A rank's standard output and error come through pipes. Whole lines go to the launcher's own
// stream, with the rank in front, and to the rank's log file; the last ones are kept for the report
// of a failure. Nothing here waits: if the launcher's own stream is held up, the ranks' pipes are
// not read, so the ranks wait, and the launcher goes on watching them.
#pragma once

#include <array>
#include <deque>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/posix.h"
#include "launch/event_loop.h"

namespace lockstep {

// One of the launcher's own streams.
class Printer {
 public:
  Printer(EventLoop& loop, int fd);
  ~Printer();
  Printer(const Printer&) = delete;
  Printer& operator=(const Printer&) = delete;

  void write(std::string_view text);
  bool is_full() const { return pending_.size() - written_ >= kFullBytes; }
  bool is_empty() const { return fd_ < 0 || pending_.empty(); }
  bool is_terminal() const { return is_terminal_; }
  int columns() const;  // of a terminal
  // Called when the stream, after having been full, takes more.
  void on_room(std::function<void()> call) { on_room_ = std::move(call); }

 private:
  static constexpr std::size_t kFullBytes = 1 << 20;

  void write_some();

  EventLoop& loop_;
  int fd_;
  bool is_terminal_;
  Fd own_;  // of a terminal: writing to it never waits
  std::string pending_;
  std::size_t written_ = 0;  // of pending_
  std::function<void()> on_room_;
};

// Cuts a stream into lines. A line longer than kLongest is cut into several: memory is bounded.
class LineCutter {
 public:
  static constexpr std::size_t kLongest = 1 << 20;
  // kBar: ended by '\r', to be drawn over. kAfterBar: nothing but '\n' has followed a '\r'.
  enum class End { kLine, kBar, kAfterBar };
  using Emit = std::function<void(std::string_view line, End end)>;

  // `is_bar_cut`: a line that a progress bar ends with '\r' is given out at once.
  void add(std::string_view text, bool is_bar_cut, const Emit& emit);
  void finish(const Emit& emit);  // gives out a last line without an end

 private:
  std::string partial_;
  bool is_after_bar_ = false;
};

struct OutputOptions {
  std::optional<int> only_rank = std::nullopt;
  std::string log_dir = {};  // empty: none
  bool has_colour = true;    // on terminals
};

class Output {
 public:
  Output(EventLoop& loop, OutputOptions options);

  Printer& out() { return streams_[0]; }
  Printer& err() { return streams_[1]; }

  // Makes the log files and forgets the lines before. `world_size` is for the width of numbers.
  void begin(int first_rank, int num_ranks, int world_size, int generation);
  int prefix_width() const { return static_cast<int>(ranks_.begin()->second.prefix.size()); }
  // Reads `out` and `err` from now on, until both end.
  void attach(int rank, Fd out, Fd err);
  // Reads what an ended rank has left in its pipes.
  void catch_up(int rank);
  // Reads what is there still, and closes all.
  void end();
  std::vector<std::string> last_lines(int rank) const;

  // A line of the launcher's own.
  void say(const std::string& text);

 private:
  static constexpr std::size_t kKept = 20;            // lines of each rank
  static constexpr std::size_t kKeptBytes = 4 << 10;  // of each of these

  struct Source {
    int rank = 0;
    int stream = 0;  // 0: standard output, 1: standard error
    LineCutter cutter = {};
  };
  struct Rank {
    std::string prefix;
    Fd log;
    std::deque<std::string> last;
    std::string bar;  // as it was drawn last
  };

  void watch(int fd);
  bool read_once(int fd);
  void line(const Source& source, std::string_view text, LineCutter::End end);
  void close(int fd);

  EventLoop& loop_;
  OutputOptions options_;
  std::array<Printer, 2> streams_;
  std::map<int, Source> sources_;  // by descriptor
  std::map<int, Fd> fds_;
  std::map<int, Rank> ranks_;
};

}  // namespace lockstep
