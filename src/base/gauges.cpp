#include "base/gauges.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>

#include "base/text.h"

namespace lockstep {
namespace {

constexpr std::uint32_t kVersion = 1;

std::int64_t ns_of(std::chrono::steady_clock::time_point moment) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(moment.time_since_epoch()).count();
}

}  // namespace

const char* to_text(Doing doing) {
  switch (doing) {
    case Doing::kStarting:
      return "starting";
    case Doing::kComputing:
      return "computing";
    case Doing::kBackward:
      return "backward";
    case Doing::kWaiting:
      return "waiting";
    case Doing::kLoading:
      return "loading";
    case Doing::kSaving:
      return "saving";
    case Doing::kReForming:
      return "re-forming";
    case Doing::kWaitsToJoin:
      return "waits to join";
  }
  return "?";
}

// A process that the rank has started has the variable, too, but seldom the descriptor.
std::shared_ptr<Gauges> Gauges::of_process() {
  const char* const address = std::getenv(kGaugesVariable);
  int fd = -1;
  unsigned long long inode = 0;
  if (address == nullptr || std::sscanf(address, "%d:%llu", &fd, &inode) != 2 ||
      inode_of(fd) != inode) {
    return std::make_shared<Gauges>();
  }
  void* const memory =
      ::mmap(nullptr, sizeof(GaugeValues), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (memory == MAP_FAILED) return std::make_shared<Gauges>();  // NOLINT: the system's macro casts
  auto* const values = static_cast<GaugeValues*>(memory);
  if (values->version == 0) {
    *values = GaugeValues();
    store(values->version, kVersion);
  }
  return {new Gauges(values), [memory](Gauges* gauges) {
            delete gauges;
            ::munmap(memory, sizeof(GaugeValues));
          }};
}

void Gauges::set_place(int rank, int size, int generation) {
  store(values_->rank, rank);
  store(values_->size, size);
  store(values_->generation, generation);
}

void Gauges::begin_wait(std::int32_t what, std::int32_t for_rank,
                        std::chrono::steady_clock::time_point since) {
  store(values_->wait_for, for_rank);
  store(values_->wait_since_ns, ns_of(since));
  store(values_->wait_what, what);
}

bool Gauges::take_steps(int model) {
  if (values_->stepper == 0) store(values_->stepper, model + 1);
  return values_->stepper == model + 1;
}

void Gauges::leave_steps(int model) {
  if (values_->stepper == model + 1) store(values_->stepper, 0);
}

void Gauges::end_step(std::int64_t steps, std::chrono::steady_clock::time_point now,
                      std::chrono::nanoseconds waited, std::int64_t bytes) {
  const std::int64_t now_ns = ns_of(now);
  if (values_->step_ended_ns != 0) {
    store(values_->step_ns, now_ns - values_->step_ended_ns);
    store(values_->stepping_ns, values_->stepping_ns + values_->step_ns);
    store(values_->waited_ns, values_->waited_ns + waited.count());
  }
  store(values_->step_ended_ns, now_ns);
  store(values_->bytes, values_->bytes + bytes);
  store(values_->steps, steps);
}

void Gauges::set_loss(std::int64_t step, double loss) {
  store(values_->loss, loss);
  store(values_->loss_step, step);
}

Fd make_gauges() {
  Fd memory = make_memfd("lockstep-gauges");
  if (::ftruncate(memory.get(), sizeof(GaugeValues)) != 0) {
    throw_errno("cannot make memory for the gauges of a rank", "Free some memory.");
  }
  return memory;
}

std::string gauges_address(int fd) { return text::format("{}:{}", fd, inode_of(fd)); }

std::optional<GaugeValues> read_gauges(int fd) {
  GaugeValues values;
  const ssize_t count = ::pread(fd, &values, sizeof values, 0);
  if (count != static_cast<ssize_t>(sizeof values) || values.version != kVersion) return {};
  return values;
}

}  // namespace lockstep
