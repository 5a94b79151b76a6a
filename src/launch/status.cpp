#include "launch/status.h"

#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <sstream>

#include "base/process.h"
#include "base/text.h"
#include "collective/operation.h"

namespace lockstep {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(std::int64_t ns) {
  if (ns == 0) return 0;
  const std::chrono::nanoseconds then(ns);
  return std::chrono::duration<double>(Clock::now().time_since_epoch() - then).count();
}

// A wait shorter than this is how a step goes.
constexpr double kShownWait = 1;

std::string operation_of(std::int32_t what) {
  if (what == 0) return {};
  if (what == kWaitsForMessage) return "recv or send";
  return collective::name_of(static_cast<collective::Kind>(what - 1));
}

std::int64_t resident_bytes(int pid) {
  std::istringstream fields(read_small_file(text::format("/proc/{}/statm", pid)));
  std::int64_t size = 0;
  std::int64_t resident = 0;
  fields >> size >> resident;
  return resident * ::sysconf(_SC_PAGESIZE);
}

}  // namespace

void look_at(RankStatus& status, int gauges_fd) {
  if (status.end.empty()) {
    status.memory_bytes = resident_bytes(status.pid);
    status.is_stopped = is_stopped(status.pid);
  }
  const auto values = read_gauges(gauges_fd);
  status.has_gauges = values.has_value();
  if (!values) return;
  constexpr double kNs = 1e-9;
  status.rank = values->rank;
  status.generation = values->generation;
  status.doing = to_text(values->doing);
  status.waits_in = operation_of(values->wait_what);
  status.waits_for = values->wait_for;
  status.waits_s = status.waits_in.empty() ? 0 : seconds_since(values->wait_since_ns);
  status.steps = values->steps;
  status.step_s = static_cast<double>(values->step_ns) * kNs;
  status.since_step_s = seconds_since(values->step_ended_ns);
  status.stepping_s = static_cast<double>(values->stepping_ns) * kNs;
  status.waited_s = static_cast<double>(values->waited_ns) * kNs;
  status.bytes = values->bytes;
  status.samples = values->samples;
  status.loss_step = values->loss_step;
  status.loss = std::isfinite(values->loss) ? values->loss : 0;
  if (!std::isfinite(values->loss)) status.loss_step = -1;
}

bool is_late(const RankStatus& status) {
  return status.steps > 0 && status.since_step_s >= std::max(10 * status.step_s, 5.0);
}

std::string describe_state(const RankStatus& status) {
  if (!status.end.empty()) return status.end;
  if (status.is_stopped) return "is stopped (SIGSTOP, or a debugger)";
  if (!status.has_gauges) return "has not joined";
  if (status.waits_in.empty() || status.waits_s < kShownWait) {
    if (!is_late(status)) return status.doing;
    return text::format("{}, {:.0f} s after its last step", status.doing, status.since_step_s);
  }
  return text::format("waits {:.1f} s for {} ({})", status.waits_s,
                      status.waits_for < 0 ? "others" : text::format("rank {}", status.waits_for),
                      status.waits_in);
}

}  // namespace lockstep
