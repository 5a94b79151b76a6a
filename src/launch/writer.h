// Writer: writes files and streams on a thread of its own.
//
// Who gives it text never waits: a reader that has stopped, a terminal that is held or a file
// server that is gone hold up that thread only. What is not written yet is kept in memory, so who
// gives text asks is_full() first, and leaves off until there is room. Threading: all calls, and
// the callbacks, are of the loop's thread. The writer's own thread is left behind if it still waits
// at the end.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>

#include "base/posix.h"
#include "launch/event_loop.h"

namespace lockstep {

class Writer {
 public:
  struct Callbacks {
    std::function<void()> has_room = [] {};  // after is_full()
    // The file could not be opened, or not be written any more; nothing else is written to it.
    std::function<void(int file, bool is_open, const std::string& why)> failed;
  };
  using Open = std::function<Fd()>;  // throws Error
  // How many tasks are left, with the one in work, for each file that has any.
  using Unfinished = std::map<int, std::size_t>;

  Writer(EventLoop& loop, Callbacks callbacks);
  ~Writer();
  Writer(const Writer&) = delete;
  Writer& operator=(const Writer&) = delete;

  // A number for a file that `open`, called by the thread, opens.
  int add(Open open);
  void write(int file, std::string_view text);
  bool is_full() const;
  bool is_empty() const;
  Unfinished unfinished() const;

 private:
  struct State;
  struct Task;

  static void run(const std::shared_ptr<State>& state);
  static void finish(const std::shared_ptr<State>& state, const Task& task,
                     const std::string& problem);
  static void tell(State& state, int file, bool is_open, const std::string& problem);
  void add_task(Task task);

  std::shared_ptr<State> state_;
  int num_files_ = 0;
};

}  // namespace lockstep
