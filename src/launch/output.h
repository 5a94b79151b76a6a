// Output: what the ranks of this host write, as whole lines that say whose they are.
//
// A rank's standard output and error come through pipes. Whole lines go to the launcher's own
// stream, with the rank in front, and to the rank's log file; the last ones are kept for the report
// of a failure. Nothing here waits: if the launcher's own stream or the log files are held up, the
// ranks' pipes are not read, so the ranks wait, and the launcher goes on watching them.
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
#include "launch/writer.h"

namespace lockstep {

// One of the launcher's own streams.
class Printer {
 public:
  // `has_room` is called when the stream, after having been full, takes more.
  Printer(EventLoop& loop, int fd, std::function<void()> has_room);

  void write(std::string_view text);
  bool is_full() const { return writer_.is_full(); }
  bool is_empty() const { return writer_.is_empty(); }
  bool is_terminal() const { return is_terminal_; }
  int columns() const;  // of a terminal

 private:
  int fd_;
  bool is_terminal_;
  bool has_reader_ = true;
  int file_ = -1;  // -1: nothing was written yet
  Writer writer_;
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
  // Called if a log file cannot be opened.
  void on_log_failure(std::function<void(const std::string& why)> call) {
    on_log_failure_ = std::move(call);
  }

  Printer& err() { return streams_[1]; }
  // Whether all is written, to streams and to log files that are not given up.
  bool is_empty() const;
  // The ranks have ended. From now on, log files that take nothing are given up after a while.
  void finish_logs();
  // Waits no longer for log files, and names those that are incomplete; false if there are none.
  bool give_up_logs();

  // Makes log files that are not there yet and forgets the lines before. `world_size` is for the
  // width of numbers.
  void begin(int first_rank, int num_ranks, int world_size);
  // One more, in an elastic job; nothing if it is there already.
  void add(int rank);
  int prefix_width() const { return static_cast<int>(width_) + 3; }
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
    std::deque<std::string> last;
    std::string bar;  // as it was drawn last
  };

  void watch(int fd);
  void watch_logs(const Writer::Unfinished& before, std::chrono::seconds stalled);
  void resume();
  bool is_held_up(const Source& source) const;
  void on_log_problem(int file, bool is_open, const std::string& why);
  void read_rest(int fd);
  bool read_once(int fd);
  void line(const Source& source, std::string_view text, LineCutter::End end);
  void close(int fd);

  EventLoop& loop_;
  OutputOptions options_;
  std::array<Printer, 2> streams_;
  std::map<int, Source> sources_;  // by descriptor
  std::map<int, Fd> fds_;
  std::map<int, Rank> ranks_;
  std::size_t width_ = 1;  // of their numbers
  Writer logs_;
  std::map<int, int> log_of_;  // the number of a rank's file; -1: it takes no more
  bool has_given_up_logs_ = false;
  std::optional<EventLoop::Timer> stall_timer_;
  std::function<void(const std::string&)> on_log_failure_ = [](const std::string&) {};
};

}  // namespace lockstep
