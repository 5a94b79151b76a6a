// Control: a socket by which a person asks a running job for something: what it does
// (`lockstep top`), or another number of ranks (`lockstep scale JOB -n 3`).
//
// It is a file of this user's, named after the job: its --job-id, or the launcher's process. The
// guard removes it if the launcher is killed, the next job's launcher if both are. Threading: the
// event loop's.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/json.h"
#include "launch/connection.h"
#include "launch/event_loop.h"

namespace lockstep {

class Control {
 public:
  // What a request is answered with; may throw an Error, whose text is the answer.
  using Answer = std::function<Json(const Json& request)>;

  // Throws SystemError.
  Control(EventLoop& loop, const std::string& job, Answer answer);
  ~Control();
  Control(const Control&) = delete;
  Control& operator=(const Control&) = delete;

 private:
  void accept_one();

  EventLoop& loop_;
  const Answer answer_;
  std::string path_;
  Fd listener_;
  std::map<int, std::shared_ptr<Connection>> connections_;
  int num_connections_ = 0;
};

// What the job answers. Throws: UsageError if there is no such job, or with its refusal.
Json ask_job(const std::string& job, const Json& request);

// Of this user on this host, in the order of their names.
std::vector<std::string> running_jobs();

// Removes the files of launchers that were killed.
void remove_dead_jobs() noexcept;

}  // namespace lockstep
