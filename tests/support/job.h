// Job: a run of the program `lockstep`, as a person would start it, for tests to watch and disturb.
#pragma once

#include <chrono>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/process.h"

namespace lockstep::test {

struct JobOptions {
  std::map<std::string, std::string> variables = {};
  std::string input = {};     // for its standard input, which is empty otherwise
  bool has_terminal = false;  // standard output and error are a terminal's
  std::chrono::milliseconds deadline = std::chrono::seconds(60);
  std::vector<std::string> prefix = {};  // a command that runs it, such as NetHosts::prefix()
};

class Job {
 public:
  // `arguments`: without the program's name. "ACTOR" stands for tests/programs/actor.
  explicit Job(std::vector<std::string> arguments, const JobOptions& options = {});
  ~Job();  // ends what is left of it
  Job(const Job&) = delete;
  Job& operator=(const Job&) = delete;

  pid_t pid() const;
  void signal(int signal);
  void type(const std::string& keys);  // at its terminal
  // Waits until it has written `text`, `times` times; throws std::runtime_error at the deadline.
  void wait_for_output(const std::string& text, int times = 1);
  // Waits for its end; throws std::runtime_error at the deadline.
  ExitStatus wait();

  const std::string& out() const;  // what it has written so far; with a terminal, everything
  const std::string& err() const;

  // Its processes that are still there: its own, the ranks', and those that these have started.
  std::vector<pid_t> processes() const;
  // Files that it has left in its folder for temporary files.
  std::vector<std::string> left_files() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// Runs a job to its end.
struct JobResult {
  int code = 0;
  std::string out;
  std::string err;
  double seconds = 0;
};
JobResult run_job(const std::vector<std::string>& arguments, const JobOptions& options = {});

}  // namespace lockstep::test
