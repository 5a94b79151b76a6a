#include "memory_watch.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <numeric>
#include <sstream>

#include "base/text.h"

namespace lockstep::bench {
namespace {

using Clock = std::chrono::steady_clock;

constexpr const char* kVariable = "LOCKSTEP_BENCH_WATCH";
constexpr std::chrono::milliseconds kInterval{50};
constexpr std::chrono::minutes kLongest{5};

struct Sample {
  double pss;
  double peak;  // of it, since the kernel's peak was begun anew
  double page_tables;
};

Sample sample_of(pid_t rank) {
  // Both in one look, as memory comes and goes.
  const std::string now = read_small_file(text::format("/proc/{}/smaps_rollup", rank));
  const std::string status = read_small_file(text::format("/proc/{}/status", rank));
  const double pss = stated_bytes(now, "Pss");
  const double of_others = stated_bytes(now, "Rss") - pss;
  return {.pss = pss,
          .peak = stated_bytes(status, "VmHWM") - of_others,
          .page_tables = stated_bytes(status, "VmPTE")};
}

}  // namespace

double stated_bytes(const std::string& contents, const std::string& name) {
  std::istringstream lines(contents);
  for (std::string line; std::getline(lines, line);) {
    if (line.starts_with(name + ":")) return std::stod(line.substr(name.size() + 1)) * 1024;
  }
  return 0;
}

void tell_watch() {
  if (const char* const path = std::getenv(kVariable)) {
    std::ofstream(path, std::ios::app) << '.' << std::flush;
  }
}

void leave_watch() {
  tell_watch();
  const char* const path = std::getenv(kVariable);
  const char* const num_ranks = std::getenv("WORLD_SIZE");
  if (path == nullptr || num_ranks == nullptr) return;
  const std::size_t num_told = 2 * std::stoul(num_ranks);
  const auto until = Clock::now() + kLongest;
  std::error_code gone;  // with the watch
  while (std::filesystem::file_size(path, gone) <= num_told && !gone && Clock::now() < until) {
    std::this_thread::sleep_for(kInterval);
  }
}

MemoryWatch::MemoryWatch() : file_(make_memfd("lockstep-bench-watch")) {}

std::map<std::string, std::string> MemoryWatch::variables() const {
  return {{kVariable, text::format("/proc/{}/fd/{}", ::getpid(), file_.get())}};
}

void MemoryWatch::start(const std::vector<pid_t>& ranks) {
  thread_ = std::jthread([this, ranks](const std::stop_token& token) { watch(token, ranks); });
}

void MemoryWatch::stop() {
  thread_.request_stop();
  if (thread_.joinable()) thread_.join();
}

std::size_t MemoryWatch::num_told() const {
  struct stat status {};
  return ::fstat(file_.get(), &status) == 0 ? static_cast<std::size_t>(status.st_size) : 0;
}

double MemoryWatch::pss_bytes() const { return std::accumulate(peaks_.begin(), peaks_.end(), 0.0); }

void MemoryWatch::watch(const std::stop_token& token, const std::vector<pid_t>& ranks) {
  while (num_told() < ranks.size() && !token.stop_requested()) {
    std::this_thread::sleep_for(kInterval);
  }
  for (const pid_t rank : ranks) {
    std::ofstream(text::format("/proc/{}/clear_refs", rank)) << 5 << std::flush;
  }
  while (!token.stop_requested()) {
    const auto start = Clock::now();
    std::vector<Sample> samples;
    const bool is_last = num_told() >= 2 * ranks.size();  // and they stay until they are released
    for (const pid_t rank : ranks) samples.push_back(sample_of(rank));
    double sum = 0;
    double page_tables = 0;
    peaks_.resize(ranks.size());
    for (std::size_t i = 0; i < ranks.size(); ++i) {
      peaks_[i] = std::max(peaks_[i], samples[i].peak);
      sum += samples[i].pss;
      page_tables += samples[i].page_tables;
    }
    sampled_ = std::max(sampled_, sum);
    page_table_bytes_ = std::max(page_table_bytes_, page_tables);
    if (is_last) break;
    // Ranks cannot map memory while they are looked at: they have half of the time for it.
    std::this_thread::sleep_for(std::max<Clock::duration>(kInterval, Clock::now() - start));
  }
  (void)!::pwrite(file_.get(), ".", 1, static_cast<off_t>(num_told()));
}

}  // namespace lockstep::bench
