// lockstep top on a terminal, with ncurses: a look each second, keys in between.

#define NCURSES_NOMACROS  // they have names of common words
#include <lockstep/error.h>
#include <ncurses.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <clocale>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/text.h"
#include "launch/control.h"
#include "launch/top.h"

namespace lockstep {
namespace {

using Clock = std::chrono::steady_clock;

// Between the two looks where there is no terminal.
constexpr auto kMoment = std::chrono::milliseconds(500);
// For other hosts to answer the first one.
constexpr auto kOtherHosts = std::chrono::milliseconds(300);

JobStatus look_at_job(const std::string& job) {
  return ask_job(job, {{"ask", "status"}}).get<JobStatus>();
}

// The first host answers at once, with what the others said when they were asked before.
JobStatus look_at_all_hosts(const std::string& job) {
  JobStatus status = look_at_job(job);
  if (status.num_hosts == 1) return status;
  std::this_thread::sleep_for(kOtherHosts);
  return look_at_job(job);
}

// The one that runs, if there is one.
std::string only_job() {
  const std::vector<std::string> jobs = running_jobs();
  if (jobs.size() == 1) return jobs.front();
  throw UsageError({.operation = "top"},
                   jobs.empty()
                       ? std::string("No job of this user runs on this host.\nStart one "
                                     "with lockstep run.")
                       : text::format("Several jobs run: {}.\nSay which: lockstep top JOB.",
                                      text::join(jobs, ", ")));
}

class Screen {
 public:
  Screen() {
    std::setlocale(LC_ALL, "");
    ::initscr();
    ::cbreak();
    ::noecho();
    ::keypad(stdscr, true);
    ::curs_set(0);
    if (::has_colors()) {
      ::start_color();
      ::use_default_colors();
      ::init_pair(kBad, COLOR_RED, -1);
    }
  }
  ~Screen() { ::endwin(); }
  Screen(const Screen&) = delete;
  Screen& operator=(const Screen&) = delete;

  void draw(const TopView& view, const TopOptions& options, const std::string& note) {
    ::erase();
    int row = 0;
    for (const std::string& line : view.head) {
      put(row, line, row == 0 ? A_BOLD : A_NORMAL);
      ++row;
    }
    ++row;
    put(row++, view.columns, A_REVERSE);
    const int room = std::max(LINES - row - 2, 1);
    const int most = std::max(static_cast<int>(view.ranks.size()) - room, 0);
    first_ = std::clamp(first_, 0, most);
    for (int i = first_; i < static_cast<int>(view.ranks.size()) && i < first_ + room; ++i) {
      const TopLine& line = view.ranks[static_cast<std::size_t>(i)];
      put(row++, line.text, line.is_bad ? static_cast<int>(COLOR_PAIR(kBad)) | A_BOLD : A_NORMAL);
    }
    std::vector<std::string> last;
    if (!note.empty()) last.push_back(note);
    if (!options.filter.empty())
      last.push_back(text::format("only lines with '{}'", options.filter));
    if (most > 0)
      last.push_back(text::format("{} more", static_cast<int>(view.ranks.size()) - room));
    last.emplace_back(
        "q quit  p pause  / filter  sort: r rank h host s slow w wait m memory v reverse");
    put(LINES - 1, text::join(last, "   "), A_DIM);
    ::refresh();
  }

  // The key that was pressed, or ERR after so long.
  int key(std::chrono::milliseconds longest) {
    ::timeout(static_cast<int>(std::max<std::int64_t>(longest.count(), 0)));
    return ::getch();
  }
  void scroll(int lines) { first_ += lines; }

  std::string ask(const std::string& question) {
    put(LINES - 1, question + std::string(static_cast<std::size_t>(std::max(COLS, 1)), ' '),
        A_BOLD);
    ::move(LINES - 1, static_cast<int>(question.size()));
    ::echo();
    ::curs_set(1);
    ::timeout(-1);
    std::array<char, 80> text{};
    ::getnstr(text.data(), static_cast<int>(text.size()) - 1);
    ::noecho();
    ::curs_set(0);
    return text.data();
  }

 private:
  static constexpr short kBad = 1;

  static void put(int row, const std::string& text, int attributes) {
    if (row < 0 || row >= LINES) return;
    ::attron(attributes);
    ::mvaddnstr(row, 0, text.c_str(), COLS);
    ::attroff(attributes);
  }

  int first_ = 0;  // the first rank that is shown
};

// False: the person wants to leave.
bool obey(int key, Screen& screen, TopOptions& options, bool& is_paused) {
  switch (key) {
    case 'q':
      return false;
    case 'p':
    case ' ':
      is_paused = !is_paused;
      break;
    case 'r':
      options.sort = TopSort::kRank;
      break;
    case 'h':
      options.sort = TopSort::kHost;
      break;
    case 's':
      options.sort = TopSort::kWork;
      break;
    case 'w':
      options.sort = TopSort::kWaiting;
      break;
    case 'm':
      options.sort = TopSort::kMemory;
      break;
    case 'v':
      options.is_reversed = !options.is_reversed;
      break;
    case '/':
      options.filter = screen.ask("only lines with: ");
      break;
    case KEY_DOWN:
      screen.scroll(1);
      break;
    case KEY_UP:
      screen.scroll(-1);
      break;
    case KEY_NPAGE:
      screen.scroll(LINES / 2);
      break;
    case KEY_PPAGE:
      screen.scroll(-LINES / 2);
      break;
    default:
      break;
  }
  return true;
}

// Until the person leaves, or the job ends; returns what was seen last in that case.
std::optional<TopView> watch(const std::string& job, std::chrono::milliseconds every) {
  Screen screen;
  TopOptions options;
  bool is_paused = false;
  std::optional<JobStatus> before;
  JobStatus now = look_at_all_hosts(job);
  std::string problem;
  auto next = Clock::now() + every;
  while (true) {
    const TopView view = view_of(now, before, options);
    screen.draw(view, options, is_paused ? "paused: press p to go on" : problem);
    const auto wait = std::chrono::duration_cast<std::chrono::milliseconds>(next - Clock::now());
    const int key = screen.key(is_paused ? every : wait);
    if (key != ERR) {
      if (!obey(key, screen, options, is_paused)) return std::nullopt;
      continue;
    }
    if (is_paused) continue;
    try {
      JobStatus fresh = look_at_job(job);
      before = std::exchange(now, std::move(fresh));
      problem.clear();
    } catch (const TimeoutError& error) {  // it may only be stopped
      problem = error.message().substr(0, error.message().find('\n'));
    } catch (const Error&) {  // the job has ended
      return view;
    }
    next = Clock::now() + every;
  }
}

}  // namespace

int run_top(const std::string& job, double every_s) {
  const std::string name = job.empty() ? only_job() : job;
  if (::isatty(STDOUT_FILENO) == 1 && ::isatty(STDIN_FILENO) == 1) {
    const auto every = std::chrono::milliseconds(static_cast<std::int64_t>(every_s * 1000));
    if (const auto last = watch(name, every)) {
      text::print("The job has ended. It was last seen like this:\n{}", to_text(*last));
    }
    return 0;
  }
  const JobStatus before = look_at_all_hosts(name);
  std::this_thread::sleep_for(kMoment);
  text::print("{}", to_text(view_of(look_at_job(name), before, {})));
  return 0;
}

int print_jobs() {
  std::vector<JobStatus> jobs;
  for (const std::string& name : running_jobs()) {
    try {
      jobs.push_back(look_at_all_hosts(name));
    } catch (const Error&) {  // NOLINT: it has just ended
    }
  }
  if (jobs.empty()) {
    text::print("No job of this user runs on this host.\n");
  } else {
    text::print("{}", list_jobs(jobs));
  }
  return 0;
}

}  // namespace lockstep
