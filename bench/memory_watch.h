// MemoryWatch: what all ranks of a run take together, in steps that are not timed.
//
// Reading a process's PSS walks its page tables, which costs time. So a rank first does the steps
// that are timed, then some that are watched, and tells so: it appends a byte to a file when they
// begin, and one when they end. From when all ranks have begun to when the last has ended, a
// thread here looks at them, again and again; then it appends a byte, which the ranks wait for.
// Python's ranks do the same (peers/ddp.py).
//
// A step needs most for some ms only (a gradient and its place in a bucket), which samples may miss
// in some runs. The kernel keeps no peak of the PSS, but one of resident memory, which is begun
// anew here. What is resident but not in the PSS is the others' part of what ranks share, which
// does not come and go in a step: so a rank's peak is that of resident memory without it.
#pragma once

#include <sys/types.h>

#include <map>
#include <string>
#include <thread>
#include <vector>

#include "base/posix.h"

namespace lockstep::bench {

// A size in the contents of a file of /proc, in bytes; 0 if it is not there.
double stated_bytes(const std::string& contents, const std::string& name);

// In a rank: its watched steps begin.
void tell_watch();
// They have ended: waits until all ranks have been looked at for the last time.
void leave_watch();

class MemoryWatch {
 public:
  MemoryWatch();

  // Tells ranks, by their environment, whom to tell.
  std::map<std::string, std::string> variables() const;
  void start(const std::vector<pid_t>& ranks);
  // Call it when the ranks have ended.
  void stop();

  // Of all ranks together; 0 if they ended before a sample could be taken. After stop().
  double pss_bytes() const;                                      // the sum of their peaks
  double sampled_pss_bytes() const { return sampled_; }          // the largest sum at one moment
  double page_table_bytes() const { return page_table_bytes_; }  // which the PSS is without

 private:
  void watch(const std::stop_token& token, const std::vector<pid_t>& ranks);
  std::size_t num_told() const;

  Fd file_;
  std::vector<double> peaks_;  // by rank
  double sampled_ = 0;
  double page_table_bytes_ = 0;
  std::jthread thread_;  // last: it ends before what it uses
};

}  // namespace lockstep::bench
