#include "checkpoint/checkpointer.h"

#include <lockstep/error.h>
#include <torch/nn/module.h>
#include <unistd.h>

#include <algorithm>

#include "base/cause.h"
#include "base/log.h"
#include "base/purpose.h"
#include "base/text.h"
#include "checkpoint/tensors.h"
#include "world/exchange.h"

namespace lockstep {
namespace {

// Signals that have come, a bit each: what a handler may write to has to be outside of all objects.
std::atomic<std::uint64_t> signals_seen = 0;
static_assert(std::atomic<std::uint64_t>::is_always_lock_free);

void note_signal(int signal) { signals_seen |= std::uint64_t{1} << signal; }

// Which of these has come?
bool has_come(std::uint64_t signals) { return (signals_seen & signals) != 0; }

}  // namespace

std::string failure_text(const std::exception_ptr& failure, int rank) {
  return failure ? to_text(cause_of(failure, rank)) : std::string();
}

std::string to_text(const Json& json) {
  return json.dump(-1, ' ', false, Json::error_handler_t::replace);
}

Checkpointer::Impl::Impl(const std::string& its_folder, World its_world,
                         const CheckpointOptions& its_options)
    : world(std::move(its_world)), options(its_options), path(its_folder) {
  if (options.keep_last < 0 || options.keep_every < 0) {
    throw UsageError({.rank = world.global_rank(), .operation = "Checkpointer"},
                     text::format("keep_last is {}, keep_every is {}.\nGive 0 or more.",
                                  options.keep_last, options.keep_every));
  }
  parts.push_back(random_part(world));
  if (!world.is_waiting()) settle();  // a newcomer to an elastic job leaves the folder alone
}

void Checkpointer::Impl::settle_if_changed() {
  if (settled_in == world.generation() && !group.empty()) return;
  if (world.is_waiting()) {
    throw UsageError({.rank = world.global_rank(), .operation = "Checkpointer"},
                     "This process replaces a lost rank, and the others have not taken it in yet.\n"
                     "Save inside Elastic::run().");
  }
  settle();
}

// After the ranks have changed, another may be the leader.
void Checkpointer::Impl::settle() {
  folder.reset();
  group.clear();
  const PurposeScope purpose(Purpose::kCheckpointer);
  const ErrorPlace place{.rank = world.global_rank(), .operation = "Checkpointer"};
  // Ranks that see each other's probes see the same folder.
  Json mine = {{"probe", ""}};
  try {
    mine["probe"] = leave_probe(path);
  } catch (const std::exception&) {
    mine["failure"] = failure_text(std::current_exception(), world.global_rank());
  }
  std::vector<std::string> failures;
  const auto all = exchange_texts(world, to_text(mine));
  for (int rank = 0; rank < world.size(); ++rank) {
    const Json its = Json::parse(all[static_cast<std::size_t>(rank)]);
    failures.push_back(its.value("failure", ""));
    const std::string probe = path + "/" + its.at("probe").get<std::string>();
    if (rank == world.rank() || ::access(probe.c_str(), F_OK) == 0) group.push_back(rank);
  }
  throw_first_cause(world, failures, place);
  world.barrier();
  ::unlink((path + "/" + mine.at("probe").get<std::string>()).c_str());
  std::exception_ptr failure;
  std::int64_t newest = -1;
  try {
    if (is_leader()) {
      folder = std::make_unique<CheckpointFolder>(path);
      folder->remove_orphans();
    }
    for (const CheckpointName& name : list_checkpoints(path)) {
      newest = std::max(newest, name.number);
    }
  } catch (const std::exception&) {
    failure = std::current_exception();
  }
  throw_first_cause(world, exchange_texts(world, failure_text(failure, world.global_rank())),
                    place);
  for (const std::string& text : exchange_texts(world, std::to_string(newest))) {
    next_number = std::max<std::int64_t>(next_number, std::stoll(text) + 1);
  }
  settled_in = world.generation();
}

Checkpointer::Impl::~Impl() {
  *signal_bits = 0;  // what DDP looks at, if it is still there
  for (const auto& [signal, before] : signals) {
    ::sigaction(signal, &before, nullptr);
    signals_seen &= ~(std::uint64_t{1} << signal);
  }
  if (!writer.joinable()) return;
  // When an error ends the program, other ranks may never come.
  if (std::uncaught_exceptions() > uncaught) is_cancelled = true;
  writer.join();
  if (writer_failure) {
    Log(world.global_rank())
        .warning("the last checkpoint was not saved: {}",
                 cause_of(writer_failure, world.global_rank()).message);
  }
}

bool Checkpointer::Impl::is_on_one_host() const { return world.local_size() == world.size(); }

void Checkpointer::Impl::check_same_parts(const char* operation) const {
  std::vector<std::string> lines;
  for (const Part& part : parts) {
    lines.push_back(part.name + (part.is_collective ? ", by all ranks together" : ""));
  }
  lines.push_back(text::format("{} wrapped models", ddps.size()));
  check_same_lines(world, lines, operation, "Things that were added to the Checkpointer",
                   "Call add() for the same things, in the same order, on all ranks.");
}

Checkpointer::Checkpointer(const std::string& folder, World world, const CheckpointOptions& options)
    : impl_(std::make_unique<Impl>(folder, std::move(world), options)) {}
Checkpointer::~Checkpointer() = default;
Checkpointer::Checkpointer(Checkpointer&&) noexcept = default;
Checkpointer& Checkpointer::operator=(Checkpointer&&) noexcept = default;

namespace {

void add_part(std::vector<Part>& parts, Part part, int rank) {
  const auto is_it = [&](const Part& one) { return one.name == part.name; };
  if (std::ranges::any_of(parts, is_it) || part.name.empty()) {
    throw UsageError({.rank = rank, .operation = "Checkpointer::add"},
                     text::format("There is something by the name '{}' already.\nGive each a name "
                                  "of its own.",
                                  part.name));
  }
  parts.push_back(std::move(part));
}

}  // namespace

Checkpointer& Checkpointer::add(std::shared_ptr<torch::nn::Module> model, const std::string& name) {
  add_part(impl_->parts, part_of(model, name), impl_->world.global_rank());
  return *this;
}

Checkpointer& Checkpointer::add(const std::vector<NamedTensor>& tensors, const std::string& name) {
  add_part(impl_->parts, part_of([tensors] { return tensors; }, name), impl_->world.global_rank());
  return *this;
}

Checkpointer& Checkpointer::add(torch::optim::Optimizer& optimizer, const std::string& name) {
  add_part(impl_->parts, part_of(optimizer, name), impl_->world.global_rank());
  return *this;
}

Checkpointer& Checkpointer::add(optim::Schedule& schedule, const std::string& name) {
  add_part(impl_->parts, part_of(schedule, name), impl_->world.global_rank());
  return *this;
}

Checkpointer& Checkpointer::add(GradScaler& scaler, const std::string& name) {
  add_part(impl_->parts, part_of(scaler, name), impl_->world.global_rank());
  return *this;
}

Checkpointer& Checkpointer::add(WeightAverage& average, const std::string& name) {
  add_part(impl_->parts, part_of(average, name), impl_->world.global_rank());
  return *this;
}

Checkpointer& Checkpointer::add(PeriodicAverager& averager, const std::string& name) {
  add_part(impl_->parts, part_of(averager, name), impl_->world.global_rank());
  return *this;
}

Checkpointer& Checkpointer::add(HierarchicalAverager& averager, const std::string& name) {
  add_part(impl_->parts, part_of(averager, name), impl_->world.global_rank());
  return *this;
}

Checkpointer& Checkpointer::add(DistributedSampler& sampler, const std::string& name,
                                std::function<std::size_t()> used) {
  add_part(impl_->parts,
           part_of([&sampler, used = std::move(
                                  used)] { return used ? sampler.state(used()) : sampler.state(); },
                   [&sampler](const SamplerState& state) { sampler.load_state(state); },
                   [&sampler](const SamplerState& state, const World& world) {
                     sampler.move_to(world, state);
                   },
                   name),
           impl_->world.global_rank());
  return *this;
}

Checkpointer& Checkpointer::add(LoaderBase& loader, const std::string& name) {
  add_part(impl_->parts, part_of(loader, impl_->world, name), impl_->world.global_rank());
  return *this;
}

Checkpointer& Checkpointer::add(const std::string& name, std::function<std::string()> save,
                                std::function<void(const std::string&)> load) {
  add_part(impl_->parts, part_of(name, std::move(save), std::move(load)),
           impl_->world.global_rank());
  return *this;
}

Checkpointer& Checkpointer::add_per_rank(
    const std::string& name, std::function<std::string()> save,
    std::function<void(const std::string&)> load,
    std::function<void(const std::vector<std::string>&)> load_others) {
  add_part(
      impl_->parts,
      per_rank_part(impl_->world, name, std::move(save), std::move(load), std::move(load_others)),
      impl_->world.global_rank());
  return *this;
}

Checkpointer& Checkpointer::add(DistributedDataParallel& ddp) {
  if (std::ranges::find(impl_->ddps, &ddp) == impl_->ddps.end()) {
    impl_->ddps.push_back(&ddp);
    const std::size_t number = impl_->ddps.size();
    if (ddp.logical_state().num_ranks > 0) {
      const std::string name = number == 1 ? "logical" : text::format("logical{}", number);
      add_part(impl_->parts, part_of(ddp, name), impl_->world.global_rank());
    }
  }
  impl_->watch_signals();
  return *this;
}

void Checkpointer::Impl::watch_signals() {
  if (signals.empty()) return;
  for (DistributedDataParallel* const ddp : ddps) {
    ddp->stop_when([bits = signal_bits] { return has_come(*bits); });
  }
}

void Checkpointer::on_signal(int signal) {
  const ErrorPlace place{.rank = impl_->world.global_rank(),
                         .operation = "Checkpointer::on_signal"};
  if (impl_->ddps.empty() && impl_->world.size() > 1) {
    throw UsageError(place, "The ranks cannot agree on a step to stop at.\nCall add(ddp) first.");
  }
  struct sigaction action {};
  struct sigaction before {};
  action.sa_handler = note_signal;
  action.sa_flags = SA_RESTART;
  if (signal < 1 || signal >= 64 || ::sigaction(signal, &action, &before) != 0) {
    throw UsageError(place,
                     text::format("Signal {} cannot be caught.\nUse SIGTERM or SIGUSR1.", signal));
  }
  impl_->signals.emplace_back(signal, before);
  *impl_->signal_bits |= std::uint64_t{1} << signal;
  impl_->watch_signals();
}

bool Checkpointer::must_stop() const {
  if (impl_->ddps.empty()) return has_come(*impl_->signal_bits);
  return std::ranges::any_of(impl_->ddps,
                             [](const DistributedDataParallel* ddp) { return ddp->must_stop(); });
}

}  // namespace lockstep
